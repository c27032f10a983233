"""What is predicted: the bytes, calls and memory of ranks that run, and times whose answers are known."""

import gc
import random
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
from steps import demand_equal, observed, place_on_data_axis

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array import kernels, shapes
from fsdpx.core.array.namespace import parse_dtype
from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.array.shapes.flop_counter import counting_work
from fsdpx.core.program import VERBS, Action, compile_and_check_pipe, compiler, passes
from fsdpx.core.state.gradients import count_samples_of_rank
from fsdpx.errors import ConfigError
from fsdpx.nn.shape_inference import get_or_memoize
from fsdpx.plan import Compute, Machine, NetworkLevel, costing, predict
from fsdpx.plan.prediction import dry_run_one_rank_per_group, predict_from_dry_runs
from fsdpx.plan.time_model import MeshOnMachine, StepTimes
from fsdpx.plan.world_step import WorldStep

TOKENS = "int64"
FLAT = Machine("flat", (NetworkLevel("host", 0.0, 1e9),), Compute({"float32": 1e12, "bf16": 1e12}, 1e30))
"""A TFLOP/s, a GB/s between any two ranks, and nothing else takes time."""
FOUR_RANKS = replace(FLAT, levels=(NetworkLevel("host", 0.0, 1e9, ranks=4),))


def gpt(layers=2):
    return nn.GPT(32, 16, layers, 2, 8)


def batch(samples):
    return ((samples, 8), TOKENS), ((samples, 8), TOKENS)


def mlp(width=64, layers=4):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def rows(samples, width=64):
    return ((samples, width), "float32"), ((samples, width), "float32")


def configurations(number):
    """Ranks, samples and options, drawn with a seed."""
    draw, found = random.Random(5), []
    while len(found) < number:
        pipe, tensor, data = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2)), draw.choice((1, 2, 3, 4))
        if pipe * tensor * data > 8:
            continue
        strategy = draw.choice(("ddp", "zero1", "zero2", "fsdp"))
        microbatches = draw.choice((1, 2, 4)) * (pipe if pipe > 1 else 1)
        shard = 1 if strategy == "ddp" else data
        options = {
            "strategy": strategy,
            "mesh": fsdpx.Mesh(replica=data // shard, shard=shard, pipe=pipe, tensor=tensor),
            "microbatches": microbatches,
            "recompute": draw.choice((None, None, "all")),
            "precision": draw.choice((None, "bf16")),
            "schedule": draw.choice(("1f1b", "gpipe", "zb-h1")) if pipe > 1 else "1f1b",
        }
        found.append((pipe * tensor * data, data * microbatches + draw.choice((0, 0, 1)), options))
    return found


def demand_as_ranks_of_gpt(found, count, options):
    """What is predicted is what ranks have that train, each with its number of samples."""

    def run(comm):
        made = gpt().as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(), comm=comm, **options)
        return observed(made, *(np.zeros((count(comm.rank), 8), TOKENS) for _ in "xy"))

    demand_equal(found, fsdpx.spawn(run, found.mesh.size))


@pytest.mark.parametrize(("ranks", "samples", "options"), configurations(16))
def test_predicted_bytes_calls_and_memory_are_those_of_ranks(ranks, samples, options):
    found = predict(gpt(), batch(samples), ranks=ranks, machine="epyc-100g", **options)
    demand_as_ranks_of_gpt(found, lambda rank: place_on_data_axis(found, rank, 1, samples)[2], options)


def many(number):
    """Ranks, microbatches and options of steps of which a few microbatches run, drawn with a seed."""
    draw, found = random.Random(8), []
    for _ in range(number):
        pipe, data = draw.choice((1, 1, 2)), draw.choice((1, 2))
        strategy, tensor = draw.choice(("ddp", "zero1", "zero2", "fsdp")), draw.choice((1, 2))
        options = {
            "strategy": strategy,
            "mesh": fsdpx.Mesh(replica=data if strategy == "ddp" else 1, pipe=pipe, tensor=tensor),
            "recompute": draw.choice((None, "all")),
            "schedule": draw.choice(("1f1b", "interleaved", "zb-h1")) if pipe > 1 else "1f1b",
        }
        found.append((pipe * data * tensor, draw.choice((12, 16, 18)), options))
    return found


