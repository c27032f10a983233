"""What every kernel computes, in float64, and how large the terms are that make an element of its result.

A family is a function of two arrays of numbers that a format has, `x` and `dy` (rows, columns), and of that format. It
gives, by kernel, calls with their results. A result may be off by a share of its terms, which float32 sums round, and
by half a unit of the last place of its format; bounds follow from the formats alone (`agree`)."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction
from typing import Any, NamedTuple

import numpy as np
from present import is_present

from fsdpx.core.array import kernels
from fsdpx.core.array.kernels.activation import CUBIC, SLOPE
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.random import NumberRange

__all__ = ["BF16", "F16", "FAMILIES", "KERNELS", "agree", "attend", "attention_slopes", "cases"]

KERNELS = {name for name in kernels.__all__ if isfunction(getattr(kernels, name))}
KERNELS -= {"get_implementation_name", "use_mode"}

TOLERANCE = 1e-6
BF16, F16 = parse_dtype("bf16"), np.dtype(np.float16)
UNITS = {"bfloat16": (2.0**-8, 2.0**-134, 2.0**128), "float16": (2.0**-11, 2.0**-25, 2.0**16)}
"""By how much of a number rounding changes it at most, by how much near 0, and where numbers are too large."""
EPS = 1e-5

erfc = np.vectorize(math.erfc, otypes=[np.float64])


class Case(NamedTuple):
    """A call `run(np, *arrays)`, where arrays of float64 are of the format in question. size: of the terms of `want`,
    which are added in float32; that of `want` itself if none is given. rounded: of those with a factor that is rounded
    to the format. tiny: what is as good as 0. Sums go into arrays of the format of sums, and of that in question."""

    run: Callable[..., Any]
    arrays: tuple[Any, ...]
    want: Any
    size: Any = None
    rounded: Any = 0.0
    tiny: float = 1e-42


Cases = dict[str, list[Case]]


def agree(got: Any, case: Case, share: float = TOLERANCE) -> None:
    """`got` is `case.want`, NaN and Inf where that is, up to rounding; too large for its format is Inf. share:
    of its terms, by which it may be off."""
    want, values = np.asarray(case.want), np.asarray(got).astype(np.float64)
    assert values.shape == want.shape, case.run
    unit, least, limit = UNITS.get(np.asarray(got).dtype.name, (0.0, 0.0, math.inf))
    size = np.abs(want) if case.size is None else case.size
    size, rounded = (np.nan_to_num(np.asarray(s), nan=0.0, posinf=0.0) for s in (size, case.rounded))
    with np.errstate(invalid="ignore"):  # Inf less Inf
        allowed = share * size + case.tiny
        allowed = allowed + unit * (np.abs(want) + rounded + allowed) * (1 + unit) + least
        near = np.abs(values - want) <= allowed
        end = np.where(np.abs(want) + allowed >= limit * (1 - unit), np.copysign(np.inf, want), np.nan)
    off = ~(near | (values == want) | (values == end) | np.isnan(values) & np.isnan(want))
    assert not off.any(), (case.run, values[off][:3], want[off][:3], np.broadcast_to(allowed, want.shape)[off][:3])


def below(x):
    return 0.5 * erfc(-x / math.sqrt(2.0))


def bell(x):
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def logistic(x):
    return np.exp(-np.logaddexp(0.0, -x))


def wide(dtype):
    """The format of sums: float32 for elements of 16 bits as well."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def of(x, dtype):
    """x as the format has it."""
    return np.asarray(x).astype(np.float32).astype(dtype).astype(np.float64)


def behind(kernel, *rest):
    """A kernel with what it gets behind its arrays."""
    return lambda xp, *arrays: kernel(xp, *arrays, *rest)


def changed(kernel, place=0):
    """A kernel that changes the array at this place and may return one: both."""

    def run(xp, *arrays):
        a = arrays[place].copy()
        made = kernel(xp, *arrays[:place], a, *arrays[place + 1 :])
        return a if made is None else np.stack([made, a])

    return run


