"""Kernels as Numba code, for NumPy arrays of float32 and float64; same names and signatures as the plain ones."""

from fsdpx.array.kernels.compiled.activation import (
    add,
    add_bias,
    bias_gelu,
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
from fsdpx.array.kernels.compiled.attention import attention, attention_backward, rotate, softmax, softmax_backward
from fsdpx.array.kernels.compiled.convolution import conv2d, conv2d_backward_input, conv2d_backward_params
from fsdpx.array.kernels.compiled.half import add_widened, round_randomly, store
from fsdpx.array.kernels.compiled.images import avg_pool2d, avg_pool2d_backward, max_pool2d, max_pool2d_backward
from fsdpx.array.kernels.compiled.loss import (
    cross_entropy,
    cross_entropy_backward,
    embedding_backward,
    squared_error,
    squared_error_backward,
)
from fsdpx.array.kernels.compiled.norm import (
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
from fsdpx.array.kernels.compiled.normal import drop, drop_backward, normal

__all__ = [
    "add", "add_bias", "add_widened", "attention", "attention_backward", "avg_pool2d", "avg_pool2d_backward",
    "bias_gelu", "channel_affine", "channel_norm_backward", "channel_squares", "channel_sums", "channel_sums_with",
    "conv2d", "conv2d_backward_input", "conv2d_backward_params", "cross_entropy", "cross_entropy_backward", "drop",
    "drop_backward", "embedding_backward", "gated", "gated_backward", "gelu", "gelu_backward", "gelu_recompute",
    "layer_norm", "layer_norm_backward_input", "layer_norm_backward_params", "max_pool2d", "max_pool2d_backward",
    "normal", "relu", "relu_backward", "rms_norm", "rms_norm_backward_input", "rms_norm_backward_params", "rotate",
    "round_randomly", "sigmoid", "silu", "silu_backward", "softmax", "softmax_backward", "square_sum", "square_sums",
    "squared_error", "squared_error_backward", "store", "sum_rows",
]  # fmt: skip