@pytest.mark.parametrize(
    ("ranks", "microbatches", "options", "each"),
    [(*case, each) for case, each in zip(many(14), cycle((None, 2, None, 4, None, 5)), strict=False)],
)
def test_bytes_and_calls_are_those_of_whole_programs(ranks, microbatches, options, each, monkeypatch):
    """Also of an option that the plan has never heard of: gradients are reduced once in so many microbatches."""

    def reduce_seldom(actions, stage, _, behind, join):
        added = [passes._list_pages_used_by_action("grad", VERBS[action.op].adds, action, stage) for action in actions]
        turns = [(action.mb or 0) // (each or 1) for action in actions]
        last = {(page, turns[at]): at for at, pages in enumerate(added) for page in pages}
        complete = [[page for page in pages if last[page, turns[at]] == at] for at, pages in enumerate(added)]
        found = passes._interleave_reduces(zip(([a] for a in actions), added, complete, strict=True), behind)
        ends = {action.unit: at for at, action in enumerate(found) if join and action.op == "SETTLE"}
        for page, at in sorted(ends.items(), key=lambda item: -item[1]):
            found.insert(at + 1, Action("JOIN", page))
        return found

    if each is not None:
        monkeypatch.setattr(compiler, "insert_reduces", reduce_seldom)
    monkeypatch.setattr(compiler, "_compile_cached", cache(compiler._compile_cached.__wrapped__))  # an empty one
    options, data = options | {"microbatches": microbatches}, ranks // options["mesh"].pipe // options["mesh"].tensor
    found = predict(gpt(), batch(microbatches * data), ranks=ranks, machine="epyc-100g", **options)
    demand_as_ranks_of_gpt(found, lambda _: microbatches, options)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("recompute", [None, "all"])
def test_of_many_microbatches_few_run(schedule, recompute, monkeypatch):
    """The rest follow from these exactly, time included."""
    options = {"mesh": fsdpx.Mesh(replica=1, pipe=2), "microbatches": 24, "schedule": schedule, "recompute": recompute}
    machine = replace(FLAT, levels=(NetworkLevel("host", 1e-9, 1e9),))
    few = predict(gpt(), batch(24), ranks=2, machine=machine, **options)
    monkeypatch.setattr(WorldStep, "count_simulated_microbatches_and_period", lambda step: (step.microbatches, 0))
    every = predict(gpt(), batch(24), ranks=2, machine=machine, **options)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.parts == pytest.approx(every.parts, rel=1e-6, abs=1e-15)
    assert few.bytes_sent == every.bytes_sent
    assert few.memory == every.memory
    assert few.classes[0].traffic == every.classes[0].traffic


def test_equal_layers_are_followed_once_and_memory_stays_exact():
    """As `dry_run` counts it, which follows each."""
    options = {"strategy": "fsdp", "recompute": "all", "precision": "bf16", "microbatches": 2}
    found = predict(gpt(6), batch(8), ranks=4, machine="laptop", **options)
    x, y = batch(2)
    dry = fsdpx.dry_run(gpt(6), x, y, ranks=4, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(), **options)
    assert found.peak == dry.peak
    parts = sum(one.nbytes for one in dry.peak.holdings if one.what == "summed over ranks so far")
    assert found.worst_class.memory["activations"] == dry.peak_heap_bytes - parts
    assert parts  # the second microbatch adds to the first


@pytest.mark.parametrize("recompute", [None, "all"])
def test_layers_share_the_computing_of_a_step(recompute):
    """Their seconds are those of the step without update, and each keeps its output, on one of two equal ranks."""
    options = {"mesh": fsdpx.Mesh(replica=2, shard=1), "microbatches": 4, "recompute": recompute}
    found = predict(mlp(), rows(64), ranks=2, machine=FLAT, **options)
    assert sum(one.forward + one.backward for one in found.layers.values()) == pytest.approx(found.parts["compute"])
    assert [one.nbytes for one in found.layers.values()][:-1] == [8 * 64 * 4] * 3


def test_products_take_their_flops():
    """A step of a Linear is three products, but the first needs no gradient of its input: 4 n^2 b and 2 n^2 b."""
    found = predict(mlp(layers=2), rows(32), ranks=1, machine=FLAT)
    assert found.seconds == pytest.approx((3 + 2) * 2 * 32 * 64 * 64 / 1e12)
    assert found.parts["compute"] == pytest.approx(found.seconds)
    assert found.bytes_sent == {}


def test_a_bubble_is_that_of_its_schedule():
    """(P - 1) / (m + P - 1) of a step, where stages are equal; the first layer's backward is a half shorter."""
    machine = replace(FLAT, levels=(NetworkLevel("host", 0.0, 1e30),))
    for pipe, m in ((2, 4), (4, 8)):
        options = {"machine": machine, "mesh": fsdpx.Mesh(replica=1, pipe=pipe), "microbatches": m}
        found = predict(mlp(layers=32), rows(m), ranks=pipe, **options)
        assert found.bubble_share == pytest.approx((pipe - 1) / (m + pipe - 1), abs=0.02)


def test_communication_is_hidden_behind_backward_or_shown():
    """The gradient of the last layer that is found has nothing to hide behind: 2 (N - 1) / N of its bytes."""
    found = predict(nn.Linear(64, 64, bias=False), rows(2), ranks=2, machine=FLAT, group_bytes=0)
    assert found.bytes_sent == {"replica": 64 * 64 * 4}
    assert found.parts["replica"] == pytest.approx(64 * 64 * 4 / 1e9, rel=1e-3)


def test_an_axis_takes_the_level_that_it_crosses():
    machine = replace(FLAT, levels=(NetworkLevel("host", 1e-6, 1e11, 4), NetworkLevel("system", 1e-3, 1e9)))
    inside, across = (predict(mlp(), rows(8), ranks=n, machine=machine).parts["replica"] for n in (4, 8))
    assert inside < 1e-4 < 1e-3 < across


def test_ranks_that_share_a_link_take_longer():
    """Two lines of replicas, each with two ranks on each host: all four share its link."""
    host, system, seconds = NetworkLevel("host", 0.0, 1e12, ranks=4), NetworkLevel("system", 0.0, 1e9), []
    for level in (system, replace(system, contention=1.0)):
        options = {"machine": replace(FLAT, levels=(host, level)), "mesh": fsdpx.Mesh(replica=4, shard=1, tensor=2)}
        seconds.append(predict(gpt(), batch(8), ranks=8, **options).parts["replica"])
    alone, shared = seconds
    assert shared == pytest.approx(4 * alone, rel=0.01)


def test_a_few_numbers_of_all_ranks_take_a_step_for_each_doubling():
    """As MPI does it; of an axis, whose arrays NCCL may move, a ring."""
    machine = replace(FLAT, levels=(NetworkLevel("host", 1e-6, 1e12),))
    times = StepTimes(MeshOnMachine(fsdpx.Mesh(replica=1 << 20, shard=1), machine), "")
    compute_seconds = times.compute_seconds_of_communication_call
    assert compute_seconds("world", "all_gather", (1 << 20) - 1.0) == pytest.approx(20e-6 + 1e-6, rel=0.01)
    assert compute_seconds("replica", "all_gather", (1 << 20) - 1.0) == pytest.approx(1.0486, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 8, "machine": FOUR_RANKS}, "machine 'flat': its last level, host, holds 4 ranks, and the job has 8"),
        ({"precision": "float64"}, "does not say how fast it computes in float64, only in float32, bf16"),
        ({"batch": 3}, r"^batch=3: the shape and dtype of inputs and targets"),
        ({"comm": None}, "predict decides comm itself"),
        ({"reproducible_chunks": 5}, r"^reproducible_chunks=5: a global batch of 8 samples does not divide$"),
        ({"ranks": 0}, "^ranks=0: a whole number, 1 or more$"),
        ({"ranks": "4"}, "^ranks='4': a whole number, 1 or more$"),
        ({"ranks": 2.5}, r"^ranks=2\.5: a whole number, 1 or more$"),
        ({"microbatches": 0}, "^microbatches=0: a whole number, 1 or more$"),
        ({"mesh": "pipe=2"}, r"^mesh='pipe=2': fsdpx\.Mesh\(\.\.\.\) is needed, such as fsdpx\.Mesh\.parse"),
        ({"machine": None}, r"^machine=None: a name, the path of a machine\.toml or a Machine is needed$"),
        ({"domain": 5}, r"^domain=5: a fsdpx\.Grid or fsdpx\.Partition is needed, or ranks along each dim, such as"),
        ({"domain": (0, 2)}, r"^domain=\(0, 2\): a fsdpx\.Grid or fsdpx\.Partition is needed"),
    ],
)
def test_options_that_are_none_are_named(options, says):
    with pytest.raises(ConfigError, match=says):
        predict(mlp(), **{"batch": rows(8), "ranks": 4, "machine": FLAT} | options)