def result(number, kernel):
    """One of the results of a kernel."""
    return lambda xp, *arrays: np.asarray(kernel(xp, *arrays)[number])


def total(kernel):
    return lambda xp, *arrays: np.float64(kernel(xp, *arrays))


def stacked(kernel):
    return lambda xp, *arrays: np.stack(kernel(xp, *arrays))


def gelu(x, dy, dtype) -> Cases:
    y, dx = x * below(x), dy * (below(x) + x * bell(x))
    size = np.abs(dy) * (below(x) + np.abs(x) * bell(x))
    bias = dy[0] if len(dy) else np.ones(x.shape[1])
    h = of(x + bias, dtype)
    return {
        **gelu_and_slope("none", x, dy, (y, dx), (np.abs(y), size)),
        "bias_gelu": [Case(changed(kernels.bias_gelu), (x, bias), np.stack([h * below(h), h]))],
    }


def gelu_and_slope(form, x, dy, want, sizes) -> Cases:
    """Apart, and together in place of `dy`."""
    gelu, gelu_backward = behind(kernels.gelu, form), behind(kernels.gelu_backward, form)
    both = changed(behind(kernels.recompute_gelu_and_backward, form), 1)
    return {
        "gelu": [Case(gelu, (x,), want[0], sizes[0])],
        "gelu_backward": [Case(gelu_backward, (x, dy), want[1], sizes[1])],
        "recompute_gelu_and_backward": [Case(both, (x, dy), np.stack(want), np.stack(sizes))],
    }


def gelu_tanh(x, dy, dtype) -> Cases:
    u = x * (1.0 + CUBIC * x * x) * SLOPE
    s, slope = logistic(u), (1.0 + 3.0 * CUBIC * x * x) * SLOPE
    spread = 1.0 + np.abs(u) * (1.0 - s)
    want = x * s, dy * (s + x * s * (1.0 - s) * slope)
    sizes = np.abs(x) * s * spread, np.abs(dy) * s * (spread + np.abs(x) * slope * (1.0 + np.abs(u)))
    return gelu_and_slope("tanh", x, dy, want, sizes)


def _rotated(x, dy, dtype) -> Case:
    """Of rows as samples of one position and one head; an odd feature is left out."""
    half = x.shape[1] // 2
    a, b = x[:, :half], x[:, half : 2 * half]
    cos, sin = np.cos(np.arange(half)), np.sin(np.arange(half))
    want = np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)
    size = np.concatenate((np.abs(a * cos) + np.abs(b * sin), np.abs(b * cos) + np.abs(a * sin)), axis=1)

    def run(xp, rows):
        kind = np.float64 if rows.dtype == np.float64 else np.float32
        turned = kernels.rotate(xp, rows[:, None, None, : 2 * half], *(f.astype(kind)[None] for f in (cos, sin)))
        return turned[:, 0, 0]

    return Case(run, (x,), want, size)


def _gates(x, dy) -> Cases:
    """Without gates that are all but closed: in float32 they are, and 0 Inf is NaN."""
    x, far = np.where(np.abs(x) < 1e-30, 0, np.maximum(x, -60)), dy[::-1]
    s = logistic(x)
    slope, size = s + x * s * (1 - s), (s + np.abs(x) * s * (1 - s)) * (1 + np.abs(x))
    want, terms = (far * dy * slope, far * x * s), (np.abs(far * dy) * size, np.abs(far * x) * s)
    return {
        "gated": [Case(kernels.gated, (x, dy), x * s * dy)],
        "gated_backward": [Case(stacked(kernels.gated_backward), (x, dy, far), np.stack(want), np.stack(terms))],
    }


