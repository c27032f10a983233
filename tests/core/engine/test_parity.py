"""The same result as one process: any strategy, mesh and world size, short and empty parts, every kind of model."""

from contextlib import nullcontext
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from amount import examples, few, pairs
from bits import bits, demand_same
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import reference
from meshes import train as train_on_mesh
from models import CASES, HYBRID, STRATEGIES, distributed, make, own_part, own_parts, part, placed, train
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, Sharding, nn, optim
from fsdpx.core.base.config import PRESETS, resolve_sharding
from fsdpx.core.program import SCHEDULES
from fsdpx.errors import FsdpxError
from fsdpx.testing import assert_close

OPTIONS = {"clip_norm": 0.3}
FLOAT32 = {"precision": "float32", "optimizer": optim.SGD(lr=0.05, momentum=0.9), **OPTIONS}
"""Adam divides rounding noise by itself where a gradient is zero, so fp32 is compared with momentum."""


@cache
def reference_in_float32(case):
    return spawn(train, 1, case, "ddp", **FLOAT32)[0]


def spawn(fn, size, *args, delays=None, **more):
    return fsdpx.spawn(lambda comm: fn(comm, *args, **more), size, delays=delays)


EVERYWHERE = [
    *(("mlp", *place) for place in placed([3, 5], [4])), *(("gpt", *place) for place in placed([3], [4])),
    ("untied", "zero1", 5), ("untied", "fsdp", 3), ("norms", "ddp", 3), ("norms", "zero2", 5), ("norms", "hybrid", 4),
    ("graph", "zero2", 3), ("graph", "fsdp", 5),
]  # fmt: skip
"""Each placement with rows and with texts, and each kind of model in some of them."""


@pytest.mark.parametrize(("case", "strategy", "size"), few(EVERYWHERE, 5))
def test_equals_one_process(case, strategy, size):
    for *got, trainer in spawn(train, size, case, strategy, delays=size, **OPTIONS):
        assert_close(got, reference(case), 1e-12)
        assert trainer.global_step == 2


@pytest.mark.parametrize(("place", "case"), pairs(placed([3], [6]), ["mlp", "gpt"]))
def test_equals_one_process_in_float32(case, place):
    strategy, size = place
    for *got, _ in spawn(train, size, case, strategy, **FLOAT32):
        assert_close(got, reference_in_float32(case)[:2], 1e-5)


