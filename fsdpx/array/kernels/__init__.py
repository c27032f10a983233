"""Kernels: what layers compute, each as plain array code and, where it is faster, as compiled code.

`f(xp, ...)` runs on NumPy, CuPy and shape-only arrays, in float64 and float32; float16 and bf16 arrays are computed in
float32 and rounded once. Rows may be 0. Nothing is compiled, and Numba is not imported, before a kernel first needs it.
"""

from typing import Any

from fsdpx.array.kernels import choice
from fsdpx.array.kernels.activation import (
    add,
    add_bias,
    bias_gelu,
    drop,
    drop_backward,
    gated,
    gated_backward,
    gelu,
    gelu_backward,
    gelu_recompute,
    relu,
    relu_backward,
    sigmoid,
    silu,
    silu_backward,
    sum_rows,
)
from fsdpx.array.kernels.attention import attention, attention_backward, rotate, softmax, softmax_backward
from fsdpx.array.kernels.choice import NUMBA, chosen, use
from fsdpx.array.kernels.convolution import (
    avg_pool,
    avg_pool_backward,
    conv2d,
    conv2d_backward_input,
    conv2d_backward_params,
    max_pool,
    max_pool_backward,
)
from fsdpx.array.kernels.correlation import correlate, correlate_backward_input, correlate_backward_params
from fsdpx.array.kernels.half import add_widened, narrowed, round_randomly, store, widened
from fsdpx.array.kernels.loss import (
    binary_entropy,
    binary_entropy_backward,
    cross_entropy,
    cross_entropy_backward,
    embedding_backward,
    squared_error,
    squared_error_backward,
)
from fsdpx.array.kernels.norm import (
    channel_affine,
    channel_norm_backward,
    channel_squares,
    channel_sums,
    channel_sums_with,
    layer_norm,
    layer_norm_backward_input,
    layer_norm_backward_params,
    rms_norm,
    rms_norm_backward_input,
    rms_norm_backward_params,
    square_sum,
    square_sums,
)

__all__ = [
    "NUMBA", "add", "add_bias", "add_widened", "attention", "attention_backward", "avg_pool",
    "avg_pool_backward", "bias_gelu", "binary_entropy", "binary_entropy_backward", "channel_affine",
    "channel_norm_backward", "channel_squares", "channel_sums", "channel_sums_with", "chosen", "conv2d",
    "conv2d_backward_input", "conv2d_backward_params", "correlate", "correlate_backward_input",
    "correlate_backward_params", "cross_entropy", "cross_entropy_backward", "drop", "drop_backward",
    "embedding_backward", "gated", "gated_backward", "gelu", "gelu_backward", "gelu_recompute", "layer_norm",
    "layer_norm_backward_input", "layer_norm_backward_params", "max_pool", "max_pool_backward", "narrowed",
    "relu", "relu_backward", "rms_norm", "rms_norm_backward_input", "rms_norm_backward_params", "rotate",
    "round_randomly", "sigmoid", "silu", "silu_backward", "softmax", "softmax_backward", "square_sum",
    "square_sums", "squared_error", "squared_error_backward", "store", "sum_rows", "use", "widened",
]  # fmt: skip


def _compiled() -> dict[str, Any]:
    from fsdpx.array.kernels.compiled import KERNELS

    return KERNELS


choice.load = _compiled