def elementwise(x, dy, dtype) -> Cases:
    s = logistic(x)
    slope, size = s + x * s * (1 - s), (s + np.abs(x) * s * (1 - s)) * (1 + np.abs(x))
    bias = dy[0] if len(dy) else np.ones(x.shape[1])
    field = np.resize(x, (2, 3, 4, 5))
    return {
        "channels_last": [Case(kernels.channels_last, (field,), field, 0)],
        "add": [Case(kernels.add, (x, dy), x + dy, np.abs(x) + np.abs(dy))],
        "add_bias": [Case(changed(kernels.add_bias), (x, bias), x + bias, np.abs(x) + np.abs(bias))],
        "relu": [Case(kernels.relu, (x,), np.maximum(x, 0), 0)],
        "relu_backward": [Case(kernels.relu_backward, (x, dy), np.where(x > 0, dy, 0), 0)],
        "sigmoid": [Case(kernels.sigmoid, (x,), s)],
        **_gates(x, dy),
        "rotate": [_rotated(x, dy, dtype)],
        "silu": [Case(kernels.silu, (x,), x * s)],
        "silu_backward": [Case(kernels.silu_backward, (x, dy), dy * slope, np.abs(dy) * size)],
    }


def rectifiers(x, dy, dtype) -> Cases:
    below_zero, steep = np.minimum(x, 0), 2.0 * x
    leaky, elu = np.where(x > 0, x, 0.1 * x), np.where(x > 0, x, 1.3 * np.expm1(below_zero))
    slope = np.where(x > 0, 1.0, 1.3 * np.exp(below_zero))
    plus = np.where(steep > 20.0, x, np.logaddexp(0.0, steep) / 2.0)
    part = np.where(steep > 20.0, 1.0, logistic(steep))
    s, t = of(logistic(x), dtype), of(np.tanh(x), dtype)
    leaky_relu, leaky_relu_backward = behind(kernels.leaky_relu, 0.1), behind(kernels.leaky_relu_backward, 0.1)
    softplus, softplus_backward = (behind(k, 2.0, 20.0) for k in (kernels.softplus, kernels.softplus_backward))
    sizes = np.abs(dy) * slope * (1 - below_zero), np.abs(dy) * part * (1 + np.abs(x))
    return {
        "leaky_relu": [Case(leaky_relu, (x,), leaky)],
        "leaky_relu_backward": [Case(leaky_relu_backward, (x, dy), np.where(x > 0, dy, 0.1 * dy), np.abs(dy))],
        "elu": [Case(behind(kernels.elu, 1.3), (x,), elu)],
        "elu_backward": [Case(behind(kernels.elu_backward, 1.3), (x, dy), dy * slope, sizes[0])],
        "softplus": [Case(softplus, (x,), plus, plus * (1 + np.abs(x)))],
        "softplus_backward": [Case(softplus_backward, (x, dy), dy * part, sizes[1])],
        "sigmoid_backward": [Case(kernels.sigmoid_backward, (s, dy), dy * (s * (1 - s)), np.abs(dy * s))],
        "tanh_backward": [Case(kernels.tanh_backward, (t, dy), dy * (1 - t * t), np.abs(dy))],
    }


def casts(x, dy, dtype) -> Cases:
    """Exact, or rounded once."""

    def by_chance(xp, a):
        out = np.empty(a.size, BF16)
        kernels.round_randomly(xp, a.reshape(-1), out, numbers(a.size))
        return out.reshape(a.shape)

    long, single = (x * 1.001).astype(wide(dtype)), (x * 1.001).astype(np.float32)
    rounded, other = single.astype(np.float64), dy.astype(wide(dtype))
    cast = behind(kernels.cast_float_to_dtype, dtype)
    return {
        "to_float32": [Case(kernels.to_float32, (x,), x, 0)],
        "store": [Case(changed(kernels.store, 1), (x, other), x, 0)],
        "cast_float_to_dtype": [Case(cast, (long,), long.astype("f8"), 0)],
        "add_widened": [Case(changed(kernels.add_widened, 1), (x, other), x + dy, np.abs(x) + np.abs(dy))],
        "round_randomly": [Case(by_chance, (single,), rounded, 0, np.abs(rounded) + 2.0**-126)],
    }


