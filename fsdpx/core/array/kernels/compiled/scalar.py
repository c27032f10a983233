"""Scalar functions that LLVM vectorizes: fused multiply-add, polynomials, exp, and Phi of the normal distribution. The
file also contains functions that read and set the control register of the vector unit (MXCSR), which determines whether
denormals are flushed to 0.

Every operation is explicit, including fused multiply-adds, and none may be reordered. The result for an element is
therefore bitwise identical in the vectorized part and the remainder of a loop, and in loops of any length.
"""

from __future__ import annotations

import math
import platform
from typing import Any

from fsdpx.core.array.jit import jit
from fsdpx.core.array.kernels.activation import SHIFT32, SHIFT64, TAIL32, TAIL64
from fsdpx.core.array.lazy_numba import cgutils, intrinsic, ir, register_jitable, types

__all__ = [
    "constant_like", "exp", "exp_of_negative", "expm1_of_nonpositive", "flush_denormals", "from_ordered_integer",
    "fused_multiply_add", "gaussian_tail", "log_one_plus_fraction", "multiply_high", "read_control_register",
    "restore_control_register", "to_ordered_integer", "unnormalized_gaussian_density", "use_widest_vectors",
]  # fmt: skip

FLOATS = {types.float32: (32, 23, 127), types.float64: (64, 52, 1023)}  # total bits, mantissa bits and exponent bias
# coefficients of e^r for |r| <= log(2) / 2, and of 2^f for |f| <= 1 / 2: minimax polynomials in float32 (error 3e-9),
# Taylor series in float64 (error 1e-17)
EXP32 = (1.0, 1.0, 0.49999993412160154, 0.16666520103720828, 0.04166839427203946, 0.008368780843479404,
         0.001381446495449024)  # fmt: skip
EXP64 = tuple(1.0 / math.factorial(n) for n in range(14))
EXP2_32 = (1.0, 0.6931472029862339, 0.24022647896721894, 0.055503321606673726, 0.009618438611237103,
           0.0013399004265342268, 0.00015353257063246254)  # fmt: skip
EXP2_64 = tuple(math.log(2.0) ** n / math.factorial(n) for n in range(14))

# -log2(e) / 2 as the sum of two numbers
HALF_LOG2E_HIGH32, HALF_LOG2E_LOW32 = -0.7213475108146667, -9.629814955633087e-09
HALF_LOG2E_HIGH64, HALF_LOG2E_LOW64 = -0.7213475204444817, -1.0177636870465517e-17

# log(2) as the sum of two numbers; the product of the first number and n is exact for every integer n that occurs (Cody
# and Waite 1980)
LOG2_HIGH32, LOG2_LOW32 = 0.693145751953125, 1.428606765330187e-06
LOG2_HIGH64, LOG2_LOW64 = 0.6931471803691238, 1.9082149292705877e-10


