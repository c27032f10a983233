"""What the kernels of fields compute, in float64: families for `references.py`, which imports this file at its end."""

from inspect import isfunction

import numpy as np
from references import EPS, Case, Cases, attention, of, wide

from fsdpx.ext.fields import kernels
from fsdpx.ext.fields.kernels import WindowStrides
from fsdpx.ext.fields.kernels.neighborhood import make_neighborhood_masks

__all__ = ["FAMILIES", "KERNELS"]

WINDOW = WindowStrides((2, 3), (1, 2), (1, 1), (0, 0), 1)
OUT = (3, 3)
"""Places of WINDOW in a field of 4 x 7 cells."""


def images(x, dy, dtype) -> Cases:
    """Windows of two samples of three channels, place by place."""
    image, shape = np.resize(x, (2, 3, 4, 7)), (2, 3, 4, 7)
    places = [cells for _, _, cells in WINDOW.iterate_window_offsets(OUT, shape[2:])]
    slope = np.resize(dy, (2, 3, *OUT))
    seen = np.stack([image[place] for place in places])
    winner = np.argmax(np.where(np.isnan(seen), np.inf, seen), axis=0)  # the first NaN goes before Inf
    first_nan = np.argmax(np.isnan(seen), axis=0)
    winner = np.where(np.isnan(seen).any(axis=0), first_nan, winner).astype(np.int32)
    largest = np.take_along_axis(seen, winner[None], axis=0)[0]
    to_largest, to_all, size = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, place in enumerate(places):
        to_largest[place] += np.where(winner == number, slope, 0)
        to_all[place] += slope / len(places)
        size[place] += np.abs(slope)

    def backward(xp, a):
        return kernels.max_pool_backward(xp, a, winner, WINDOW, shape)

    return {
        "max_pool": [Case(lambda xp, a: kernels.max_pool(xp, a, WINDOW, OUT)[0], (image,), largest, 0 * largest)],
        "max_pool_backward": [Case(backward, (slope,), to_largest, size)],
        "avg_pool": [
            Case(
                lambda xp, a: kernels.avg_pool(xp, a, WINDOW, OUT, 6),
                (image,),
                seen.mean(axis=0),
                np.abs(seen).sum(axis=0),
            )
        ],
        "avg_pool_backward": [
            Case(lambda xp, a: kernels.avg_pool_backward(xp, a, WINDOW, shape, 6), (slope,), to_all, size)
        ],
    }


def convolutions(x, dy, dtype) -> Cases:
    image, weight, shape = np.resize(x, (2, 3, 4, 7)), np.resize(dy[::-1], (4, 3, 2, 3)), (2, 3, 4, 7)
    slope = np.resize(dy, (2, 4, *OUT))
    bias = np.linspace(-1, 1, 4).astype(np.float32).astype(dtype).astype(np.float64)

    def both(term):
        """A sum of products, and of their sizes."""
        return [term(*arrays) for arrays in ((image, weight, slope), [np.abs(a) for a in (image, weight, slope)])]

    places = [cells for _, _, cells in WINDOW.iterate_window_offsets(OUT, shape[2:])]
    taps = [(i, j) for i in range(2) for j in range(3)]

    def forward(x, w, d):
        return sum(np.einsum("nchw,oc->nohw", x[at], w[:, :, i, j]) for at, (i, j) in zip(places, taps, strict=True))

    def to_input(x, w, d):
        total = np.zeros(shape)
        for at, (i, j) in zip(places, taps, strict=True):
            total[at] += np.einsum("nohw,oc->nchw", d, w[:, :, i, j])
        return total

    def to_weight(x, w, d):
        return np.stack([np.einsum("nchw,nohw->oc", x[at], d) for at in places], axis=-1).reshape(weight.shape)

    y, dx, dw = both(forward), both(to_input), both(to_weight)
    shift = bias[:, None, None]

    def params(xp, a, d):
        sums = np.zeros(weight.shape, wide(dtype)), np.ones(4, wide(dtype))
        kernels.correlate_backward_params(xp, a, d, WINDOW, (sums[0], False), (sums[1], True))
        return np.concatenate([sums[0].reshape(-1), sums[1]])

    ends = [
        np.concatenate([w.reshape(-1), 1 + d.sum(axis=(0, 2, 3))])
        for w, d in zip(dw, (slope, np.abs(slope)), strict=True)
    ]
    return {
        "correlate": [
            Case(lambda xp, *a: kernels.correlate(xp, *a, WINDOW, OUT), (image, weight, bias),
                 y[0] + shift, y[1] + abs(shift))
        ],
        "correlate_backward_input": [
            Case(lambda xp, *a: kernels.correlate_backward_input(xp, *a, WINDOW, shape), (weight, slope), *dx)
        ],
        "correlate_backward_params": [Case(params, (image, slope), *ends)],
    }  # fmt: skip