def softmax(x, dy, dtype) -> Cases:
    top = x.max(axis=1, keepdims=True)
    y = np.exp(x - top)
    y /= y.sum(axis=1, keepdims=True)
    held = y.astype(dtype).astype(np.float64)
    along = np.sum(held * dy, axis=1, keepdims=True)
    size = held * (np.abs(dy) + np.sum(held * np.abs(dy), axis=1, keepdims=True))
    return {
        "softmax": [Case(kernels.softmax, (x,), y, y * (1.0 + np.abs(x - top)))],
        "softmax_backward": [Case(kernels.softmax_backward, (held, dy), held * (dy - along), size)],
    }


def layer_norm(x, dy, dtype) -> Cases:
    w, b = of(np.linspace(-1, 2, x.shape[1]), dtype), np.ones(x.shape[1])
    mean, rstd = x.mean(axis=1), 1.0 / np.sqrt(x.var(axis=1) + EPS)
    m, r = (a.astype(wide(dtype)).astype(np.float64)[:, None] for a in (mean, rstd))
    n, h = (x - m) * r, dy * w
    size_n = (np.abs(x) + np.abs(x).mean(axis=1, keepdims=True)) * r
    dx = (h - h.mean(axis=1, keepdims=True) - n * (h * n).mean(axis=1, keepdims=True)) * r
    size_h = np.abs(h) + np.abs(h).mean(axis=1, keepdims=True)
    size_dx = (size_h + size_n * (np.abs(h) * size_n).mean(axis=1, keepdims=True)) * r
    y = (x - mean[:, None]) * rstd[:, None] * w + b

    start = np.array([[0.0], [1.0], [0.0]])

    def params(kind, xp, *arrays):
        sums = np.repeat(start.astype(kind), x.shape[1], axis=1)
        kernels.layer_norm_backward_params(xp, *arrays, *sums[:2])
        kernels.layer_norm_backward_params(xp, *arrays, sums[2], None)
        return sums

    want = start + np.stack([dy * n, dy, dy * n]).sum(axis=1)
    size = start + np.stack([np.abs(dy) * size_n, np.abs(dy), np.abs(dy) * size_n]).sum(axis=1)
    known = mean.astype(wide(dtype)), rstd.astype(wide(dtype))
    return {
        "layer_norm": [Case(result(0, behind(kernels.layer_norm, EPS)), (x, w, b), y, size_n * np.abs(w) + np.abs(b))],
        "layer_norm_backward_input": [Case(kernels.layer_norm_backward_input, (x, w, *known, dy), dx, size_dx)],
        "layer_norm_backward_params": [
            Case(partial(params, kind), (x, *known, dy), want, size) for kind in (wide(dtype), dtype)
        ],
    }


def rms_norm(x, dy, dtype) -> Cases:
    w = of(np.linspace(-1, 2, x.shape[1]), dtype)
    rstd = 1.0 / np.sqrt((x * x).mean(axis=1) + EPS)
    known = rstd.astype(wide(dtype))
    r = known.astype(np.float64)[:, None]
    n, h = x * r, dy * w
    dx = (h - n * (h * n).mean(axis=1, keepdims=True)) * r
    size = (np.abs(h) + np.abs(n) * np.abs(h * n).mean(axis=1, keepdims=True)) * r
    params, ones = changed(kernels.rms_norm_backward_params, 3), np.ones(x.shape[1], wide(dtype))
    sums, sizes = 1 + np.sum(dy * n, axis=0), 1 + np.sum(np.abs(dy * n), axis=0)
    return {
        "rms_norm": [Case(result(0, behind(kernels.rms_norm, EPS)), (x, w), x * rstd[:, None] * w)],
        "rms_norm_backward_input": [Case(kernels.rms_norm_backward_input, (x, w, known, dy), dx, size)],
        "rms_norm_backward_params": [Case(params, (x, known, dy, ones), sums, sizes)],
    }