@intrinsic
def fused_multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c`, rounded once."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, a, a), emit_ir


@intrinsic
def constant_like(typingctx: Any, x: Any, value: Any) -> Any:
    """Convert the float64 constant `value` to the type of x."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[1] if x == types.float64 else builder.fptrunc(arguments[1], arguments[0].type)

    return x(x, types.float64), emit_ir


def make_polynomial(in32: tuple[float, ...], in64: tuple[float, ...]) -> Any:
    """Return a function that evaluates a polynomial by Horner's rule with fused multiply-adds. `in32` and `in64` are
    the coefficients for float32 and float64 arguments, beginning with the constant term."""

    @intrinsic
    def evaluate_polynomial(typingctx: Any, x: Any) -> Any:
        coefficients = in32 if x == types.float32 else in64

        def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (value,) = arguments
            result = ir.Constant(value.type, coefficients[-1])
            for c in coefficients[-2::-1]:
                result = builder.fma(result, value, ir.Constant(value.type, c))
            return result

        return x(x), emit_ir

    return evaluate_polynomial


@intrinsic
def _add_magic_number(typingctx: Any, x: Any, factor: Any) -> Any:
    """Return `x * factor + 1.5 * 2^(mantissa bits)`. The low bits of the result contain the integer nearest to
    `x * factor`."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments, ir.Constant(arguments[0].type, 1.5 * 2.0 ** FLOATS[x][1]))

    return x(x, x), emit_ir


@intrinsic
def _remove_magic_number(typingctx: Any, x: Any) -> Any:
    """Return the integer in the low bits of a result of `_add_magic_number`, as a float."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fsub(arguments[0], ir.Constant(arguments[0].type, 1.5 * 2.0 ** FLOATS[x][1]))

    return x(x), emit_ir


@intrinsic
def _multiply_by_power_of_two(typingctx: Any, x: Any, shifted: Any) -> Any:
    """Return `x * 2^n` for x near 1. n is the integer in the low bits of `shifted`, a result of `_add_magic_number`.

    First, half of n is added to the exponent of x; this cannot overflow. The result is then multiplied by 2 to the
    power of the other half, so that overflow and gradual underflow are correct."""
    size, mantissa, bias = FLOATS[x]

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, shifted = arguments
        integer = ir.IntType(size)
        low, bits = integer(mantissa), builder.bitcast(shifted, integer)
        first = builder.shl(builder.ashr(bits, integer(1)), low)
        power = builder.add(builder.sub(builder.shl(bits, low), first), integer(bias << mantissa))
        value = builder.bitcast(builder.add(builder.bitcast(value, integer), first), value.type)
        result = builder.fmul(value, builder.bitcast(power, value.type))
        # adding to the bits of a NaN could turn it into a number, so NaNs are returned unchanged
        return builder.select(builder.fcmp_unordered("uno", shifted, shifted), shifted, result)

    return x(x, x), emit_ir


@intrinsic
def round_to_even(typingctx: Any, x: Any) -> Any:
    """Return the integer nearest to x. Ties go to the even integer."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        round_even = builder.module.declare_intrinsic("llvm.rint", [value.type])
        return builder.call(round_even, [value])

    return x(x), emit_ir


_exp_of_rest = make_polynomial(EXP32, EXP64)
_exp_minus_one_of_rest = make_polynomial(EXP32[1:], EXP64[1:])  # a polynomial that approximates (e^r - 1) / r
_log_series = make_polynomial(*(tuple(2.0 / (2 * n + 1) for n in range(terms)) for terms in (8, 18)))
_exp2_of_rest = make_polynomial(EXP2_32, EXP2_64)
_tail_quotient = make_polynomial(TAIL32, TAIL64)
_limit = make_polynomial((104.0,), (746.0,))  # exp(-limit) is 0
_density_limit = make_polynomial((15.0,), (39.0,))  # unnormalized_gaussian_density(limit) is 0
_log2_high = make_polynomial((LOG2_HIGH32,), (LOG2_HIGH64,))
_log2_low = make_polynomial((LOG2_LOW32,), (LOG2_LOW64,))
_half_log2e_high = make_polynomial((HALF_LOG2E_HIGH32,), (HALF_LOG2E_HIGH64,))
_half_log2e_low = make_polynomial((HALF_LOG2E_LOW32,), (HALF_LOG2E_LOW64,))
_tail_shift = make_polynomial((SHIFT32,), (SHIFT64,))


@register_jitable
def exp(x):
    """Return e^x, with a relative error of about 2e-16 in float64 and 1e-7 in float32. NaN stays NaN."""
    return _exp_in_range(_clamp_to_limit(x, _limit(x)))


@register_jitable
def _clamp_to_limit(x, limit):
    x = limit if x > limit else x
    return -limit if x < -limit else x


@register_jitable
def exp_of_negative(x):
    """Return `exp(x)` for x <= 0."""
    limit = -_limit(x)
    return _exp_in_range(limit if x < limit else x)


@register_jitable
def _exp_in_range(x):
    """Return e^x without checking the range: x must be within the limits of `exp`, or only slightly outside them."""
    shifted = _add_magic_number(x, constant_like(x, 1.4426950408889634))
    n = _remove_magic_number(shifted)
    rest = fused_multiply_add(n, -_log2_low(x), fused_multiply_add(n, -_log2_high(x), x))
    return _multiply_by_power_of_two(_exp_of_rest(rest), shifted)


@register_jitable
def expm1_of_nonpositive(x):
    """Return e^x - 1 for x <= 0, without cancellation."""
    limit = -_limit(x)
    x = limit if x < limit else x
    shifted = _add_magic_number(x, constant_like(x, 1.4426950408889634))
    n = _remove_magic_number(shifted)
    rest = fused_multiply_add(n, -_log2_low(x), fused_multiply_add(n, -_log2_high(x), x))
    power = _multiply_by_power_of_two(constant_like(x, 1.0), shifted)
    return fused_multiply_add(rest * _exp_minus_one_of_rest(rest), power, power - constant_like(x, 1.0))


@register_jitable
def log_one_plus_fraction(x):
    """Return log(1 + x) for 0 <= x <= 1, using the series of 2 artanh(x / (2 + x))."""
    t = x / (constant_like(x, 2.0) + x)
    return t * _log_series(t * t)


@register_jitable
def unnormalized_gaussian_density(x):
    """Return exp(-x^2 / 2), the Gaussian density without its constant factor. The rounding error of x^2, which would
    matter in the tail, is corrected."""
    a, limit = abs(x), _density_limit(x)
    a = limit if a > limit else a
    square = a * a
    low = fused_multiply_add(a, a, -square)
    high = _half_log2e_high(x)
    shifted = _add_magic_number(square, high)
    rest = fused_multiply_add(square, high, -_remove_magic_number(shifted))
    rest = fused_multiply_add(low, high, fused_multiply_add(square, _half_log2e_low(x), rest))
    return _multiply_by_power_of_two(_exp2_of_rest(rest), shifted)


@register_jitable
def gaussian_tail(x, bell):
    """Return Phi(-|x|), the tail probability of the normal distribution, given `bell =
    unnormalized_gaussian_density(x)`. See `kernels/activation.py`."""
    shift = _tail_shift(x)
    inverse = constant_like(x, 1.0) / (abs(x) + shift)
    t = fused_multiply_add(constant_like(x, -2.0) * shift, inverse, constant_like(x, 1.0))
    return _tail_quotient(t) * inverse * bell


@intrinsic
def to_ordered_integer(typingctx: Any, x: Any) -> Any:
    """Map a float to an integer, preserving the order. LLVM can vectorize the maximum of integers, but not the maximum
    of floats, because floats may be NaN."""
    integer = types.int32 if x == types.float32 else types.int64

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _emit_invert_bits_if_negative(builder, builder.bitcast(arguments[0], ir.IntType(FLOATS[x][0])))

    return integer(x), emit_ir


@intrinsic
def from_ordered_integer(typingctx: Any, n: Any) -> Any:
    """Return the float that `to_ordered_integer` maps to n."""
    real = types.float32 if n == types.int32 else types.float64

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType() if n == types.int32 else ir.DoubleType()
        return builder.bitcast(_emit_invert_bits_if_negative(builder, arguments[0]), kind)

    return real(n), emit_ir


@intrinsic
def use_widest_vectors(typingctx: Any) -> Any:
    """Let LLVM use the widest vector registers in the calling function. By default, LLVM uses only half the width of
    AVX-512, which makes compute-bound loops a third slower."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # the attribute is added as text, because llvmlite does not support attributes with values
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), emit_ir


@intrinsic
def multiply_high(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of the product of two uint64."""

    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(a, wide) for a in arguments))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit_ir


def _emit_invert_bits_if_negative(builder: Any, n: Any) -> Any:
    """If n is negative, return n with all bits except the sign bit inverted; otherwise return n. Applied twice, this
    function returns n."""
    size = n.type.width
    sign = builder.ashr(n, n.type(size - 1))
    return builder.xor(n, builder.and_(sign, n.type((1 << (size - 1)) - 1)))


X86 = platform.machine().lower() in ("x86_64", "amd64")
FLUSH_TO_ZERO, DENORMALS_ARE_ZERO = 0x8000, 0x0040


@intrinsic
def _enable_flush_to_zero(typingctx: Any) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not X86:
            return ir.IntType(32)(0)
        before, place = _emit_control_register_access(builder, "st")
        builder.store(builder.or_(before, before.type(FLUSH_TO_ZERO | DENORMALS_ARE_ZERO)), place)
        _emit_control_register_access(builder, "ld", place)
        return before

    return types.int32(), emit_ir


@intrinsic
def _read_control_register(typingctx: Any) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _emit_control_register_access(builder, "st")[0] if X86 else ir.IntType(32)(0)

    return types.int32(), emit_ir


@intrinsic
def _restore_control_register(typingctx: Any, before: Any) -> Any:
    def emit_ir(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            _emit_control_register_access(builder, "ld", cgutils.alloca_once_value(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int32), emit_ir


def _emit_control_register_access(builder: Any, operation: str, slot: Any = None) -> tuple[Any, Any]:
    """Emit the instruction that stores ("st") the control register of the vector unit in memory, or loads ("ld") the
    register from memory. Return the value of the register and a pointer to the memory."""
    slot = cgutils.alloca_once(builder, ir.IntType(32)) if slot is None else slot
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{operation}mxcsr")
    builder.call(function, [builder.bitcast(slot, pointer)])
    return builder.load(slot), slot


@jit
def flush_denormals():
    """Flush denormals to 0 in this thread from now on. Return the previous value of the control register, which can be
    passed to `restore_control_register`."""
    return _enable_flush_to_zero()


@jit
def read_control_register():
    """Return the floating-point control register of this thread. Another thread can apply it with
    `restore_control_register`."""
    return _read_control_register()


@jit
def restore_control_register(before):
    _restore_control_register(before)
