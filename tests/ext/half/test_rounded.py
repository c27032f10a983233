"""Optimizers whose parameters and state are in bfloat16."""

from typing import Any

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import optim
from fsdpx.core.array import kernels
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.errors import ShapeError
from fsdpx.ext.half.rounded import BLOCK_ELEMENTS, RoundedOptimizer
from fsdpx.optim import ShardSegment, ShardSegments
from fsdpx.optim.optimizer import make_zero_slots

BF16 = parse_dtype("bf16")
UNIT = 2.0**-8
"""The distance of neighbors in bfloat16 is at most this part of a number, times two."""


def held(optimizer: RoundedOptimizer, n: int) -> tuple[Any, dict[str, Any]]:
    p = np.random.default_rng(0).standard_normal(n).astype(BF16)
    return p, make_zero_slots(np, optimizer, segments(n), BF16)


def segments(n: int, start: int = 0, size: int | None = None) -> ShardSegments:
    return ShardSegments((ShardSegment("w", 0, n, start, size or start + n),))


def steps(optimizer: RoundedOptimizer, p: Any, slots: Any, part: ShardSegments, count: int, at: int = 0) -> None:
    for step in range(1, count + 1):
        g = np.random.default_rng(step).standard_normal(at + p.size).astype(np.float32)[at:]
        optimizer.update(np, p, g, slots, lr=0.01, step=step, segments=part)


@pytest.mark.parametrize("inner", [optim.AdamW(), optim.SGD(lr=0.1, momentum=0.9), optim.Lion(), optim.LAMB()])
@pytest.mark.parametrize("kahan", [False, True])
def test_one_step_is_that_of_float32_but_for_one_rounding(inner: Any, kahan: bool) -> None:
    n, optimizer = 1000, RoundedOptimizer(inner, kahan)
    p, slots = held(optimizer, n)
    want, kept = p.astype(np.float32), make_zero_slots(np, inner, segments(n), np.float32)
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
    n, optimizer = 4096, RoundedOptimizer(optim.SGD(lr=1.0), kahan)
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
    n, optimizer = 1001, RoundedOptimizer(optim.AdamW(), kahan)
    p, slots = held(optimizer, n)
    whole = p.copy(), {name: array.copy() for name, array in slots.items()}
    steps(optimizer, *whole, segments(n), 5)
    for a, b in ((0, 1), (1, 334), (334, 1001)):
        mine = {name: array[a:b] for name, array in slots.items()}
        steps(optimizer, p[a:b], mine, segments(b - a, a, n), 5, at=a)
    for got, want in ((p, whole[0]), *((slots[name], whole[1][name]) for name in slots)):
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def test_nor_on_blocks_or_on_what_compiled_it() -> None:
    n = BLOCK_ELEMENTS + 77
    part = ShardSegments((ShardSegment("a", 0, 100, 5, 200), ShardSegment("b", 100, n, 0, n)))
    (start, first), (middle, last) = part.split_into_blocks(BLOCK_ELEMENTS)
    assert (start, first.size, middle, last.size) == (0, BLOCK_ELEMENTS, BLOCK_ELEMENTS, 77)
    assert last.items == (ShardSegment("b", 0, 77, BLOCK_ELEMENTS - 100, n),)
    optimizer, found = RoundedOptimizer(optim.AdamW()), []
    for mode in ("plain", "numba"):
        p, slots = held(optimizer, n)
        with kernels.use_mode(mode):
            steps(optimizer, p, slots, part, 2)
        found.append([a.view(np.uint16) for a in (p, *slots.values())])
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


def test_arrays_of_another_size_are_named() -> None:
    optimizer = RoundedOptimizer(optim.SGD(lr=0.1), kahan=True)
    wrong = r"RoundedOptimizer: lost has shape \(3,\), but its segments hold \(4,\) elements"
    with pytest.raises(ShapeError, match=wrong):
        steps(optimizer, np.zeros(4, BF16), {"lost": np.zeros(3, BF16)}, segments(4), 1)


LEAST = 2.0**-133
"""The distance of neighbors in bfloat16 near 0."""
SINGLE = 1e-6
"""What a few operations in float32 take from the sum of their terms: 16 roundings."""
TINY = 2.0**-147
"""What they take near 0: half of the distance of neighbors in float32, eight times."""

# -- formulas: each result, and the size of the terms that it is a sum of ----------------------------------------------


def sgd(o, p, g, lr, step, momentum=None):
    d, size = g + o.weight_decay * p, abs(g) + o.weight_decay * abs(p)
    found = {}
    if momentum is not None:
        m, terms = o.momentum * momentum + d, o.momentum * abs(momentum) + size
        found["momentum"] = m, terms
        d, size = (d + o.momentum * m, size + o.momentum * terms) if o.nesterov else (m, terms)
    return {"p": (p - lr * d, abs(p) + lr * size), **found}


def adam(o, p, g, lr, step, m, v):
    decay = o.weight_decay * (not o.decoupled)
    g, size = g + decay * p, abs(g) + decay * abs(p)
    b1, b2 = o.betas
    m, m_size = m + (1 - b1) * (g - m), abs(m) + (1 - b1) * (size + abs(m)) + TINY / SINGLE
    v, v_size = b2 * v + (1 - b2) * g * g, b2 * v + (1 - b2) * size * size
    below, rate = np.sqrt(v) * (1 - b2**step) ** -0.5 + o.eps, lr / (1 - b1**step)
    off = np.where(v > 0, v_size / np.where(v > 0, v, 1), 1)
    keep = 1 - lr * o.weight_decay * o.decoupled
    return {
        "p": (keep * p - rate * m / below, abs(p) + rate * (m_size + abs(m) * off) / below),
        "m": (m, m_size),
        "v": (v, v_size),
    }