def test_flops_of_attention_count_all_heads():
    """Of one block: 24 b s h^2 of its layers forward, and 4 b s^2 h of attention (Narayanan et al. 2021)."""
    b, s, h = 3, 8, 16
    found = predict(nn.GPT(32, h, 1, 2, s), batch(b), ranks=1, machine=FLAT)
    head = 2 * b * s * h * 32
    layers, attention = 24 * b * s * h * h, 4 * b * s * s * h
    assert found.seconds * 1e12 == pytest.approx(3 * (layers + head) + attention * 3.5)  # scores are made once more


def test_neighbors_are_one_sum_of_squares():
    """Of a tensor axis, too: parameters of all ranks and those of each lie between each other on the first of them."""
    for tensor in (1, 2):
        mesh = fsdpx.Mesh(replica=2 // tensor, tensor=tensor)
        (run,) = dry_run_one_rank_per_group(gpt(), batch(2), 2, True, precision="fp16", mesh=mesh).runs
        (norm,) = [cost for action, cost in run.costs.items() if action.op == "NORM"]
        pages = sum(action.op == "UPDATE" for action in run.costs)
        assert norm.work.kernel_count == (pages if run.found.coordinates.replica == 0 else 0)


def test_scores_of_attention_are_in_the_format_of_its_operands():
    """Scores (2, 3, 8, 8) inside of attention, and numbers that are made wider; what a loss has inside is float32."""
    inner = {}
    for name in ("bfloat16", "float32"):
        q, y = (ShapeArray(shape, parse_dtype(name)) for shape in ((2, 3, 8, 4), (16, 9)))
        with counting_work() as work:
            kernels.attention(shapes, q, q, q, True, 1.0)
            kernels.cross_entropy(shapes, y, ShapeArray((16,), np.dtype(np.int64)))
        inner[name] = work.inner
    assert 0.5 < inner["bfloat16"]["attention"] / inner["float32"]["attention"] < 0.75
    assert 1.0 <= inner["bfloat16"]["cross_entropy"] / inner["float32"]["cross_entropy"] < 1.5


def test_nothing_is_counted_outside():
    with counting_work() as work:
        pass
    fsdpx.dry_run(mlp(), *rows(2), ranks=1, loss=nn.MSELoss(), optimizer=optim.SGD())
    assert work.flops == 0


def test_ranks_of_a_job_need_not_all_predict(monkeypatch):
    """One of two ranks that have met predicts for two, and waits for no other."""
    module = import_module("fsdpx.core.trainer.distribute")
    met = SimpleNamespace(size=2, all_gather=None, reduce_scatter=None)
    monkeypatch.setattr(module.defaults, "get_default", lambda: SimpleNamespace(comm=met))
    monkeypatch.setattr(module.environment, "read_environment", lambda: SimpleNamespace(expected_size=2, ulfm=False))
    assert module._find_communicator_to_compare_arguments(met) is met
    assert module._find_communicator_to_compare_arguments(fsdpx.FakeCommunicator(0, 2)) is None


@pytest.mark.parametrize("mesh", [fsdpx.Mesh(), fsdpx.Mesh(pipe=2)])
def test_several_inputs_are_those_of_ranks(mesh):
    """A tuple of pairs, or of arrays."""
    nodes = {"up": (nn.Linear(8, 16), "x"), "token": (nn.Embedding(9, 16), "z"), "sum": (nn.Add(), "up", "token")}
    model = nn.Graph(nodes | {"out": (nn.Linear(16, 4), "sum")}, inputs=("x", "z"), outputs=("out",))
    options = {"strategy": "fsdp", "microbatches": 2, "mesh": mesh}
    x, z, y = ((8, 8), "float32"), ((8,), TOKENS), ((8, 4), "float32")
    found = predict(model, ((x, z), y), ranks=4, machine=FLAT, **options)
    arrays = [np.zeros(shape, dtype) for shape, dtype in (x, z, y)]
    of_arrays = predict(model, ((arrays[0], arrays[1]), arrays[2]), ranks=4, machine=FLAT, **options)
    assert of_arrays.bytes_sent == found.bytes_sent

    def run(comm):
        made = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(), comm=comm, **options)
        one, two, target = (array[: 8 // made.data_group.size] for array in arrays)
        return observed(made, (one, two), target)

    demand_equal(found, fsdpx.spawn(run, 4))
    best = fsdpx.plan(model, batch=((x, z), y), ranks=2, machine=FLAT, most=4).best_candidate
    assert best.prediction.step.batch == (x, z, y)


def test_microbatches_without_samples_are_told():
    says = "^microbatches=5: a data rank has 4 samples at most, and the others take their time without any$"
    with pytest.warns(RuntimeWarning, match=says):
        predict(gpt(), batch(8), ranks=2, machine=FLAT, microbatches=5)
    with pytest.raises(ConfigError, match=f"^no configuration of 2 ranks can run: {says[1:-1]}$"):
        fsdpx.plan(gpt(), batch=batch(8), ranks=2, machine=FLAT, mesh=None, microbatches=5)


@pytest.mark.parametrize(("ranks", "chunks"), [(3, 4), (4, 3), (2, 4)])
def test_chunks_are_dealt_as_ranks_take_them(ranks, chunks):
    """Ranks without a chunk are none of the classes."""
    options = {"reproducible_chunks": chunks, "strategy": "fsdp"}
    found = predict(gpt(), batch(24), ranks=ranks, machine=FLAT, **options)
    assert len(found.classes) == (2 if ranks == 3 else 1)
    demand_as_ranks_of_gpt(found, lambda rank: count_samples_of_rank(24, rank, ranks, chunks), options)


def held(strategy, **options):
    """Kind -> bytes of rank 0 over a step of four equal layers with a batch of 8 KiB on two ranks."""
    dry = dry_run_one_rank_per_group(mlp(), rows(32), 2, gpu=False, strategy=strategy, group_bytes=0, **options)
    found = dry.make_memory_timelines(predict_from_dry_runs(dry, FLAT).events)[0]
    assert all([time for time, _ in points] == sorted({time for time, _ in points}) for points in found.values())
    return {kind: [nbytes for _, nbytes in points] for kind, points in found.items()}


def test_memory_over_a_step_is_that_of_its_strategy():
    page, model = 4 * (64 * 64 + 64), 4 * 4 * (64 * 64 + 64)
    ddp, fsdp = held("ddp"), held("fsdp")
    assert (ddp["parameters"], ddp["gradients"], ddp["optimizer"]) == ([model], [model], [2 * model])
    assert fsdp["optimizer"] == [model]
    assert {n - model // 2 for n in fsdp["parameters"]} == {0, page, 2 * page}  # one is used, the next is there
    assert (fsdp["gradients"][0], fsdp["gradients"][-1]) == (0, 0)
    assert max(fsdp["gradients"]) == 2 * page + 3 * page // 2  # two are whole, and three sums are there or on their way
    assert max(ddp["activations"]) == max(fsdp["activations"])


@pytest.mark.parametrize("mesh", [None, fsdpx.Mesh(replica=1, pipe=2)])
def test_activations_over_a_step_reach_what_is_predicted(mesh):
    """Shapes that a pipe asks for before its first message are no memory."""
    options = {"strategy": "ddp", "mesh": mesh, "microbatches": 2}
    found = predict(mlp(), rows(32), ranks=2, machine=FLAT, **options).classes[0].memory["activations"]
    assert max(held(**options)["activations"]) == found


def test_a_million_ranks():
    """As many classes as the pipe has ranks, whatever the other axes have."""
    options = {"mesh": fsdpx.Mesh(pipe=4, tensor=2, replica=2048), "strategy": "fsdp", "microbatches": 2}
    found = predict(gpt(), batch(131072 * 2), ranks=1 << 20, machine="a100-dgx-200g", **options)
    assert [one.rank for one in found.classes] == [n * (1 << 18) - 2 for n in (1, 2, 3, 4)]
    assert found.mesh.width_of("shard") == 64
    assert found.bytes_sent["replica"] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_few_microbatches_of_a_pipe_show_all(schedule, strategy):
    """Dry runs of few are equal to those of all that are simulated, and to the last digit where a few more are."""
    options = {"strategy": strategy, "schedule": schedule, "mesh": fsdpx.Mesh(pipe=2), "recompute": "attention"}
    for microbatches in (8, 24):
        options |= {"microbatches": microbatches}
        every = dry_run_one_rank_per_group(gpt(), batch(microbatches * 4), 4, False, **options)
        whole = predict_from_dry_runs(every, FLAT)
        few = predict(gpt(), batch(microbatches * 4), ranks=4, machine=FLAT, **options)
        assert (few.seconds, few.parts, few.bytes_sent) == (whole.seconds, whole.parts, whole.bytes_sent)
        assert few.events == whole.events
        for one, other in zip(few.classes, whole.classes, strict=True):
            assert (one.memory, one.traffic) == (other.memory, other.traffic)
        ran = [int(event.action.mb) for event in whole.events if event.action.mb is not None]
        assert max(ran) + 1 > 6  # more than dry runs make


def test_a_pipe_that_is_too_wide_is_refused_before_its_schedule_is_made(monkeypatch):
    """Which is long, of hundreds of ranks."""
    monkeypatch.setattr("fsdpx.core.state.placement.make_schedule", None)
    with pytest.raises(ConfigError, match=r"^512 stages, but the model has only 5 layers to cut between"):
        predict(gpt(), batch(512), ranks=512, machine=FLAT, mesh=fsdpx.Mesh(pipe=512), schedule="zb-h1")


def test_a_pipe_is_proved_once():
    """Not by each of its ranks."""
    before = compile_and_check_pipe.cache_info()
    predict(gpt(), batch(12), ranks=4, machine=FLAT, mesh=fsdpx.Mesh(pipe=4), microbatches=6, group_bytes=7)
    after = compile_and_check_pipe.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 3)


def test_a_prediction_does_not_depend_on_those_before(monkeypatch):
    """Layers are followed once for each place on the data axis, and for arrays that share memory in the same way."""

    def found(model, shape, known, **options):
        for name in () if known else ("_MEMOIZED", "_LAYER_BY_KEY", "_FIRST_EQUAL"):
            monkeypatch.setattr(costing, name, {})
        made = predict(model, (shape, shape), machine=FLAT, **options)
        return made.seconds, made.memory, made.bytes_sent

    model, x = nn.UNet(3, 3, 2, 8, 2), ((8, 3, 32, 32), "float32")
    alone = found(model, x, known=False, ranks=4)
    found(model, x, known=False, ranks=3)
    assert found(model, x, known=True, ranks=4) == alone
    model, x = nn.Llama(256, 64, 4, 4, 32), ((32, 32), TOKENS)
    alone = found(model, x, known=False, ranks=4, microbatches=2)
    found(model, x, known=False, ranks=8, strategy="zero2")
    for strategy in ("fsdp", "zero2"):
        found(model, x, known=True, ranks=4, strategy=strategy, microbatches=2)
    assert found(model, x, known=True, ranks=4, microbatches=2) == alone


@pytest.mark.parametrize("make", [
    lambda: nn.Linear(2, 3), lambda: nn.Conv2d(2, 3, 3), lambda: nn.MaxPool2d(2), lambda: nn.GroupNorm(2, 4),
    lambda: nn.UNet(3, 3, 2, 8, 1), lambda: nn.MoE(4, 8, 2, 1), lambda: nn.LoRALinear(nn.Linear(4, 4), 2, 1.0),
])  # fmt: skip
def test_layers_that_compute_the_same_are_followed_once(make):
    assert costing._get_first_seen_equal_layer(make()) is costing._get_first_seen_equal_layer(make())


def test_ranks_of_a_pipe_share_what_follows_from_the_model(monkeypatch):
    """Its layers are put in order twice, as given and as it is cut, and its shapes are found once for each size: by
    all four ranks together. Outside of a prediction nothing is kept."""
    calls = []
    for module, name in (("core.trainer.assemble", "linearize"), ("nn.shape_inference", "_infer_shapes")):
        module = import_module(f"fsdpx.{module}")
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    predict(gpt(), batch(8), ranks=4, machine=FLAT, mesh=fsdpx.Mesh(pipe=4), microbatches=4)
    assert (calls.count("linearize"), calls.count("_infer_shapes")) == (2, 2)  # of the batch, and of a microbatch
    assert get_or_memoize(("one",), lambda: 1) + get_or_memoize(("one",), lambda: 2) == 3
    assert gc.isenabled()


# -- batches of any size -----------------------------------------------------------------------------------------------

MESHES = fsdpx.Mesh(), fsdpx.Mesh(pipe=2), fsdpx.Mesh(tensor=2), fsdpx.Mesh(pipe=2, tensor=2)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_batch_is_made(mesh):
    """An array of a petabyte fits into no address space, however little of it is touched."""
    x = (1 << 44, 8), TOKENS
    assert predict(gpt(), (x, x), ranks=4, machine=FLAT, mesh=mesh).memory > 1 << 49
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(), "mesh": mesh}
    assert fsdpx.dry_run(gpt(), x, x, ranks=4, **options).peak.nbytes > 1 << 49


@pytest.mark.parametrize("options", [{}, {"domain": (2, 2)}, {"mesh": fsdpx.Mesh(pipe=2)}], ids=str)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.RelativeL2()], ids=str)
def test_a_larger_field_takes_no_more_calls(loss, options):
    """No loop of a kernel goes over the elements of arrays without data."""

    def calls(cells):
        events, field = [], ((1, 3, cells, cells), "float32")
        sys.setprofile(lambda _, event, __: events.append(event))
        try:
            predict(nn.UNet(3, 3, 2, 4, 1), (field, field), ranks=4, machine=FLAT, loss=loss, microbatches=1, **options)
        finally:
            sys.setprofile(None)
        return events.count("call")

    few = calls(88)  # no other test predicts either size: of both as much is remembered
    assert calls(1 << 20) < 1.1 * few
