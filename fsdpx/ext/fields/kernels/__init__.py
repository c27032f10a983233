"""Attention, convolution, Fourier, group norm, pooling and resampling kernels for fields. All have a plain array
version, and most also have a compiled version."""

from fsdpx.ext.fields.kernels.convolution import WindowStrides as WindowStrides
from fsdpx.ext.fields.kernels.convolution import correlate as correlate
from fsdpx.ext.fields.kernels.convolution import correlate_backward_input as correlate_backward_input
from fsdpx.ext.fields.kernels.convolution import correlate_backward_params as correlate_backward_params
from fsdpx.ext.fields.kernels.fourier import fourier_along_dim as fourier_along_dim
from fsdpx.ext.fields.kernels.fourier import sum_squares_by_index as sum_squares_by_index
from fsdpx.ext.fields.kernels.group_norm import group_norm as group_norm
from fsdpx.ext.fields.kernels.group_norm import group_norm_affine as group_norm_affine
from fsdpx.ext.fields.kernels.group_norm import group_norm_backward as group_norm_backward
from fsdpx.ext.fields.kernels.group_norm import group_norm_backward_input as group_norm_backward_input
from fsdpx.ext.fields.kernels.group_norm import (
    channel_means_and_square_deviations as channel_means_and_square_deviations,
    group_norm_gradient_sums_by_channel as group_norm_gradient_sums_by_channel,
)  # fmt: skip
from fsdpx.ext.fields.kernels.neighborhood import neighborhood_attention as neighborhood_attention
from fsdpx.ext.fields.kernels.neighborhood import neighborhood_attention_backward as neighborhood_attention_backward
from fsdpx.ext.fields.kernels.pool import avg_pool as avg_pool
from fsdpx.ext.fields.kernels.pool import avg_pool_backward as avg_pool_backward
from fsdpx.ext.fields.kernels.pool import max_pool as max_pool
from fsdpx.ext.fields.kernels.pool import max_pool_backward as max_pool_backward
from fsdpx.ext.fields.kernels.resample import CellMatrix as CellMatrix
from fsdpx.ext.fields.kernels.resample import multiply_along_dim as multiply_along_dim
from fsdpx.ext.fields.kernels.stencil import ShiftedRange as ShiftedRange
from fsdpx.ext.fields.kernels.stencil import apply_stencil as apply_stencil
