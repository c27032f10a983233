"""Segments of models: documents that are packed into a sequence, and padding."""

import numpy as np
import pytest
from setting import env, normal, parameters

from fsdpx import nn
from fsdpx.errors import DataError

rng = np.random.default_rng(3)


def test_packed_documents_give_what_each_gives_alone():
    """Positions go on over documents: rotary positions count differences only."""
    packed = nn.Llama(23, 16, 2, 4, 12, kv_heads=2, segments=True)
    alone = nn.Llama(23, 16, 2, 4, 12, kv_heads=2)
    p, x = parameters(alone), rng.integers(0, 23, (2, 12))
    y, _ = packed.forward(env(), p, (x, np.array([[7] * 5 + [3] * 7, [1] * 8 + [2] * 4])))
    for row, cut in ((0, 5), (1, 8)):
        for part in (slice(0, cut), slice(cut, 12)):
            want, _ = alone.forward(env(), p, x[row : row + 1, part])
            np.testing.assert_allclose(y[row, part], want[0], rtol=1e-10, atol=1e-12)


def test_padding_does_not_show_in_a_bit():
    model = nn.Bert(23, 8, 2, 2, 12)
    p, kinds = parameters(model), np.zeros((2, 12), np.int64)
    mask = np.ones((2, 12), np.int64)
    mask[0, 7:], mask[1, :4] = 0, 0
    x = rng.integers(0, 23, (2, 12))
    y, z = (model.forward(env(), p, (a, kinds, mask))[0] for a in (x, np.where(mask == 1, x, 5)))
    assert np.array_equal(y[mask == 1], z[mask == 1])
    assert not np.array_equal(y, z)


def test_one_table_of_angles_serves_many_lengths_and_layers():
    here = env()
    longer = {"rope_type": "dynamic", "factor": 3.0}
    for time in (3, 5, 8, 6):
        x = normal(2, time, 8)
        y, _ = nn.Rotary(4).forward(here, {}, x)
        want, _ = nn.Rotary(4).forward(env(), {}, x)
        assert (y == want).all()
        angle = (np.arange(time)[:, None] * 10000.0 ** (-np.arange(2) / 2))[:, None]
        heads = x.reshape(2, time, 2, 4)
        turned = heads[..., :2] * np.cos(angle) - heads[..., 2:] * np.sin(angle)
        np.testing.assert_allclose(y.reshape(heads.shape)[..., :2], turned, rtol=1e-13, atol=1e-15)
    assert [len(cos) for cos, _ in here.constants.values()] == [4, 8]
    for time in (4, 9):  # beyond its length each length has angles of its own
        nn.Rotary(4, rope_scaling=longer, seq_len=4).forward(here, {}, normal(1, time, 4))
    nn.Rotary(4, theta=500.0).forward(here, {}, normal(1, 4, 4).astype(np.float32))
    assert [len(cos) for cos, _ in here.constants.values()] == [4, 8, 4, 4]


def test_segments_that_do_not_fit_are_refused():
    attention = nn.Attention(2, 1, 4, segments=True)
    q, k, segments = normal(2, 3, 8), normal(2, 3, 4), np.zeros((2, 3), np.int64)
    with pytest.raises(DataError, match="wants whole numbers as segments, got float64"):
        attention.forward(env(), {}, (q, k, k, segments * 1.0))
    with pytest.raises(ValueError, match=r"twice \(.., 1 x 4\) and segments .*, got .* \(2, 3, 4\), \(2, 2\)"):
        attention.forward(env(), {}, (q, k, k, segments[:, :2]))