def group_norms(x, dy, dtype) -> Cases:
    """Two samples of three channels, and values for each."""
    field, slope, cells = np.resize(x, (2, 3, 4, 5)), np.resize(dy, (2, 3, 4, 5)), (2, 3)
    m, s = (np.linspace(low, 1, 6).reshape(2, 3).astype(wide(dtype)) for low in (-1, 0.5))
    centre, scale = (a.astype("f8")[:, :, None, None] for a in (m, s))
    mean = field.mean(axis=cells)
    apart, size = field - mean[:, :, None, None], np.abs(field) + np.abs(mean)[:, :, None, None]
    normal, size_n = (field - centre) * scale, (np.abs(field) + np.abs(centre)) * scale
    with_dy = [np.stack([d.sum(axis=cells), (d * n).sum(axis=cells)])
               for d, n in ((slope, normal), (np.abs(slope), size_n))]  # fmt: skip
    return {
        "channel_means_and_square_deviations": [
            Case(kernels.channel_means_and_square_deviations, (field,), np.stack([mean, (apart**2).sum(axis=cells)]),
                 np.stack([np.abs(field).sum(axis=cells), (size**2).sum(axis=cells)]))
        ],
        "group_norm_affine": [Case(kernels.group_norm_affine, (field, m, s, m), normal + centre, size_n + abs(centre))],
        "group_norm_gradient_sums_by_channel": [
            Case(kernels.group_norm_gradient_sums_by_channel, (slope, field, m, s), *with_dy)
        ],
        "group_norm_backward": [
            Case(kernels.group_norm_backward, (slope, field, m, s, m, s), slope * scale - centre - normal,
                 np.abs(slope) * scale + np.abs(centre) + size_n)
        ],
    }  # fmt: skip


def fields_on_one_rank(x, dy, dtype) -> Cases:
    """Two samples of three channels in one group."""
    field, slope, over = np.resize(x, (2, 3, 4, 5)), np.resize(dy, (2, 3, 4, 5)), (1, 2, 3)
    w, b = (of(np.array(a), dtype) for a in ((-1.0, 0.5, 2.0), (1.0, 0.0, -0.5)))
    factor, shift = w[:, None, None], b[:, None, None]

    def average(a):
        return a.mean(axis=over, keepdims=True)

    mean, rstd = average(field), 1.0 / np.sqrt(field.var(axis=over, keepdims=True) + EPS)
    known = [np.repeat(a[:, :, 0, 0], 3, 1).astype(wide(dtype)) for a in (mean, rstd)]
    m, r = (a.astype("f8")[:, :, None, None] for a in known)
    n, h = (field - m) * r, slope * factor
    size_n, size_h = (np.abs(field) + average(np.abs(field))) * r, np.abs(h) + average(np.abs(h))
    dx, size = (h - average(h) - n * average(h * n)) * r, (size_h + size_n * average(np.abs(h) * size_n)) * r
    y = (field - mean) * rstd * factor + shift
    return {
        "group_norm": [
            Case(lambda xp, *a: kernels.group_norm(xp, *a, 1, EPS)[0], (field, w, b), y,
                 size_n * np.abs(factor) + np.abs(shift))
        ],
        "group_norm_backward_input": [
            Case(lambda xp, *a: kernels.group_norm_backward_input(xp, *a, 1)[0], (slope, field, *known, w), dx, size)
        ],
    }  # fmt: skip