def lion(o, p, g, lr, step, m):
    b1, b2 = o.betas
    b, terms = m + (1 - b1) * (g - m), abs(m) + (1 - b1) * (abs(g) + abs(m))
    either = np.where(abs(b) <= SINGLE * terms + TINY, 2 * lr / SINGLE, 0)  # its sign is anybody's guess
    p, size = (1 - lr * o.weight_decay) * p - lr * np.sign(b), abs(p) + lr + either
    return {"p": (p, size), "m": (m + (1 - b2) * (g - m), abs(m) + (1 - b2) * (abs(g) + abs(m)))}


CASES = {
    "sgd": (optim.SGD(weight_decay=0.1), sgd),
    "momentum": (optim.SGD(momentum=0.9), sgd),
    "nesterov": (optim.SGD(momentum=0.9, weight_decay=0.1, nesterov=True), sgd),
    "adam": (optim.Adam(weight_decay=0.1), adam),
    "adamw": (optim.AdamW(weight_decay=0.1), adam),
    "lion": (optim.Lion(weight_decay=0.1), lion),
}
everyone = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
drawn = given(
    n=st.integers(1, 70), step=st.sampled_from([1, 2, 30, 10_000]), lr=st.sampled_from([1e-4, 0.03]),
    scale=st.sampled_from([1.0, 2.0**-7]), kahan=st.booleans(), mode=st.sampled_from(["plain", "numba"]),
    seed=st.integers(0, 99),
)  # fmt: skip


def tried(number: int) -> Any:
    return settings(derandomize=True, database=None, deadline=None, max_examples=examples(number))


def compare(case: Any, g: Any, wild: Any, n: int, step: int, lr: float, scale: float, kahan: bool, mode: Any) -> None:
    """One step from numbers that bfloat16 has. wild: makes such numbers."""
    (inner, formula), rng = case, np.random.default_rng(n)
    optimizer = RoundedOptimizer(inner, kahan)
    p, *state = (wild(rng, n) for _ in range(1 + len(optimizer.slots)))
    slots = {name: abs(x) if name == "v" else x for name, x in zip(optimizer.slots, state, strict=True)}
    if kahan:
        slots["lost"] = (p.astype(np.float32) * np.float32(0.3 * UNIT)).astype(BF16)
    before = {name: x.astype(np.float64) for name, x in slots.items()}
    with np.errstate(all="ignore"):
        start = p.astype(np.float64) + before.pop("lost", 0.0)
        want = formula(inner, start, g.astype(np.float64) * scale, lr, step, **before)
        with kernels.use_mode(mode):
            optimizer.update(np, p, g, slots, lr=lr, step=step, segments=segments(n), scale=scale)
        for name, (exact, size) in want.items():
            got = (p if name == "p" else slots[name]).astype(np.float64)
            allowed = SINGLE * size + TINY
            if name == "p" and kahan:
                near(got, exact, allowed + UNIT * (abs(exact) + allowed) + LEAST / 2)
                got = got + np.where(np.isfinite(exact), slots["lost"].astype(np.float64), 0)
                near(got, exact, allowed + UNIT * UNIT * (abs(exact) + allowed) + LEAST / 2)
            else:
                near(got, exact, allowed + 2 * UNIT * (abs(exact) + allowed) + LEAST)


def near(got: Any, exact: Any, allowed: Any) -> None:
    same = (got == exact) | np.isnan(got) & np.isnan(exact)
    off = ~(same | (abs(got - exact) <= allowed) & np.isfinite(exact))
    assert not off.any(), (got[off][:3], exact[off][:3], np.broadcast_to(allowed, exact.shape)[off][:3])


@everyone
@tried(60)
@drawn
def test_a_step_is_the_formula_but_for_one_rounding(case, n, step, lr, scale, kahan, mode, seed) -> None:
    def wild(rng, size):
        return (rng.standard_normal(size) * 10.0 ** rng.integers(-8, 3, size)).astype(BF16)

    g = np.random.default_rng(seed).standard_normal(n) * 10.0 ** np.random.default_rng(seed).integers(-9, 3, n)
    compare(case, g.astype(np.float32), wild, n, step, lr, scale, kahan, mode)


@everyone
@tried(40)
@drawn
def test_denormals_inf_and_nan_come_out_where_float64_has_them(case, n, step, lr, scale, kahan, mode, seed) -> None:
    def wild(rng, size):
        special = np.array([1, 1, 1, 0, -0.0, LEAST, 5 * LEAST, -77 * LEAST, 1e-20, 1e6])
        return (rng.standard_normal(size) * rng.choice(special, size)).astype(BF16)

    rng = np.random.default_rng(seed)
    special = np.array([1, 1, 0, -0.0, 2.0**-149, -77 * 2.0**-149, 1e-30, np.inf, -np.inf, np.nan])
    compare(case, rng.choice(special, n).astype(np.float32), wild, n, step, lr, scale, kahan, mode)
