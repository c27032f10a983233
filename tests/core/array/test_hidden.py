"""Positions that attention hides add nothing to others, not even NaN and Inf."""

from typing import Any

import numpy as np
import pytest

from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.random import Random
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.nn.attention_math import AttentionHeads
from fsdpx.nn.layer import LayerContext

TIME, ODD = 90, 40
SEGMENTS = np.repeat([[0, 1, 2], [0, 2, 0]], [30, 30, 30], axis=1)
MASKS = {
    "causal": (True, 0, None), "window": (True, 9, None), "segments": (False, 0, SEGMENTS),
    "causal segments": (True, 0, SEGMENTS), "all": (True, 17, SEGMENTS),
}  # fmt: skip


def seen_by(causal: bool, window: int, segments: Any) -> np.ndarray:
    """(samples, rows, columns)."""
    gap = np.arange(TIME)[:, None] - np.arange(TIME)
    seen = np.ones((2, TIME, TIME), bool)
    if causal:
        seen &= (gap >= 0) & ((gap < window) | (window == 0))
    if segments is not None:
        seen &= segments[:, :, None] == segments[:, None, :]
    return seen


def touched(seen: np.ndarray, of_query: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows (samples, time) to which position ODD may come, of o and dq, and of dk and dv. of_query: in q or do."""
    rows = np.zeros(seen.shape[:2], bool)
    rows[:, ODD] = True
    if not of_query:
        rows |= seen[:, :, ODD]
    columns = (rows[:, :, None] & seen).any(axis=1)
    columns[:, ODD] |= not of_query
    return rows, columns


@pytest.mark.parametrize(("kind", "value"), [("float64", np.nan), ("float32", np.inf), ("bf16", -np.inf)])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("masks", MASKS)
def test_plain_attention(kind: str, masks: str, name: str, value: float) -> None:
    rng = np.random.default_rng(0)
    sizes = {"q": 4, "k": 2, "v": 2, "do": 4}
    arrays = {one: rng.normal(size=(2, many, TIME, 8)).astype(parse_dtype(kind)) for one, many in sizes.items()}
    causal, window, segments = MASKS[masks]

    def run() -> list[np.ndarray]:
        q, k, v, do = arrays.values()
        with kernels.use_mode("plain"), np.errstate(all="ignore"):
            o, lse = kernels.attention(np, q, k, v, causal, 0.3, window, segments)
            more = kernels.attention_backward(np, q, k, v, o, lse, do, causal, 0.3, window, segments)
        return [o, *more]

    clean = run()
    arrays[name][:, :, ODD, 3] = value
    rows, columns = touched(seen_by(causal, window, segments), name in ("q", "do"))
    for got, want, reached in zip(run(), clean, (rows, rows, columns, columns), strict=True):
        kept = np.broadcast_to(~reached[:, None], got.shape[:3])
        assert got[kept].tobytes() == want[kept].tobytes()
        assert np.isfinite(got[kept].astype("f4")).all()
    if name == "v":
        found = run()[0][:, :, ODD, 3].astype("f4")
        assert np.array_equal(found, np.full_like(found, value), equal_nan=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("what", ["x", "dy"])
def test_dropped_weights(what: str, value: float) -> None:
    """A causal layer with dropout: positions before the odd one, and the gradients of those behind it that it does not
    see."""
    rng = np.random.default_rng(0)
    heads = AttentionHeads(2, 8, causal=True, dropout=0.2)
    arrays = {"x": rng.normal(size=(2, TIME, 48)).astype("f4"), "dy": rng.normal(size=(2, TIME, 16)).astype("f4")}

    def run() -> tuple[np.ndarray, np.ndarray]:
        env = LayerContext(np, make_single_rank_axes(), Random(0), training=True)
        with np.errstate(all="ignore"):
            y, saved = heads.forward(env, arrays["x"])
            return y, heads.backward(env, saved, arrays["dy"])

    (y, dx), _ = run(), arrays[what][:, ODD].fill(value)
    again, slopes = run()
    assert again[:, :ODD].tobytes() == y[:, :ODD].tobytes()
    if what == "dy":
        assert again.tobytes() == y.tobytes()
        assert slopes[:, ODD + 1 :].tobytes() == dx[:, ODD + 1 :].tobytes()
    else:
        assert np.isnan(again[:, ODD]).all()
        dq = (slice(None), slice(ODD), slice(16))
        assert slopes[dq].tobytes() == dx[dq].tobytes()
