"""Segments of models: documents that are packed into a sequence, and padding."""

import numpy as np
import pytest
from setting import env, normal, parameters

from fsdpx import nn
from fsdpx.errors import ConfigError, DataError

rng = np.random.default_rng(3)


def test_packed_documents_give_what_each_gives_alone():
    """Positions go on over documents: rotary positions count differences only."""
    packed = nn.Llama(23, 16, 2, 4, 12, kv_heads=2, segments=True)
    alone = nn.Llama(23, 16, 2, 4, 12, kv_heads=2)
    p, x = parameters(alone), rng.integers(0, 23, (2, 12))
    segments = np.array([[7] * 5 + [3] * 7, [1] * 8 + [2] * 4])
    y, _ = packed.forward(env(), p, (x, segments))
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
    other = np.where(mask == 1, x, 5)
    y, z = (model.forward(env(), p, (a, kinds, mask))[0] for a in (x, other))
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


def test_what_does_not_fit_is_said():
    attention = nn.Attention(2, 1, 4, segments=True)
    q, k, segments = normal(2, 3, 8), normal(2, 3, 4), np.zeros((2, 3), np.int64)
    with pytest.raises(DataError, match="wants whole numbers as segments, got float64"):
        attention.forward(env(), {}, (q, k, k, segments * 1.0))
    with pytest.raises(ValueError, match=r"twice \(.., 1 x 4\) and segments .*, got .* \(2, 3, 4\), \(2, 2\)"):
        attention.forward(env(), {}, (q, k, k, segments[:, :2]))
    for wrong, text in (
        (lambda: nn.Attention(3, 2, 4), "n_heads 3 is not a multiple of kv_heads 2"),
        (lambda: nn.Attention(2, 2, 4, causal=False, window=3), "a window needs causal=True"),
        (lambda: nn.Rotary(5), "d_head must be even, got 5"),
        (lambda: nn.Rotary(2, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' needs d_head >= 4"),
        (lambda: nn.Rotary(4, rope_scaling={"rope_type": "su"}), "rope_type must be one of default, linear, .* 'su'"),
        (lambda: nn.Rotary(4, rope_scaling={"type": "yarn"}), "'yarn' needs factor, original_max_position_embeddings"),
        (lambda: nn.GatedActivation("tanh"), "GatedActivation: activation must be one of silu, .*, got 'tanh'"),
        (lambda: nn.Llama(9, 8, 1, 2, 4, experts=2, bias=True), "experts have activation='silu' and no bias"),
        (lambda: nn.GPT(9, 8, 1, 2, 4, activation="swish"), "activation must be one of gelu, .*, got 'swish'"),
        (lambda: nn.ViT(9, 4, 8, 1, 2, 3), "PatchEmbedding: images of 9 pixels are not a multiple of patches of 4"),
        (lambda: nn.Bert(9, 8, 1, 2, 4, dropout=0.1), r"dropout is that of the head for classes: give classes="),
        (lambda: nn.Bert(9, 8, 1, 2, 4, classes=0), "Bert: classes must be a whole number >= 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            wrong()