def resampled(x, dy, dtype) -> Cases:
    """Each of four cells along dim 2 is a sum of two of five."""
    field = np.resize(x, (2, 3, 5, 2))
    taps, weights = np.array([[0, 1, 2, 4], [1, 2, 4, 3]]), np.array([[0.5, 0.25, 1, 0.125], [0.5, 0.75, 2, 0.5]])
    matrix = kernels.CellMatrix.from_entries(np.tile(np.arange(4), 2), taps.reshape(-1), weights.reshape(-1), (4, 5))

    def total(a):
        return sum(a[:, :, at] * weight[:, None] for at, weight in zip(taps, weights, strict=True))

    sums = total(field), total(np.abs(field))
    call = Case(lambda xp, a: kernels.multiply_along_dim(xp, a, 2, matrix), (field,), *sums)
    return {"multiply_along_dim": [call]}


def stencils(x, dy, dtype) -> Cases:
    """Half the difference of the next and the previous of five cells along dim 2."""
    field = np.resize(x, (2, 3, 5, 4))
    ranges = kernels.ShiftedRange(1, 0, 3, -0.5, False), kernels.ShiftedRange(1, 2, 3, 0.5, True)
    want, size = np.zeros(field.shape), np.zeros(field.shape)
    want[:, :, 1:4] = field[:, :, :3] * -0.5 + field[:, :, 2:] * 0.5
    size[:, :, 1:4] = np.abs(field[:, :, :3]) + np.abs(field[:, :, 2:])

    def call(xp, a):
        y = np.zeros(a.shape, a.dtype)
        kernels.apply_stencil(xp, y, a, slice(None), slice(None), 0, ranges)
        return y

    return {"apply_stencil": [Case(call, (field,), want, size)]}


def transforms(x, dy, dtype) -> Cases:
    """Fourier transforms of six cells, and the spectrum of five rows of modes."""
    # which parts of a mode are NaN depends on the order of its sums
    x, dy = (np.nan_to_num(a, posinf=1.0, neginf=-1.0) for a in (x, dy))
    given, other = (np.resize(a, (2, 6, 3)) for a in (x, dy))
    wave = np.exp(-2j * np.pi * np.outer(np.arange(6), np.arange(6)) / 6)
    pair = np.stack([given, other], axis=-1)

    def case(transform, array, matrix, numbers):
        want, size = np.einsum("bnk,nm->bmk", numbers, matrix), np.einsum("bnk,nm->bmk", abs(numbers), abs(matrix))
        parts = np.stack([want.real, want.imag], -1) if array.shape[-1] == 2 or transform == "rfft" else want.real
        sizes = np.broadcast_to(size[..., None], parts.shape)
        return Case(lambda xp, a: kernels.fourier_along_dim(xp, a, 1, 6, transform), (array,), parts, sizes)

    both = given + 1j * other
    modes, weights = np.resize(x, (5, 7, 2)), np.resize(np.abs(dy), 7)
    index = np.arange(7) % 3
    power = (modes.astype("f8") ** 2).sum(axis=-1) * weights
    sums = np.stack([power[:, index == k].sum(axis=1) for k in range(4)], axis=1)
    spectrum = Case(lambda xp, *a: kernels.sum_squares_by_index(xp, a[0], index, a[1], 4), (modes, weights), sums, sums)
    return {
        "fourier_along_dim": [
            case("rfft", given[..., None], wave[:, :4], given),
            case("fft", pair, wave, both),
            case("ifft", pair, wave.conj() / 6, both),
        ],
        "sum_squares_by_index": [spectrum],
    }


def neighborhoods(x, dy, dtype) -> Cases:
    """Attention in windows that contain all keys."""
    (forward,), (backward,) = attention(x, dy, dtype).values()
    keys = forward.arrays[0].shape[2]
    starts, window = ((0,) * keys,), (keys,)
    how = starts, window, make_neighborhood_masks(np, starts, window, wide(dtype)), 0.7 / x.shape[1] ** 0.5

    def to_all(xp, *a):
        return np.stack(kernels.neighborhood_attention_backward(xp, *a, *how))

    return {
        "neighborhood_attention": [
            forward._replace(run=lambda xp, *a: kernels.neighborhood_attention(xp, *a, *how)[0])
        ],
        "neighborhood_attention_backward": [backward._replace(run=to_all)],
    }


FAMILIES = images, convolutions, group_norms, fields_on_one_rank, resampled, stencils, transforms, neighborhoods
KERNELS = {name for name in vars(kernels) if isfunction(getattr(kernels, name))}
