"""One step of optimisers in bfloat16 against its formula in float64: random states, denormals, Inf and NaN.

Bounds follow from the formats. What is computed in float32 may be off by a share of its terms; parameters and state are
then one of the two bfloat16 neighbours of that, and with Kahan's summation the nearest one and what is missing.
"""

from typing import Any

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import optim
from fsdpx.array import kernels
from fsdpx.array.namespace import dtype
from fsdpx.optim import Segment, Segments
from fsdpx.optim.rounded import Rounded

BF16 = dtype("bf16")
UNIT, LEAST = 2.0**-8, 2.0**-133
"""Half the distance of neighbours at most, as a part of a number, and their distance near 0."""
SINGLE = 1e-6
"""What a few operations in float32 take from the sum of their terms: 16 roundings."""
TINY = 2.0**-147
"""What they take near 0: half of the distance of neighbours in float32, eight times."""

Terms = tuple[Any, Any]
"""A result, and the size of the terms that it is a sum of."""


def sgd(o: Any, p: Any, g: Any, lr: float, step: int, momentum: Any = None) -> dict[str, Terms]:
    d, size = g + o.weight_decay * p, abs(g) + o.weight_decay * abs(p)
    found = {}
    if momentum is not None:
        m, terms = o.momentum * momentum + d, o.momentum * abs(momentum) + size
        found["momentum"] = m, terms
        d, size = (d + o.momentum * m, size + o.momentum * terms) if o.nesterov else (m, terms)
    return {"p": (p - lr * d, abs(p) + lr * size), **found}


def adam(o: Any, p: Any, g: Any, lr: float, step: int, m: Any, v: Any) -> dict[str, Terms]:
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


def lion(o: Any, p: Any, g: Any, lr: float, step: int, m: Any) -> dict[str, Terms]:
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
    optimizer = Rounded(inner, kahan)
    p, *state = (wild(rng, n) for _ in range(1 + len(optimizer.slots)))
    slots = {name: abs(x) if name == "v" else x for name, x in zip(optimizer.slots, state, strict=True)}
    if kahan:
        slots["lost"] = (p.astype(np.float32) * np.float32(0.3 * UNIT)).astype(BF16)
    before = {name: x.astype(np.float64) for name, x in slots.items()}
    with np.errstate(all="ignore"):
        start = p.astype(np.float64) + before.pop("lost", 0.0)
        want = formula(inner, start, g.astype(np.float64) * scale, lr, step, **before)
        with kernels.use(mode), optim.kernels.use(mode):
            part = Segments((Segment("w", 0, n, 0, n),))
            optimizer.update(np, p, g, slots, lr=lr, step=step, segments=part, scale=scale)
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
def test_a_step_is_the_formula_but_for_one_rounding(
    case: Any, n: int, step: int, lr: float, scale: float, kahan: bool, mode: Any, seed: int
) -> None:
    def wild(rng: Any, size: int) -> Any:
        return (rng.standard_normal(size) * 10.0 ** rng.integers(-8, 3, size)).astype(BF16)

    g = np.random.default_rng(seed).standard_normal(n) * 10.0 ** np.random.default_rng(seed).integers(-9, 3, n)
    compare(case, g.astype(np.float32), wild, n, step, lr, scale, kahan, mode)


@everyone
@tried(40)
@drawn
def test_denormals_inf_and_nan_come_out_where_float64_has_them(
    case: Any, n: int, step: int, lr: float, scale: float, kahan: bool, mode: Any, seed: int
) -> None:
    def wild(rng: Any, size: int) -> Any:
        special = np.array([1, 1, 1, 0, -0.0, LEAST, 5 * LEAST, -77 * LEAST, 1e-20, 1e6])
        return (rng.standard_normal(size) * rng.choice(special, size)).astype(BF16)

    rng = np.random.default_rng(seed)
    special = np.array([1, 1, 0, -0.0, 2.0**-149, -77 * 2.0**-149, 1e-30, np.inf, -np.inf, np.nan])
    compare(case, rng.choice(special, n).astype(np.float32), wild, n, step, lr, scale, kahan, mode)
