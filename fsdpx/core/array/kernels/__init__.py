"""Kernels: the numerical functions of layers. Each kernel has a plain array implementation and, where faster, a
compiled one.

A kernel `f(xp, ...)` runs on NumPy, CuPy and shape-only arrays of float64 and float32. For float16 and bf16 arrays,
kernels compute in float32 and round the results once. Arrays may have 0 rows. A file is imported when one of its
kernels is first used. The file of the same name in `compiled` is imported when the kernel first runs as machine code.
Numba is imported only if something must be compiled.
"""

from typing import TYPE_CHECKING

from fsdpx.core.array.kernels.choice import get_implementation_name as get_implementation_name
from fsdpx.core.array.kernels.choice import use_mode as use_mode
from fsdpx.core.base.lazy_names import make_lazy_attributes

if TYPE_CHECKING:
    from fsdpx.core.array.kernels.activation import (
        add as add, add_bias as add_bias, bias_gelu as bias_gelu, gated as gated, gated_backward as gated_backward,
        gelu as gelu, gelu_backward as gelu_backward, recompute_gelu_and_backward as recompute_gelu_and_backward,
        relu as relu, relu_backward as relu_backward, sigmoid as sigmoid, silu as silu, silu_backward as silu_backward,
        sum_rows as sum_rows,
    )  # fmt: skip
    from fsdpx.core.array.kernels.dot_product_attention import (
        attention as attention, attention_backward as attention_backward, rotate as rotate, softmax as softmax,
        softmax_backward as softmax_backward,
    )  # fmt: skip
    from fsdpx.core.array.kernels.dropout import (
        drop as drop, drop_backward as drop_backward,
    )  # fmt: skip
    from fsdpx.core.array.kernels.half import (
        add_widened as add_widened, cast_float_to_dtype as cast_float_to_dtype, round_randomly as round_randomly,
        store as store, to_float32 as to_float32,
    )  # fmt: skip
    from fsdpx.core.array.kernels.loss import (
        binary_entropy as binary_entropy, binary_entropy_backward as binary_entropy_backward,
        cross_entropy as cross_entropy, cross_entropy_backward as cross_entropy_backward,
        embedding_backward as embedding_backward, huber_error as huber_error,
        huber_error_backward as huber_error_backward, huber_error_gradient_and_sum as huber_error_gradient_and_sum,
        squared_error as squared_error,
        squared_error_backward as squared_error_backward,
        squared_error_gradient_and_sum as squared_error_gradient_and_sum,
    )  # fmt: skip
    from fsdpx.core.array.kernels.memory_order import channels_last as channels_last
    from fsdpx.core.array.kernels.norm import (
        channel_affine as channel_affine, channel_norm_backward_input as channel_norm_backward_input,
        batch_norm_backward_factors as batch_norm_backward_factors,
        batch_norm_scales_and_running_stats as batch_norm_scales_and_running_stats, channel_squares as channel_squares,
        channel_sums as channel_sums, channel_gradient_sums as channel_gradient_sums, layer_norm as layer_norm,
        layer_norm_backward_input as layer_norm_backward_input,
        layer_norm_backward_params as layer_norm_backward_params, rms_norm as rms_norm,
        rms_norm_backward_input as rms_norm_backward_input, rms_norm_backward_params as rms_norm_backward_params,
    )  # fmt: skip
    from fsdpx.core.array.kernels.rectifiers import (
        elu as elu, elu_backward as elu_backward, leaky_relu as leaky_relu, leaky_relu_backward as leaky_relu_backward,
        sigmoid_backward as sigmoid_backward, softplus as softplus, softplus_backward as softplus_backward,
        tanh_backward as tanh_backward,
    )  # fmt: skip
    from fsdpx.core.array.kernels.squares import (
        square_sum as square_sum, sum_squares_of_blocks as sum_squares_of_blocks,
    )  # fmt: skip

__getattr__, __dir__, __all__ = make_lazy_attributes(__name__)
