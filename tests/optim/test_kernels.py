"""Optimizers are the published formulas, and their kernels have the same bits."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx import optim
from fsdpx.core.array import kernels, shapes
from fsdpx.core.array.kernels import choice
from fsdpx.core.array.shapes.flop_counter import KernelPass, counting_work
from fsdpx.optim import ShardSegment, ShardSegments
from fsdpx.optim import optimizer as updates
from fsdpx.optim.average import AveragedOptimizer
from fsdpx.optim.optimizer import AVERAGE_SLOT, make_zero_slots, update_parameters
from fsdpx.testing import assert_close
from fsdpx.testing.optimizer import OptimizerContract

OPTIMIZERS = {
    "sgd": optim.SGD(weight_decay=0.1),
    "momentum": optim.SGD(momentum=0.9, weight_decay=0.1),
    "nesterov": optim.SGD(momentum=0.9, nesterov=True),
    "adam": optim.Adam(weight_decay=0.1),
    "adamw": optim.AdamW(weight_decay=0.1),
    "adamw without decay": optim.AdamW(weight_decay=0.0),
    "lion": optim.Lion(weight_decay=0.1),
    "average": AveragedOptimizer(optim.AdamW(weight_decay=0.1), optim.EMA(0.9)),
    "lamb": optim.LAMB(weight_decay=0.1),
}
ALL = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def whole(size):
    """One parameter that is one segment."""
    return ShardSegments((ShardSegment("w", 0, size, 0, size),))


def train(optimizer, p, g, steps=3, mode="default"):
    segments = whole(p.size) if p.size else ShardSegments(())
    slots = make_zero_slots(np, optimizer, segments, p.dtype)
    state = {"p": p.copy(), **slots}
    with kernels.use_mode(mode):
        for step in range(1, steps + 1):
            optimizer.update(np, state["p"], g / step, slots, lr=0.03 / step, step=step, segments=segments, scale=0.3)
    return state


@ALL
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 7, 1003, updates.BLOCK_ELEMENTS + 5])
def test_compiled_and_plain_give_the_same_bits(optimizer, dtype, n):
    random = np.random.default_rng(n)
    p = (random.standard_normal(n) * 10.0 ** random.integers(-6, 4, n)).astype(dtype)
    g = (random.standard_normal(n) * 10.0 ** random.integers(-12, 4, n)).astype(dtype)
    assert_close(train(optimizer, p, g, mode="numba"), train(optimizer, p, g, mode="plain"))


@ALL
def test_compiled_and_plain_agree_on_numbers_at_the_edge(optimizer):
    tiny, huge = np.finfo("float32").smallest_subnormal, np.finfo("float32").max
    values = np.array([0.0, -0.0, tiny, -tiny, 1e-38, huge, -huge, np.inf, -np.inf, np.nan, 1.0], "float32")
    g, p = (a.ravel() for a in np.meshgrid(values, values))
    a, b = (train(optimizer, p.copy(), g.copy(), mode=v) for v in ("numba", "plain"))
    for name in a:
        assert np.array_equal(a[name], b[name], equal_nan=True), name


@ALL
@pytest.mark.parametrize("mode", ["plain", "numba"])
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(15))
@given(cuts=st.lists(st.integers(0, 300), max_size=6), seed=st.integers(0, 99), single=st.booleans())
def test_any_cut_gives_the_bits_of_the_whole(optimizer, mode, cuts, seed, single):
    if isinstance(optimizer, optim.LAMB):
        cuts = []  # it sees whole parameters: its cuts are tested in test_contract.py and test_lamb.py
    random = np.random.default_rng(seed)
    p, g = (random.standard_normal(300).astype("float32" if single else "float64") for _ in range(2))
    uncut = train(optimizer, p, g, mode=mode)
    parts = [train(optimizer, p[a:b], g[a:b], mode=mode) for a, b in pairwise([0, *sorted(cuts), 300])]
    assert_close(uncut, {name: np.concatenate([part[name] for part in parts]) for name in uncut})


@ALL
def test_plain_blocks_do_not_show(optimizer, monkeypatch):
    p, g = np.random.default_rng(3).standard_normal((2, 5000))
    if isinstance(optimizer, optim.LAMB):
        monkeypatch.setattr("fsdpx.optim.lamb.BLOCK_ELEMENTS", 2048)
    before = train(optimizer, p, g, mode="plain")
    monkeypatch.setattr(updates, "BLOCK_ELEMENTS", 777)
    assert_close(before, train(optimizer, p, g, mode="plain"))


@ALL
@pytest.mark.parametrize("mode", ["plain", "numba"])
def test_scratch_is_a_few_blocks(optimizer, mode):
    n = 40 * updates.BLOCK_ELEMENTS
    p, g = np.ones((2, n), "float32")
    segments = whole(n)
    slots = make_zero_slots(np, optimizer, segments, p.dtype)
    with kernels.use_mode(mode):
        optimizer.update(np, p, g, slots, lr=0.1, step=1, segments=segments)
        tracemalloc.start()
        optimizer.update(np, p, g, slots, lr=0.1, step=2, segments=segments)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * updates.BLOCK_ELEMENTS * 4


def test_gradients_of_another_format_are_widened():
    p, g = np.ones(5, "float32"), np.full(5, 0.5, "float16")
    optim.SGD().update(np, p, g, {}, lr=1.0, step=1, segments=whole(5), scale=1e-4)
    assert np.array_equal(p, np.full(5, np.float32(1) - np.float32(0.5) * np.float32(1e-4)))


def test_without_numba_the_plain_version_runs(monkeypatch):
    monkeypatch.setattr(choice, "has_numba", lambda: False)
    monkeypatch.setattr(updates, "parallel_for_rows", None)
    train(optim.AdamW(), np.ones(3), np.ones(3))


def test_arrays_that_hold_no_data_are_passed_over_once_and_not_updated():
    n = 10**12
    for optimizer in OPTIMIZERS.values():
        p, g = (shapes.empty(n, "float32") for _ in range(2))
        slots = {name: shapes.empty(n, "float32") for name in optimizer.slots}
        with counting_work() as work:
            ran = update_parameters(optimizer, shapes, p, g, slots, lr=0.1, step=1, segments=whole(n))
        assert not ran
        assert dict(work.passes) == {KernelPass("update", 4, 4 * n * (3 + 2 * len(slots))): 1}


PLACES = {"w": slice(0, 300), "w.bias": slice(300, 307), "norm.weight": slice(307, 327)}
N = 327
SEGMENTS = ShardSegments(
    tuple(ShardSegment(name, s.start, s.stop, 0, s.stop - s.start, (), "norm" in name) for name, s in PLACES.items())
)


def gradients(steps=20):
    random = np.random.default_rng(11)
    return random.standard_normal(N), random.standard_normal((steps, N)) * 10 ** random.uniform(-3, 1, (steps, 1))


def trained(optimizer, p, gs, segments=SEGMENTS):
    """The parameters after each step, and the averages."""
    p, found = p.copy(), []
    slots = make_zero_slots(np, optimizer, segments, p.dtype)
    for step, g in enumerate(gs, 1):
        lr = optim.get_learning_rate(optimizer, step)
        optimizer.update(np, p, g * 4.0, slots, lr=lr, step=step, segments=segments, scale=0.25)
        found.append((p.copy(), p + slots[AVERAGE_SLOT] if AVERAGE_SLOT in slots else None))
    return found


def ours(optimizer, p, gs, segments=SEGMENTS):
    return trained(optimizer, p, gs, segments)[-1][0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01}),
        ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
        ("AdamW", {}),
        ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
        ("AdamW with groups", {"lr": 0.01, "weight_decay": 0.5}),
    ],
)
def test_as_pytorch(name, options):
    torch = pytest.importorskip("torch")
    p, gs = gradients()
    theirs = {name: torch.nn.Parameter(torch.tensor(p[at])) for name, at in PLACES.items()}
    groups, own = [*theirs.values()], {}
    if name == "AdamW with groups":
        groups = [{"params": groups[:1]}, {"params": groups[1:], "weight_decay": 0.0}]
        own = {"groups": optim.no_decay}
    optimizer = getattr(torch.optim, name.partition(" ")[0])(groups, **options)
    for g in gs:
        for one, at in PLACES.items():
            theirs[one].grad = torch.tensor(g[at])
        optimizer.step()
    mine = ours(getattr(optim, name.partition(" ")[0])(**options, **own), p, gs)
    assert np.allclose(mine, np.concatenate([t.detach().numpy() for t in theirs.values()]), rtol=1e-12, atol=1e-12)


def test_warm_up_as_pytorch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    of = torch.optim.lr_scheduler
    parts = [of.LinearLR(optimizer, 1 / 8, total_iters=7), of.CosineAnnealingLR(optimizer, 32)]
    schedule, theirs = of.SequentialLR(optimizer, parts, [8]), []
    for _ in range(40):
        theirs += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    mine = optim.schedules.WarmUp(8, optim.schedules.Cosine(0.1, 32))
    assert [mine(step) for step in range(1, 41)] == pytest.approx(theirs)
    assert mine(40) > 1e-4


def lion(p, gs, lr, b1, b2, decay):
    """Algorithm 2 of Chen et al. 2023."""
    m = 0.0
    for g in gs:
        c = b1 * m + (1 - b1) * g
        p = p - lr * (np.sign(c) + decay * p)
        m = b2 * m + (1 - b2) * g
    return p


def test_lion_as_in_its_paper():
    p, gs = gradients()
    mine = ours(optim.Lion(lr=0.01, betas=(0.9, 0.99), weight_decay=0.3), p, gs)
    assert np.allclose(mine, lion(p, gs, 0.01, 0.9, 0.99, 0.3), rtol=1e-12, atol=1e-12)


def lamb(p, gs, lr, b1, b2, eps, decay):
    """Algorithm 2 of You et al. 2020 on one parameter, with phi(z) = z."""
    m = v = 0.0
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        u = r + decay * p
        p = p - lr * np.linalg.norm(p) / np.linalg.norm(u) * u
    return p


def test_lamb_as_in_its_paper():
    p, gs = gradients()
    mine = ours(optim.LAMB(lr=0.01, weight_decay=0.2), p, gs)
    theirs = np.concatenate([lamb(p[at], gs[:, at], 0.01, 0.9, 0.999, 1e-6, 0.2) for at in PLACES.values()])
    assert np.allclose(mine, theirs, rtol=1e-11, atol=1e-12)


def test_lamb_steps_from_zero_with_a_ratio_of_one():
    assert np.allclose(ours(optim.LAMB(lr=0.01, eps=0.0, weight_decay=0.0), np.zeros(N), np.full((1, N), 3.0)), -0.01)


class AnyCut(OptimizerContract):
    make = optim.LAMB


def test_lamb_cut_anywhere_is_the_whole_to_rounding():
    one, cut = (AnyCut()._train_shards("float64", cuts) for cuts in ([], [1, 133, 2000, 2503, 5001]))
    for name in one:
        assert np.allclose(one[name], cut[name], rtol=1e-13, atol=1e-15), name


def test_exponential_averages():
    p, gs = gradients()
    average = None  # begins with the parameters after the first step, as PyTorch's AveragedModel does
    for now, mine in trained(AveragedOptimizer(optim.AdamW(lr=0.01), optim.EMA(0.8)), p, gs):
        average = now if average is None else 0.8 * average + 0.2 * now
        assert np.allclose(mine, average, rtol=1e-12, atol=1e-12)


def test_stochastic_weight_averages():
    p, gs = gradients()
    optimizer, counted = AveragedOptimizer(optim.SGD(lr=0.01, momentum=0.9), optim.SWA(start=4, every=3)), []
    for step, (now, mine) in enumerate(trained(optimizer, p, gs), 1):
        counted += [now] if step in (4, 7, 10, 13, 16, 19) else []
        assert np.allclose(mine, np.mean(counted, axis=0) if counted else now, rtol=1e-12, atol=1e-12), step


def test_an_average_leaves_the_training_alone():
    p, gs = gradients()
    plain, averaged = (ours(o, p, gs) for o in (optim.AdamW(), AveragedOptimizer(optim.AdamW(), optim.EMA())))
    assert np.array_equal(plain, averaged)


def muon(p, gs, shape, lr, mu, decay):
    """Jordan et al. 2024 with the factor of Liu et al. 2025 (equation 4). Singular values by decomposition: each goes
    through the polynomial five times."""
    m = np.zeros(shape)
    p = p.reshape(shape)
    for g in gs.reshape(-1, *shape):
        m = mu * m + g
        u, s, v = np.linalg.svd(g + mu * m, full_matrices=False)
        s /= np.linalg.norm(s) + 1e-7
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        p = p - lr * (0.2 * np.sqrt(max(shape)) * (u * s) @ v + decay * p)
    return p.reshape(-1)


@pytest.mark.parametrize("shape", [(15, 20), (30, 10), (300, 1)])
def test_muon_as_in_its_papers(shape):
    p, gs = gradients()
    segments = ShardSegments((ShardSegment("w", 0, 300, 0, 300, shape), *SEGMENTS.items[1:]))
    optimizer = optim.Muon(lr=0.01, weight_decay=0.1, momentum=0.9)
    mine, slots = p.copy(), {name: np.zeros(N) for name in optimizer.slots}
    for step, g in enumerate(gs, 1):
        optimizer.update(np, mine, g * 4.0, slots, lr=0.01, step=step, segments=segments, scale=0.25)
    assert np.allclose(mine[:300], muon(p[:300], gs[:, :300], shape, 0.01, 0.9, 0.1), rtol=1e-8, atol=1e-9)
    assert np.array_equal(mine[300:], ours(optim.AdamW(lr=0.01, weight_decay=0.1), p, gs)[300:])
    assert not slots["v"][:300].any()


def test_muon_leaves_matrices_of_some_names_to_the_other():
    p, gs = gradients()
    embed = ShardSegments((ShardSegment("embed.weight", 0, N, 0, N, (N, 1)),))
    assert np.array_equal(*(ours(one, p, gs[:1], embed) for one in (optim.Muon(lr=0.01), optim.AdamW(lr=0.01))))