def accumulated(comm, strategy, local):
    """Every global batch in two calls, the second of another size."""
    trainer = make(comm, "mlp", strategy, microbatches=2, **OPTIONS)
    rng = np.random.default_rng(5)
    for n in (11, 3):
        x, y = CASES["mlp"].batch(rng, n)
        for rows in (range(n // 3), range(n // 3, n)):
            mine = rows[part(comm, len(rows))]
            call = trainer.accumulate if local or 0 in rows else trainer.step
            with trainer.no_sync() if local else nullcontext():
                call(x[mine], y[mine])
        if local:
            trainer.update()
    return trainer.parameters()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("strategy", "size"), few(placed([1, 3], [4]), 5))
def test_accumulation_equals_one_batch(strategy, size, local):
    assert_close(spawn(accumulated, size, strategy, local, delays=1), [reference("mlp")[1]] * size, 1e-12)


@on_ranks(2)
def test_no_sync_moves_no_gradients(comm):
    trainer = make(comm, "mlp", "zero2")
    with trainer.no_sync():
        trainer.accumulate(*CASES["mlp"].batch(np.random.default_rng(0), 4))
    assert {verb for axis, verb, _, _ in trainer.inspect.placement.axes.counters if axis == "shard"} == {"all_gather"}


def own_loop(comm, strategy):
    """forward, a loss of the user's own, backward, update."""
    trainer = make(comm, "mlp", strategy, **OPTIONS)
    for n, (x, y) in zip((11, 3), own_parts(comm, "mlp", (11, 3)), strict=True):
        trainer.backward(2 * (trainer.forward(x) - y) / (n * 5))
        trainer.update()
    return trainer.parameters()


@pytest.mark.parametrize(("strategy", "size"), placed([3], [4]))
def test_the_three_calls_equal_step(strategy, size):
    assert_close(spawn(own_loop, size, strategy), [reference("mlp")[1]] * size, 1e-12)


def test_gradients_are_those_of_the_global_mean():
    def run(comm, strategy):
        trainer, found = make(comm, "gpt", strategy, microbatches=2), []
        for local in (False, True):
            with trainer.no_sync() if local else nullcontext():
                trainer.accumulate(*own_part(comm, "gpt", 7, 1))
            found.append(trainer.gradients())
            assert_close(trainer.gradients(), found[-1])  # "reading gradients must not change them"
            trainer.zero_grad()
        return found

    want = spawn(run, 1, "ddp")[0][0]
    for strategy, size in placed([3], [4]):
        assert_close(spawn(run, size, strategy), [[want, want]] * size, 1e-12)


def test_initialization_does_not_see_the_layout():
    def run(comm, strategy):
        return bits(make(comm, "gpt", strategy))

    demand_same(found for s, size in placed([1, 2, 5], [4]) for found in spawn(run, size, s))


def test_seed_changes_the_initialization():
    one, other = (spawn(lambda comm, s=s: bits(make(comm, "mlp", seed=s)), 1) for s in (0, 1))
    assert one != other


@given(
    size=st.integers(1, 4),
    case=st.sampled_from(list(CASES)),
    params=st.sampled_from(["step", "use"]),
    grads=st.sampled_from(["step", "use"]),
    prefetch=st.integers(0, 3),
    options=st.fixed_dictionaries(
        {"microbatches": st.integers(1, 3), "group_bytes": st.sampled_from([0, 2048, 1 << 20])}
    ),
    shard=st.sampled_from([1, 2, 4]),
    delays=st.integers(0, 5),
)
@settings(max_examples=examples(40), derandomize=True, database=None, deadline=None)
def test_any_placement_equals_one_process(size, case, params, grads, prefetch, options, shard, delays):
    shard = shard if size % shard == 0 else size
    sharding = Sharding(replica=None, shard=shard, full_params=params, full_grads=grads, prefetch=prefetch)
    if case == "norms":  # batch statistics are those of a microbatch
        options["microbatches"] = 1
    for _, got, _ in spawn(train, size, case, sharding, (5, 3), delays=delays, **options, **OPTIONS):
        assert_close(got, reference(case, (5, 3))[1], 1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_dropout_does_not_see_how_a_batch_is_accumulated(strategy):
    """Two calls of three and four samples draw the masks of one call with seven."""

    def run(comm, cuts):
        trainer = make(comm, "gpt", strategy)
        x, y = CASES["gpt"].batch(np.random.default_rng(5), 7)
        for a, b in pairwise(cuts):
            mine = range(a, b)[part(comm, b - a)]
            (trainer.accumulate if b < 7 else trainer.step)(x[mine], y[mine])
        return trainer.parameters()

    want = spawn(run, 1, (0, 7))[0]
    for size in (1, 2):
        assert_close(spawn(run, size, (0, 3, 7)), [want] * size, 1e-12)


@on_ranks(1)
def test_backward_of_an_evaluating_forward_is_its_own_gradient(comm):
    """BatchNorm with frozen statistics: checked against a finite difference, with an evaluation in between."""
    trainer = make(comm, "norms", "ddp")
    x, y = CASES["norms"].batch(np.random.default_rng(5), 8)
    trainer.step(x, y)
    out = trainer.forward(x, training=False)
    trainer.evaluate(x[:3], y[:3])
    trainer.backward(np.ones_like(out) / 8)
    got = trainer.gradients()["0.weight"][3, 4]
    here, eps = trainer.parameters(), 1e-6
    sums = []
    for sign in (1, -1):
        moved = {k: v.copy() for k, v in here.items()}
        moved["0.weight"][3, 4] += sign * eps
        trainer.load_parameters(moved)
        sums.append(trainer.predict(x).sum() / 8)
    np.testing.assert_allclose(got, (sums[0] - sums[1]) / (2 * eps), rtol=1e-6)


def test_backward_twice_adds_up():
    def run(comm, times):
        trainer = make(comm, "mlp", "fsdp")
        x, _ = own_part(comm, "mlp", 6)
        for _ in range(times):
            trainer.backward(np.ones_like(trainer.forward(x)))
        return trainer.gradients()

    once, twice = spawn(run, 2, 1)[0], spawn(run, 2, 2)[0]
    assert_close(twice, {k: 2 * v for k, v in once.items()}, 1e-14)


def all_it_does(comm, strategy, **options):
    """Whatever a strategy decides: each action of every call, its bytes, and what is held before and after."""
    trainer = make(comm, "gpt", strategy, clip_norm=0.3, microbatches=2, group_bytes=600, **options)
    x, y = own_part(trainer.data_group, "gpt", 7)
    actions = []
    trainer.inspect.engine.add_observer(lambda action: actions.append(str(action)))
    before = trainer.report().memory
    trainer.step(x, y)
    trainer.accumulate(x, y)
    with trainer.no_sync():
        trainer.accumulate(x, y)
    trainer.evaluate(x, y)
    trainer.update()
    trainer.backward(np.ones_like(trainer.forward(x)))
    trainer.predict(x)
    report = trainer.report()
    return str(trainer.program), actions, report.traffic, report.predicted, before, report.memory


@cache
def all_that_fsdp_does(size, mesh=None):
    return spawn(all_it_does, size, "fsdp", mesh=mesh)


def test_zero3_is_fsdp():
    assert {*STRATEGIES, "zero3", "hybrid"} == set(PRESETS), "the others are tried by name"
    assert PRESETS["zero3"] == PRESETS["fsdp"]
    assert spawn(all_it_does, 2, "zero3") == all_that_fsdp_does(2)


def test_hybrid_of_a_prime_number_of_ranks_is_fsdp():
    for size in (1, 2, 3, 5, 7):
        assert resolve_sharding("hybrid", size) == resolve_sharding("fsdp", size), size
    assert spawn(all_it_does, 2, "hybrid") == all_that_fsdp_does(2)


def test_hybrid_is_else_a_mesh_of_its_own():
    found = {size: resolve_sharding("hybrid", size) for size in HYBRID}
    assert {n: (s.replica, s.shard) for n, s in found.items()} == {4: (2, 2), 6: (2, 3), 8: (2, 4)}


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [*((Mesh(), s) for s in PRESETS if s != "fsdp"), (Mesh(shard=1, pipe=2), "ddp"), (Mesh(shard=1, pipe=2), "zero2")],
    ids=str,
)
def test_with_one_data_rank_all_are_one(strategy, mesh):
    assert spawn(all_it_does, mesh.pipe, strategy, mesh=mesh) == all_that_fsdp_does(mesh.pipe, mesh)


@st.composite
def configurations(draw):
    """Any choice of axes on at most 6 ranks, whether it fits the model or not."""
    pipe = draw(st.integers(1, 5))
    tensor = draw(st.integers(1, min(6 // pipe, 4)))
    data = draw(st.integers(1, 6 // (pipe * tensor)))
    strategy = draw(st.sampled_from([*STRATEGIES, "hybrid"]))
    widths = {"replica": data, "shard": 1} if strategy == "ddp" else {"replica": 1, "shard": data}
    if strategy == "hybrid":
        widths = {"replica": draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0])), "shard": None}
    found = {
        "case": draw(st.sampled_from(["wide", "gpt", "deep", "mlp", "graph", "untied"])),
        "mesh": Mesh(pipe=pipe, tensor=tensor, **widths).resolve_open_axis(pipe * tensor * data),
        "strategy": strategy,
        "schedule": draw(st.sampled_from([*SCHEDULES])),
        "microbatches": draw(st.integers(1, 4)),
        "group_bytes": draw(st.sampled_from([0, 600, 1 << 20])),
        "recompute": draw(st.sampled_from([None, None, "all", 2, "attention", "8KiB"])),
        "prefetch": draw(st.integers(0, 2)),
    }
    if tensor > 1:
        found["sequence"] = draw(st.sampled_from([None, None, "parallel", "ulysses", "ring"]))
    return found


def test_any_mesh_trains_to_parity_or_is_refused():
    """It would say nothing if nearly all were refused."""
    found = []

    @settings(max_examples=examples(60))
    @given(configurations(), st.integers(0, 9))
    def one(choice, delays):
        found.append(attempt(choice, delays))

    one()
    assert sum(found) > len(found) / 3


def attempt(choice, delays):
    """Whether it trained; all ranks are refused with the same words."""

    def run(comm):
        try:
            return train_on_mesh(comm, sizes=(7, 3), **choice)[:2]
        except FsdpxError as error:
            return f"{type(error).__name__}: {error}"

    found = fsdpx.spawn(run, choice["mesh"].size, delays=delays or None)
    if isinstance(found[0], str):
        assert all(isinstance(one, str) for one in found), found
        assert len(found[0]) > 30
        return False
    for got in found:
        assert_close(got, reference(choice["case"], (7, 3)), 1e-12)
    return True


class Scale(nn.Layer):
    """A layer of a user: adds in place, and one of its gradients now and then not at all."""

    def specs(self):
        return {"scale": nn.ParameterSpec((12,)), "idle": nn.ParameterSpec((3,))}

    def forward(self, env, p, x):
        return x * (1 + p["scale"]), (x,)

    def backward_input(self, env, p, saved, dy):
        return dy * (1 + p["scale"]), (saved[0], dy)

    def backward_params(self, env, g, kept):
        x, dy = kept
        g["scale"] += (x * dy).sum(0)


@pytest.mark.filterwarnings("ignore:no gradient reaches")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_layer_that_adds_in_place(microbatches):
    def go(comm):
        model = nn.Sequential(Scale(), nn.Residual(nn.Sequential(Scale(), nn.Linear(12, 12))))
        trainer = distributed(model, comm, precision="float64", microbatches=microbatches)
        x, y = np.random.default_rng(1).normal(size=(2, 6, 12))
        trainer.step(x[part(comm, 6)], y[part(comm, 6)])
        assert all(np.isfinite(one).all() for one in trainer.parameters().values())  # `assert_close` takes NaN for NaN
        return trainer.parameters()

    assert_close(spawn(go, 2), spawn(go, 1) * 2, 1e-14)
