"""Kernels as Numba code, for NumPy arrays of float32 and float64; same names and signatures as the plain ones."""

from fsdpx.array.kernels.compiled.activation import gelu, gelu_backward, sigmoid, silu, silu_backward
from fsdpx.array.kernels.compiled.attention import attention, attention_backward
from fsdpx.array.kernels.compiled.embedding import embedding_backward
from fsdpx.array.kernels.compiled.loss import cross_entropy, cross_entropy_backward
from fsdpx.array.kernels.compiled.norm import (
    layer_norm,
    layer_norm_backward_input,
    layer_norm_backward_params,
    rms_norm,
    rms_norm_backward_input,
    rms_norm_backward_params,
)
from fsdpx.array.kernels.compiled.reduction import square_sum
from fsdpx.array.kernels.compiled.softmax import softmax, softmax_backward

__all__ = [
    "attention",
    "attention_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "embedding_backward",
    "gelu",
    "gelu_backward",
    "layer_norm",
    "layer_norm_backward_input",
    "layer_norm_backward_params",
    "rms_norm",
    "rms_norm_backward_input",
    "rms_norm_backward_params",
    "sigmoid",
    "silu",
    "silu_backward",
    "softmax",
    "softmax_backward",
    "square_sum",
]