def losses(x, dy, dtype) -> Cases:
    target = (np.arange(x.shape[0]) * 7) % x.shape[1]
    top = x.max(axis=1)
    lse = np.log(np.exp(x - top[:, None]).sum(axis=1)) + top
    held = lse.astype(wide(dtype)).astype(np.float64)[:, None]
    picked = np.take_along_axis(x, target[:, None], axis=1)[:, 0]
    p, hit = np.exp(x - held), np.arange(x.shape[1]) == target[:, None]
    size, errors = p * (1.0 + np.abs(x - held)) + hit, np.square(x - dy)
    apart, slope, terms = np.abs(x - dy), (x - dy) / 2, np.abs(x) + np.abs(dy)
    robust = [(0.0, apart, np.sign(x - dy))] + [
        (delta, np.where(apart <= delta, errors / 2, delta * (apart - delta / 2)), np.clip(x - dy, -delta, delta))
        for delta in (0.5, 4.0)
    ]
    entropy, sizes = np.logaddexp(0.0, x) - x * dy, np.abs(x) + np.abs(x * dy) + 1.0
    cross_size = (np.abs(lse) + np.abs(picked) + 1.0).sum()
    cross_backward = behind(kernels.cross_entropy_backward, 0.5)
    squares = behind(kernels.squared_error_gradient_and_sum, 0.5)
    entropy_backward = behind(kernels.binary_entropy_backward, 0.5)

    huber_gradient, huber_both = kernels.huber_error_backward, kernels.huber_error_gradient_and_sum
    return {
        "cross_entropy": [Case(result(0, kernels.cross_entropy), (x, target), (lse - picked).sum(), cross_size)],
        "cross_entropy_backward": [
            Case(cross_backward, (x, target, lse.astype(wide(dtype))), (p - hit) / 2, size / 2)
        ],
        "squared_error": [Case(total(kernels.squared_error), (x, dy), errors.sum())],
        "squared_error_backward": [Case(behind(kernels.squared_error_backward, 0.5), (x, dy), slope, terms)],
        "squared_error_gradient_and_sum": [
            Case(result(0, squares), (x, dy), slope, terms), Case(result(1, squares), (x, dy), errors.sum()),
        ],
        "huber_error": [Case(total(behind(kernels.huber_error, d)), (x, dy), sums.sum()) for d, sums, _ in robust],
        "huber_error_backward": [
            Case(behind(huber_gradient, delta, 0.5), (x, dy), slopes / 2, terms) for delta, _, slopes in robust
        ],
        "huber_error_gradient_and_sum": [
            Case(result(n, behind(huber_both, delta, 0.5)), (x, dy), *of_result)
            for delta, sums, slopes in robust for n, of_result in enumerate([(slopes / 2, terms), (sums.sum(),)])
        ],
        "binary_entropy": [Case(total(kernels.binary_entropy), (x, dy), entropy.sum(), sizes.sum())],
        "binary_entropy_backward": [
            Case(entropy_backward, (x, dy), (logistic(x) - dy) / 2, logistic(x) + np.abs(dy))
        ],
    }  # fmt: skip


def sums(x, dy, dtype) -> Cases:
    start = dy[0] if len(dy) else np.ones(x.shape[1])
    line, flat = x.reshape(-1), np.square(x.reshape(-1))
    blocks = np.array([flat[at : at + 16].sum() for at in range(0, flat.size, 16)])
    sizes = np.abs(x).sum(axis=0)
    return {
        "sum_rows": [
            Case(changed(behind(kernels.sum_rows, adds), 1), (x, into), x.sum(axis=0) + more, sizes + np.abs(more))
            for into in (start.astype(wide(dtype)), start)
            for adds, more in ((True, start), (False, 0))
        ],
        "square_sum": [Case(total(kernels.square_sum), (line,), flat.sum())],
        "sum_squares_of_blocks": [Case(behind(kernels.sum_squares_of_blocks, 16), (line,), blocks)],
    }


