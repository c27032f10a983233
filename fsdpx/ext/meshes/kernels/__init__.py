"""Sums, maxima and softmax over segments of edges, as plain array code and as compiled code."""

from fsdpx.ext.meshes.kernels.segments import add_gathered_row_pairs as add_gathered_row_pairs
from fsdpx.ext.meshes.kernels.segments import segment_max as segment_max
from fsdpx.ext.meshes.kernels.segments import segment_softmax as segment_softmax
from fsdpx.ext.meshes.kernels.segments import segment_softmax_backward as segment_softmax_backward
from fsdpx.ext.meshes.kernels.segments import segment_sum as segment_sum
