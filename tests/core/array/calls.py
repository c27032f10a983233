"""Calls of every kernel that has more than one form, with arrays of float64: by which tests compare the forms."""

from functools import partial
from typing import Any

import numpy as np
from present import is_present

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.random import NumberRange

__all__ = ["CALLS", "DY", "ROWS", "SEGMENTS", "B", "N", "Q", "W", "X", "arguments_of", "each", "kernel_of", "noise"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


ROWS, N = 70, 45  # more rows than a part of a sum has, and columns that no block divides
X, DY, W, B = noise(ROWS, N), noise(ROWS, N, seed=1), noise(N, seed=2), noise(N, seed=3)
TARGET = np.random.default_rng(4).integers(0, N, ROWS)
TARGET[::7] = -100
FAR = X.copy()
FAR[0] = -np.inf  # of a row that does not count
BESIDE = np.where(TARGET % 3, TARGET, N)  # some classes are of another rank
INDEX = np.random.default_rng(5).integers(0, 9, ROWS)
MEAN, RSTD = X.mean(1), 1 / np.sqrt(X.var(1) + 1e-5)
LSE = np.log(np.exp(X).sum(1))
Y = np.exp(X - LSE[:, None])

Q, K, V, DO = (noise(2, 3, 5, 4, seed=n) for n in range(4))
K2, V2 = noise(2, 3, 7, 4, seed=5), noise(2, 3, 7, 4, seed=6)  # another length
ATTENDED = kernels.attention(np, Q, K, V, True, 0.4)
ACROSS = kernels.attention(np, Q, K2, V2, False, 0.4)
Q4, DO4 = noise(2, 6, 5, 4, seed=7), noise(2, 6, 5, 4, seed=8)  # pairs of queries share the heads of K and V
SEGMENTS = np.array([[3, 3, 0, 0, 0], [1, 2, 2, 2, 5]])
SHARED = kernels.attention(np, Q4, K, V, True, 0.4, 3, SEGMENTS)
ACROSS4 = kernels.attention(np, Q4, K2, V2, False, 0.4)
APART = kernels.attention(np, Q, K, V, False, 0.4, 0, SEGMENTS)

CHANNELS = [(noise(n, c, *cells), noise(n, c, *cells, seed=1), noise(c, seed=2)) for n, c, *cells in (
    (5, 3), (2, 4, 7), (3, 2, 90, 70),
)]  # fmt: skip
C = CHANNELS[1][2]

CALLS: dict[str, list[tuple[Any, ...]]] = {
    "layer_norm": [(X, W, B, 1e-5), (X, None, None, 0.1)],
    "layer_norm_backward_input": [(X, W, MEAN, RSTD, DY), (X, None, MEAN, RSTD, DY)],
    "layer_norm_backward_params": [(X, MEAN, RSTD, DY, W, B), (X, MEAN, RSTD, DY, None, B)],
    "rms_norm": [(X, W, 1e-5), (X, None, 0.1)],
    "rms_norm_backward_input": [(X, W, RSTD, DY)],
    "rms_norm_backward_params": [(X, RSTD, DY, W)],
    "gelu": [(3 * X, "none"), (3 * X, "tanh")],
    "gelu_backward": [(3 * X, DY, "none"), (3 * X, DY, "tanh")],
    "recompute_gelu_and_backward": [(X, DY, "none")],
    "bias_gelu": [(X, B, "tanh"), (X, None, "none")],
    "add": [(X, DY)],
    "add_bias": [(X, B)],
    "sum_rows": [(X, B, True), (X, B, False)],
    "embedding_backward": [(noise(9, N), INDEX, DY)],
    "softmax": [(5 * X,)],
    "softmax_backward": [(Y, DY)],
    "cross_entropy": [(X, TARGET), (X, TARGET, -100, 0.1), (FAR, TARGET)],
    "cross_entropy_backward": [
        (X, TARGET, LSE, 0.3), (X, TARGET, LSE, 0.3, -100, 0.1), (X, BESIDE, LSE, 0.3, -100, 0.1, 3 * N),
    ],
    "attention": [
        (Q, K, V, True, 0.4),
        (Q, K2, V2, False, 0.4),
        (Q4, K2, V2, False, 0.4),
        (Q4, K, V, True, 0.4, 3, SEGMENTS),
        (Q, K, V, False, 0.4, 0, SEGMENTS),
    ],
    "attention_backward": [
        (Q, K, V, *ATTENDED, DO, True, 0.4),
        (Q, K2, V2, *ACROSS, DO, False, 0.4),
        (Q4, K2, V2, *ACROSS4, DO4, False, 0.4),
        (Q4, K, V, *SHARED, DO4, True, 0.4, 3, SEGMENTS),
        (Q, K, V, *APART, DO, False, 0.4, 0, SEGMENTS),
    ],
    "sum_squares_of_blocks": [(X.reshape(-1), 100)],
    "square_sum": [(noise(40_000),)],
    "drop": [(X, NumberRange(1, "a@0", 5, 5 + X.size), 0.3), (X, NumberRange(1, "a@0", 8, 8 + X.size), 0.0)],
    "drop_backward": [(DY, X > 0, 0.3)],
    "relu": [(X,), (np.where(X > 1, np.nan, X),)],
    "relu_backward": [(Y - 0.01, DY)],
    "squared_error": [(X, DY)],
    "channel_sums": [(x,) for x, _, _ in CHANNELS],
    "channel_squares": [(x, c) for x, _, c in CHANNELS],
    "channel_affine": [(x, c, 2 * c, c + 1) for x, _, c in CHANNELS],
    "batch_norm_scales_and_running_stats": [
        (C * C, C, C + 1, C - 1, C * C + 1, 7, 0.1, 0.2), (C * C, C, None, C - 1, C * C + 1, 0, 0.1, 0.2),
        (C * C, None, C + 1, None, None, 1, 0.1, 0.0),
    ],
    "batch_norm_backward_factors": [
        (np.concatenate([C, C + 1]), C * C, weight, n) for weight, n in ((C - 2, 5), (None, 0))
    ],
    "channel_gradient_sums": [(dy, x, c, c * c) for x, dy, c in CHANNELS],
    "channel_norm_backward_input": [(dy, x, c, c + 1, c - 1, c * c) for x, dy, c in CHANNELS],
}  # fmt: skip
if is_present("fields"):
    import window_kernels

    CALLS |= window_kernels.CALLS
DOUBLE = {"batch_norm_scales_and_running_stats": (0, 1), "batch_norm_backward_factors": (0, 1), "channel_squares": (1,),
          "channel_affine": (1, 2, 3), "channel_gradient_sums": (2, 3), "channel_norm_backward_input": (2, 3, 4, 5),
          **(window_kernels.DOUBLE if is_present("fields") else {})}  # fmt: skip
WIDE = {"layer_norm_backward_input": (2, 3), "layer_norm_backward_params": (1, 2), "rms_norm_backward_input": (2,),
        "rms_norm_backward_params": (1,), "cross_entropy_backward": (2,), "attention_backward": (4,),
        "batch_norm_scales_and_running_stats": (3, 4)}  # fmt: skip
"""Arguments that are of the format of sums."""


def kernel_of(name: str) -> Any:
    """A kernel of the core or of an extension, or one of the two casts that are made of another kernel."""
    return choice.KERNELS.get(name) or getattr(kernels, name)


def each(change: Any, value: Any) -> Any:
    """An array, or those of a tuple that says where a gradient goes."""
    if type(value) is tuple:
        return tuple(each(change, one) for one in value)
    return change(value) if isinstance(value, np.ndarray) else value


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(np.dtype(dtype)) if array.dtype == np.float64 else array.copy()


def arguments_of(name: str, arguments: tuple[Any, ...], dtype: str) -> list[Any]:
    """The arguments of a call in a format, as copies: those of sums are of theirs."""
    wide = "float64" if dtype == "float64" else "float32"
    formats = [wide if place in WIDE.get(name, ()) else dtype for place in range(len(arguments))]
    formats = ["float64" if place in DOUBLE.get(name, ()) else kind for place, kind in enumerate(formats)]
    return [each(partial(cast, dtype=kind), value) for value, kind in zip(arguments, formats, strict=True)]