def lookups(x, dy, dtype) -> Cases:
    index = (np.arange(len(x)) * 7) % 5
    rows = np.ones((5, x.shape[1]))
    table, size = rows.copy(), rows.copy()
    np.add.at(table, index, x)
    np.add.at(size, index, np.abs(x))
    return {
        "embedding_backward": [
            Case(changed(kernels.embedding_backward), (into, index, x), table, size)
            for into in (rows.astype(wide(dtype)), rows)
        ]
    }


def dropped(x, dy, dtype) -> Cases:
    """What is dropped is multiplied by 0: Inf becomes NaN, and is not lost."""
    keep = (numbers(x.size).make_fractions(np).reshape(x.shape) >= 0.3).astype(np.float64)

    def drop(which):
        return lambda xp, a: kernels.drop(xp, a, numbers(a.size), 0.3)[which].astype(a.dtype)

    return {
        "drop": [Case(drop(0), (x,), x * keep / 0.7, np.abs(x)), Case(drop(1), (x,), keep, 0)],
        "drop_backward": [Case(behind(kernels.drop_backward, keep > 0, 0.3), (dy,), dy * keep / 0.7, np.abs(dy))],
    }


def numbers(size):
    return NumberRange(3, "dropout", 1, 1 + size)


def channels(x, dy, dtype) -> Cases:
    """Batch norm with columns as channels."""
    mean, scale = (np.linspace(low, 2, x.shape[1]).astype(wide(dtype)).astype("f8") for low in (-1, 0.5))
    m, s, n = mean.astype(wide(dtype)), scale.astype(wide(dtype)), (x - mean) * scale
    size_n = (np.abs(x) + np.abs(mean)) * scale
    sums, size = ([a.sum(axis=0) for a in pair] for pair in ((dy, dy * n), (np.abs(dy), np.abs(dy) * size_n)))
    size_dx = (np.abs(dy) + np.abs(mean) + (np.abs(x) + np.abs(mean)) * scale) * scale
    dx = (dy - mean - (x - mean) * scale) * scale
    squares = np.square(x - mean).sum(axis=0), np.square(size_n / scale).sum(axis=0)
    with_dy = np.concatenate(sums), np.concatenate(size)

    def scales(xp, s, m):
        return kernels.batch_norm_scales_and_running_stats(xp, s.astype("f8"), None, m, None, None, 5.0, 0.1, 0.0)

    def factors(xp, m, s):
        return kernels.batch_norm_backward_factors(xp, np.append(m, s).astype("f8"), s.astype("f8"), m, 5.0)

    return {
        "channel_sums": [Case(kernels.channel_sums, (x,), x.sum(axis=0), np.abs(x).sum(axis=0))],
        "channel_squares": [Case(kernels.channel_squares, (x, m), *squares)],
        "batch_norm_scales_and_running_stats": [Case(result(1, scales), (s, m), mean / np.sqrt(scale / 5 + 0.1))],
        "batch_norm_backward_factors": [
            Case(result(k, factors), (m, s), want) for k, want in enumerate((scale * mean, mean / 5, scale**2 / 5))
        ],
        "channel_affine": [Case(kernels.channel_affine, (x, m, s, m), n + mean, size_n + np.abs(mean))],
        "channel_gradient_sums": [Case(kernels.channel_gradient_sums, (dy, x, m, s), *with_dy)],
        "channel_norm_backward_input": [Case(kernels.channel_norm_backward_input, (dy, x, m, s, m, s), dx, size_dx)],
    }


FLUSHED = 2.0**-120
"""Products of 16 bits by the processor's instructions take numbers below 2^-126 for 0."""


def attend(q, k, scale, seen=True):
    """Scores of the keys that each query sees, the logarithms of the sums of their exponentials, and the sizes of the
    terms of probabilities."""
    scores = np.where(seen, scale * q @ k.swapaxes(-1, -2), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(scores - top).sum(axis=-1, keepdims=True)) + top
    terms = q.shape[-1] + k.shape[-2] + 8
    return scores, lse[..., 0], terms * (1 + scale * np.abs(q) @ np.abs(k).swapaxes(-1, -2) + np.abs(lse))


