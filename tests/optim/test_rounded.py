"""Optimisers whose parameters and state are in bfloat16."""

from typing import Any

import numpy as np
import pytest

from fsdpx import optim
from fsdpx.array import kernels
from fsdpx.array.namespace import dtype
from fsdpx.errors import ShapeError
from fsdpx.optim import Segment, Segments
from fsdpx.optim.optimizer import zeros
from fsdpx.optim.rounded import BLOCK, Rounded

BF16 = dtype("bf16")
UNIT = 2.0**-8
"""The distance of neighbours in bfloat16 is at most this part of a number, times two."""


def held(optimizer: Rounded, n: int) -> tuple[Any, dict[str, Any]]:
    p = np.random.default_rng(0).standard_normal(n).astype(BF16)
    return p, zeros(np, optimizer, segments(n), BF16)


def segments(n: int, start: int = 0, size: int | None = None) -> Segments:
    return Segments((Segment("w", 0, n, start, size or start + n),))


def steps(optimizer: Rounded, p: Any, slots: Any, part: Segments, count: int, lr: float, at: int = 0) -> None:
    for step in range(1, count + 1):
        g = np.random.default_rng(step).standard_normal(at + p.size).astype(np.float32)[at:]
        optimizer.update(np, p, g, slots, lr=lr, step=step, segments=part)


INNER = [optim.AdamW(), optim.SGD(lr=0.1, momentum=0.9), optim.Lion(), optim.LAMB()]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kahan", [False, True])
def test_one_step_is_that_of_float32_but_for_one_rounding(inner: Any, kahan: bool) -> None:
    n, optimizer = 1000, Rounded(inner, kahan)
    p, slots = held(optimizer, n)
    want, kept = p.astype(np.float32), zeros(np, inner, segments(n), np.float32)
    g = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    inner.update(np, want, g, kept, lr=0.1, step=1, segments=segments(n))
    optimizer.update(np, p, g, slots, lr=0.1, step=1, segments=segments(n))
    for got, exact in ((p, want), *((slots[name], kept[name]) for name in inner.slots)):
        assert np.all(np.abs(got.astype(np.float64) - exact) <= 2 * UNIT * np.abs(exact))
    if kahan:  # together they have 16 bits
        both = p.astype(np.float64) + slots["lost"].astype(np.float64)
        assert np.all(np.abs(both - want) <= UNIT * UNIT * np.abs(want))


@pytest.mark.parametrize("kahan", [False, True])
def test_updates_smaller_than_the_last_bit_add_up(kahan: bool) -> None:
    """1 + 400 times 2^-12: each is a sixteenth of the last bit of 1, and would be lost."""
    n, optimizer = 4096, Rounded(optim.SGD(lr=1.0), kahan)
    p, slots = np.ones(n, BF16), {name: np.zeros(n, BF16) for name in optimizer.slots}
    for step in range(1, 401):
        optimizer.update(np, p, np.full(n, -(2.0**-12), np.float32), slots, lr=1.0, step=step, segments=segments(n))
    got = p.astype(np.float64) + (slots["lost"].astype(np.float64) if kahan else 0.0)
    exact, bit = 1 + 400 * 2.0**-12, 2.0**-7
    deviation = bit * (400 / 4 / n) ** 0.5  # a step has a variance of at most a quarter of bit^2
    bound = UNIT * UNIT * 400 * 2 if kahan else 5 * deviation
    assert abs(got.mean() - exact) <= bound
    assert (p.astype(np.float64) != 1).all() or not kahan


@pytest.mark.parametrize("kahan", [False, True])
def test_the_bits_do_not_depend_on_how_parameters_are_cut(kahan: bool) -> None:
    n, optimizer = 1001, Rounded(optim.AdamW(), kahan)
    p, slots = held(optimizer, n)
    whole = p.copy(), {name: array.copy() for name, array in slots.items()}
    steps(optimizer, *whole, segments(n), 5, 0.01)
    for a, b in ((0, 1), (1, 334), (334, 1001)):
        mine = {name: array[a:b] for name, array in slots.items()}
        steps(optimizer, p[a:b], mine, segments(b - a, a, n), 5, 0.01, at=a)
    for got, want in ((p, whole[0]), *((slots[name], whole[1][name]) for name in slots)):
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def test_nor_on_blocks_or_on_what_compiled_it() -> None:
    n = BLOCK + 77
    part = Segments((Segment("a", 0, 100, 5, 200), Segment("b", 100, n, 0, n)))
    assert [(start, one.size) for start, one in part.blocks(BLOCK)] == [(0, BLOCK), (BLOCK, 77)]
    assert part.blocks(BLOCK)[1][1].items == (Segment("b", 0, 77, BLOCK - 100, n),)
    optimizer, found = Rounded(optim.AdamW()), []
    for mode in ("plain", "numba"):
        p, slots = held(optimizer, n)
        with kernels.use(mode), optim.kernels.use(mode):
            steps(optimizer, p, slots, part, 2, 0.01)
        found.append([a.view(np.uint16) for a in (p, *slots.values())])
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


def test_arrays_of_another_size_are_named() -> None:
    optimizer = Rounded(optim.SGD(lr=0.1), kahan=True)
    with pytest.raises(ShapeError, match=r"Rounded: lost has shape \(3,\), but its segments hold \(4,\) elements"):
        optimizer.update(
            np, np.zeros(4, BF16), np.zeros(4, "f4"), {"lost": np.zeros(3, BF16)}, lr=0.1, step=1, segments=segments(4)
        )