def attention_slopes(q, k, v, o, do, p, sizes, scale):
    """For dq, dk and dv: what they are, the sizes of their terms, and of those with a rounded factor. p, sizes:
    probabilities, and the sizes of their terms."""
    turned, along = v.swapaxes(-1, -2), np.sum(do * o, axis=-1, keepdims=True)
    ds = p * (do @ turned - along) * scale
    off = sizes * p * (np.abs(do) @ np.abs(turned) + np.sum(np.abs(do * o), -1, keepdims=True)) * scale
    want = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
    q, k, do, ds = (np.abs(a) for a in (q, k, do, ds))
    size = off @ k, off.swapaxes(-1, -2) @ q, (p * sizes).swapaxes(-1, -2) @ do
    return want, size, (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do)


def attention(x, dy, dtype) -> Cases:
    """Queries from `x`, keys and values from `dy`, one head; not causal: then NaN and Inf of a key meet all queries."""
    rows, width = max(len(x), 1), x.shape[1]
    q, k, v, do = (of(np.resize(a, (1, 1, rows, width)) / 4, dtype) for a in (x, dy, dy[::-1], x[::-1]))
    scale = 0.7 / width**0.5
    scores, lse, sizes = attend(q, k, scale)
    p = np.exp(scores - lse[..., None])
    o = p @ v
    held, base = of(o, dtype), lse.astype(wide(dtype))
    p2 = np.exp(scores - base.astype(np.float64)[..., None])
    forward = result(0, behind(kernels.attention, False, scale))
    backward = stacked(behind(kernels.attention_backward, False, scale))
    results = map(np.stack, attention_slopes(q, k, v, held, do, p2, sizes, scale))
    return {
        "attention": [Case(forward, (q, k, v), o, (p * sizes) @ np.abs(v), p @ np.abs(v), FLUSHED)],
        "attention_backward": [Case(backward, (q, k, v, held, base, do), *results, FLUSHED)],
    }


def products(x, dy, dtype) -> Cases:
    """Of matrices of 16 bits, by every library that is here, and their gradients' sums. To the processor's instructions
    bfloat16 below 2^-126 is 0, and Inf times it NaN."""

    if not is_present("half"):
        return {}
    from fsdpx.ext.half import matmul

    def by(library):
        def run(xp, a, b):
            out = np.zeros((len(a), len(b)), wide(dtype))
            matmul.select_library(library)
            try:
                matmul.multiply_half_into(out, a, b.T, True)
            finally:
                matmul.select_library(None)
            return out

        return run

    def case(library):
        a, b = ((np.where(np.abs(m) < 2.0**-126, 0.0, m) if library == "onednn" else m) for m in (x, dy))
        size = (1 + x.shape[1] / 8) * np.abs(a) @ np.abs(b).T
        return Case(by(library), (a, b), a @ b.T, size, tiny=x.shape[1] * FLUSHED)

    return {"product": [case(name) for name in matmul.list_16bit_matmul_libraries()]}


FAMILIES = (
    gelu, gelu_tanh, elementwise, rectifiers, casts, softmax, layer_norm, rms_norm, losses, sums, lookups, dropped,
    channels, attention, products,
)  # fmt: skip
if is_present("fields"):
    import window_references

    FAMILIES += window_references.FAMILIES
    KERNELS |= window_references.KERNELS
if is_present("meshes"):
    import segment_references

    FAMILIES += segment_references.FAMILIES
    KERNELS |= segment_references.KERNELS


def cases(family: Callable[..., Cases], x: Any, dy: Any, dtype: Any) -> Iterator[tuple[str, Case]]:
    """(kernel, call) of a family; Inf and NaN are what they are meant to be."""
    with np.errstate(all="ignore"):
        found = family(x, dy, np.dtype(dtype))
    yield from ((name, call) for name, calls in found.items() for call in calls)
