"""Pipelines: the same result as one process for every schedule, cut and placement; one hash with chunks."""

import re

import numpy as np
import pytest
from amount import few, pairs
from bits import bits
from meshes import OPTIONS, compare, train
from models import CASES, KNOWN, Same, alike, distributed, make
from present import needs
from threads import on_ranks

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.array import kernels
from fsdpx.core.program import SCHEDULES
from fsdpx.core.state.step_inputs import ValueShapes
from fsdpx.errors import ConfigError
from fsdpx.testing import assert_close


@pytest.mark.parametrize(("schedule", "width"), few(pairs(SCHEDULES, [4, 3, 2]), 2))
def test_every_schedule_equals_one_process(schedule, width):
    """Of any width what runs is proved before it runs: tests/core/program/test_schedules.py."""
    compare("deep", Mesh(shard=1, pipe=width), "ddp", delays=width, schedule=schedule)


@pytest.mark.parametrize(
    ("strategy", "schedule"), [("hybrid", "zbv"), ("fsdp", "zb-h2"), ("zero1", "zb-h1"), ("zero2", "interleaved")]
)
def test_every_placement_under_a_pipe_equals_one_process(strategy, schedule):
    mesh = Mesh(replica=2, shard=2, pipe=2) if strategy == "hybrid" else Mesh(shard=2, pipe=2)
    compare("gpt", mesh, strategy, delays=1, schedule=schedule, microbatches=3)


@pytest.mark.parametrize("case", CASES)
def test_every_model_in_two_stages(case):
    """Values that skip stages, layers without parameters, statistics over the batch."""
    compare(case, Mesh(shard=2, pipe=2), "fsdp", microbatches=1 if case == "norms" else 3)


def test_a_value_may_skip_stages():
    """ "up" is read in the stage after next, and its gradient comes back by the same way."""
    compare("graph", Mesh(shard=1, pipe=4), "ddp", stages=["up", "mid", "act", "sum"], microbatches=2)
    compare("graph", Mesh(shard=1, pipe=2), "ddp", stages=["up", "mid", "act", "sum"], schedule="interleaved")


MAPS = [
    (2, {"2": 1, "*": 0}),  # the first pattern that matches counts
    (2, ["0", "1", "3"]),
    (2, {"0": 1, "2": 0, "4": 1}),
    (3, {"0": 0, "1": 2, "2": 1, "3": 2, "4": 0}),
    (3, ["0", "1", "2", "3"]),
]


@pytest.mark.parametrize(("placed", "schedule"), pairs(MAPS, ["gpipe", "1f1b", "interleaved"]))
def test_stages_on_any_rank_equal_one_process(placed, schedule):
    """Any number of stages on any ranks, in any order."""
    width, stages = placed
    compare("mlp", Mesh(shard=1, pipe=width), "ddp", stages=stages, schedule=schedule, microbatches=3)


CHUNKS = [
    (Mesh(shard=1), "ddp", "1f1b"),
    (Mesh(shard=3), "fsdp", "1f1b"),
    (Mesh(shard=1, pipe=2), "ddp", "gpipe"),
    (Mesh(shard=2, pipe=2), "fsdp", "1f1b"),
    (Mesh(replica=2, shard=1, pipe=2), "ddp", "interleaved"),
    (Mesh(shard=1, pipe=3), "ddp", "zb-h1"),
    (Mesh(shard=1, pipe=2), "zero2", "zb-h2"),
    (Mesh(shard=2, pipe=2), "zero1", "zbv"),
]


@pytest.mark.parametrize("case", few(["gpt", "mlp"], 2))
def test_one_hash_with_chunks(case):
    """In one step where the optimizer keeps all bits of gradients, else in two."""
    sizes, optimizer = ((8,), optim.SGD(lr=0.5)) if case == "gpt" else ((8, 4), None)

    def run(comm, mesh, strategy, schedule):
        options = {"reproducible_chunks": 4, "precision": "float32", "optimizer": optimizer, "schedule": schedule}
        return bits(train(comm, case, mesh, strategy, sizes, **options)[2])

    (want,) = spawn(run, 1, *CHUNKS[0])
    for place in few(CHUNKS, 4)[1:]:
        assert spawn(run, place[0].size, *place) == [want] * place[0].size, place


CUTS_OF_FIELDS = [
    ({"reproducible_chunks": 4}, [None, [1, 6], [4, 3], ["0", "1", "4", "5"]]),
    ({"microbatches": 2}, [[1, 6], [2, 5], ["0", "1", "4", "5"]]),
]


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(4, 16), lambda: nn.InstanceNorm(16, affine=True)])
@pytest.mark.parametrize(("options", "cuts"), CUTS_OF_FIELDS)
def test_one_hash_for_every_cut_of_a_model_of_fields(options, cuts, norm):
    """A convolution gives its result with channels last in memory, and a message brings it with channels first."""
    x, y = (np.random.default_rng(c).standard_normal((8, c, 8, 8)).astype(np.float32) for c in (3, 4))

    def run(comm, cut):
        layers = [nn.Conv2d(3, 16, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), norm(), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Conv2d(16, 4, 3, padding=1))
        more = {} if cut is None else {"mesh": PIPE, "stages": cut}
        trainer = distributed(model, comm, precision="float32", **options, **more)
        trainer.step(x, y)
        return bits(trainer)

    found = {str(cut): spawn(run, 1 if cut is None else 2, cut)[0] for cut in cuts}
    assert found == dict.fromkeys(found, found[str(cuts[0])])


@pytest.mark.parametrize(
    ("mode", "last", "loss"),
    [
        ("plain", "Tanh()", "RelativeL2()"), ("plain", "Tanh()", "L1Loss(np.ones((16, 16)))"),
        ("plain", "GlobalMean()", "MSELoss()"), ("plain", "PointwiseConv(16, 4)", "VRMSE()"),
        ("plain", "Conv2d(16, 4, 3)", "MSELoss()"), ("default", "GlobalMean()", "MSELoss()"),
        ("default", "Tanh()", "RelativeL2()"), ("default", "Conv2d(16, 4, 3)", "MSELoss()"),
    ],
)  # fmt: skip
def test_a_cut_changes_no_bit_though_numpy_adds_in_the_order_of_memory(last, loss, mode):
    def run(comm, more):
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), eval(f"nn.{last}"))
        options = {"reproducible_chunks": 4, "precision": "float64", **more}
        trainer = distributed(model, comm, loss=eval(f"nn.{loss}"), **options)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8, 3, 16, 16))
        y = rng.standard_normal(trainer.predict(x).shape)
        return bits(trainer), [trainer.step(x, y), trainer.step(x, y), trainer.evaluate(x, y)]

    with kernels.use_mode(mode):
        want = spawn(run, 1, {})[0]
        for first in (1, 2):
            assert spawn(run, 2, {"mesh": PIPE, "stages": [first, 3 - first]})[0] == want


@pytest.mark.parametrize("mesh", few([Mesh(shard=1, pipe=2), Mesh(shard=2)], 2))
def test_recompute_changes_no_bit(mesh):
    some_units = "60KiB" if mesh.pipe == 1 else "110KiB"

    def run(comm, recompute):
        trainer = train(comm, "deep", mesh, "fsdp", (5,), recompute=recompute, microbatches=2)[2]
        return bits(trainer), str(trainer.program)

    plain, *found = (spawn(run, 2, choice)[0] for choice in (None, "all", 2, "attention", some_units))
    assert [one for one, _ in found] == [plain[0]] * len(found)
    counts = [sum(word.startswith("R") and word[1].isdigit() for word in text.split()) for _, text in found]
    assert counts[2] == 0  # attention is recomputed inside its layer
    assert counts[0] > max(counts[1], counts[3]) >= min(counts[1], counts[3]) > 0


PIPE = Mesh(shard=1, pipe=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": Mesh(shard=1, pipe=6)}, r"6 stages, but the model has only 5 layers to cut between \('0'"),
        ({"stages": ["0", "7"]}, "stages: there is no layer '7' to begin a stage with"),
        ({"stages": ["0", "0"]}, "stages follow each other, and the first begins at '0'"),
        ({"stages": ["1", "3"]}, "stages follow each other, and the first begins at '0'"),
        ({"stages": [2, 2]}, "each stage has at least one layer, all together 5"),
        ({"stages": ["0"]}, "1 stages cannot be distributed over 2 ranks of the pipe"),
        ({"stages": {"0": 0, "x": 1}}, "stages: the pattern 'x' matches no layer; there are '0'"),
        ({"stages": {0: 0, 3: 1}}, "stages: 0 is no pattern of layer paths: write '0'; there"),
        ({"costs": {0: 1.0}}, "costs: 0 is no pattern of layer paths: write '0'"),
        ({"stages": {"0": 0, "1": 2}}, "stages: '1' is on 2, and the pipe has ranks 0 to 1"),
        ({"stages": {"1": 0, "2": 1}}, "no pattern matches the first layer, '0': say on which"),
        ({"stages": {"*": 1}}, "no layer is on rank 0 of the pipe, which has 2 ranks"),
        (
            {"stages": {"0": 0, "1": 1, "2": 0}, "schedule": "zbv"},
            "'zbv' goes down the ranks and comes back in a V, .*; here 3 stages are assigned to ranks 0, 1, 0: choose",
        ),
        (
            {"stages": ["0", "1", "2"], "schedule": "zb-h1"},
            "'zb-h1' has one stage on each rank, in order; here 3 stages are assigned to ranks 0, 1, 0: choose",
        ),
        (
            {"mesh": Mesh(shard=1, pipe=3), "schedule": "zbv"},
            r"6 stages \(schedule 'zbv' puts 2 on each of 3 ranks\), but the model has only 5 layers to cut between "
            r"\('0', .*\): use fewer ranks in the pipe, or '1f1b', which has one stage on each",
        ),
        ({"mesh": Mesh(shard=1, pipe=3), "schedule": "interleaved"}, "'interleaved' puts 2 on each of 3"),
        ({"schedule": "2f2b"}, "2f2b.*gpipe.*1f1b.*interleaved"),
        ({"schedule": "zbv", "stages": ["0", "2"]}, "zbv"),
        ({"costs": {"2": -1.0}}, "costs: '2' is -1.0, a number of at least 0"),
        ({"costs": {"2": float("inf")}}, "costs: '2' is inf, a number of at least 0"),
        ({"costs": {"x": 1.0}}, "costs: 'x' matches no layer; there are '0', '1'"),
        ({"costs": [1, 2]}, r"costs=\[1, 2\]\): a dict"),
        ({"stages": 2}, "stages=2: a list is needed"),
        ({"stages": ["0", 2]}, "name the first layers of all stages, or give numbers"),
        ({"schedule": 3}, "schedule=3: a name, a function or the path"),
        ({"schedule": lambda: []}, r"must take \(ranks, microbatches, per_rank\)"),
        ({"schedule": lambda a, b, c: None}, "returned None: a PipelineSchedule or a list"),
        ({"recompute": 100}, "recompute=100: the model has . units; take a number up to that"),
        ({"recompute": "1.2.3MiB"}, "recompute='1.2.3MiB': a number of bytes is needed"),
    ],
)
def test_pipes_that_cannot_work_are_refused(options, text):
    given = {"mesh": PIPE, **options}
    with pytest.raises(ConfigError, match=text):
        spawn(lambda comm: make(comm, "mlp", "ddp", **given), given["mesh"].size)


@pytest.mark.parametrize(
    ("options", "second"),
    [({"costs": {"0": 100.0, "*": 1.0}}, 1), ({"costs": {"4": 100.0, "*": 1.0}}, 4), ({"stages": [3, 2]}, 3)],
)
@on_ranks(2)
def test_costs_decide_where_a_model_is_cut(comm, options, second):
    assert make(comm, "mlp", "ddp", mesh=PIPE, **options).inspect.placement.layout.spread.starts == (0, second)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (lambda rank: {"stages": [[2, 3], [1, 4]][rank]}, r"stages: rank 0 has \(0, 2\), rank 1 has \(0, 1\)"),
        (lambda rank: {"costs": {"0": [1.0, 99.0][rank], "*": 1.0}}, "stages: rank 0 has"),
        (lambda rank: {"schedule": [mine, mine_too][rank]}, "schedule: rank 0 has F0.0 F0.1 I0.0"),
    ],
)
def test_ranks_that_cut_differently_are_told(options, text):
    """With each layer a unit of its own all else is alike."""
    more = {"mesh": PIPE, "group_bytes": 0, "microbatches": 2}
    said = alike(2, lambda comm: make(comm, "mlp", "ddp", **more, **options(comm.rank)))
    assert re.search(f"ConfigError: ranks differ in ({text})", said)


class Dropping(nn.Composite):
    """It keeps neither of its arguments; one is a function, which each rank makes for itself."""

    def __init__(self, p, init):
        self.linear, self.drop = nn.Linear(4, 4, init=init), nn.Dropout(p)

    def compose(self, x):
        return self.drop(self.linear(x))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda rank: nn.GPT(31, 16, 1, [2, 4][rank], 8), "blocks.0 = TransformerBlock("),
        (lambda rank: nn.Llama(31, 16, 1, 2, 8, window=[None, 3][rank]), "blocks.0 = AttentionBlock("),
        (lambda rank: nn.Sequential(Dropping(0.25 * rank, nn.init.normal(0.1))), "0.drop = Dropout(p=0.0)"),
        (lambda rank: nn.Sequential(nn.Residual(Dropping(0.25 * rank, nn.init.normal(0.1)))), "0 = Residual(Dropping("),
        pytest.param(
            lambda rank: nn.LoRALinear(nn.Linear(4, 4, init=lambda *_: 0.0), 2, 1.0 + rank),
            " = LoRALinear(Linear(",
            marks=needs("lora"),
        ),
    ],
)
def test_layers_that_differ_are_told(model, text):
    said = alike(2, lambda comm: distributed(model(comm.rank), comm, loss=nn.CrossEntropyLoss()))
    assert f"ConfigError: ranks differ in layers: rank 0 has {text}" in said


class Table(Same):
    """An array of one's own, which its text leaves out."""

    def __init__(self, table):
        self._table = table

    def forward(self, env, p, x):
        return x + env.xp.asarray(self._table, x.dtype), ()


@pytest.mark.parametrize(
    ("model", "weights", "text"),
    [
        pytest.param(
            lambda n: nn.Sequential(nn.Mask(np.arange(4) > n)), lambda n: None, "Mask(0.0) with", marks=needs("fields")
        ),
        (lambda n: nn.Residual(Table(np.full(4, float(n)))), lambda n: None, "Table("),
        (lambda n: nn.Linear(4, 4), lambda n: np.ones((4,)) + n, "MSELoss(weights=<an array>) with"),
    ],
)
def test_arrays_that_differ_are_told(model, weights, text):
    def act(comm, rank):
        distributed(model(rank), comm, loss=nn.MSELoss(weights(rank)) + nn.L1Loss())

    assert f"ConfigError: ranks differ in arrays: rank 0 has {text}" in alike(2, lambda comm: act(comm, comm.rank))
    spawn(act, 2, 1)


def mine_too(ranks, microbatches, per_rank):
    ends = range(microbatches)
    return [" ".join([f"F{r}.{m}" for m in ends] + [f"B{r}.{m}" for m in ends]) for r in range(ranks)]


mine_too.__name__ = "mine"


def mine(ranks, microbatches, per_rank):
    """All forwards, then backwards with their second half apart."""
    ends = range(microbatches)
    return [" ".join([f"F{r}.{m}" for m in ends] + [f"I{r}.{m} W{r}.{m}" for m in ends]) for r in range(ranks)]


def test_a_schedule_of_ones_own(tmp_path):
    compare("deep", PIPE, "fsdp", schedule=mine, microbatches=3)
    file = tmp_path / "own.txt"
    file.write_text("# two ranks, two microbatches\nF0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1\n")
    compare("deep", PIPE, "zero1", schedule=str(file), microbatches=2)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["F0.0 B0.0", "B1.0 F1.0"], "F1.0"),
        (["F0.0", "F1.0 B1.0"], "rank 0 has no B .or I and W. of stage 0, microbatch 0"),
        (["B0.0 F0.0", "F1.0 B1.0"], "B0.0"),
    ],
)
def test_a_schedule_that_cannot_run_is_shown(lines, text):
    """Before any communication, on all ranks alike, with the place."""
    options = {"mesh": PIPE, "schedule": lambda ranks, microbatches, per_rank: lines, "microbatches": 1}
    assert re.search(f"^ProgramError: (.|\n)*{text}", alike(2, lambda comm: make(comm, "mlp", "ddp", **options)))


def test_the_other_calls_of_a_trainer():
    """accumulate, no_sync, gradients, evaluate, predict and the three calls, on a mesh of pipe and data."""

    def run(comm, mesh):
        trainer = make(comm, "deep", "zero2", mesh=mesh, microbatches=2, **OPTIONS)
        x, y = KNOWN["deep"].batch(np.random.default_rng(5), 8)
        trainer.accumulate(x[:1], y[:1])
        with trainer.no_sync():
            trainer.accumulate(x[1:], y[1:])
        gradients = trainer.gradients()
        norm = trainer.update()
        trainer.backward(np.ones_like(trainer.forward(x)) / 8)
        trainer.update()
        return gradients, trainer.parameters(), norm, trainer.evaluate(x, y), trainer.predict(x)

    (want,) = spawn(run, 1, Mesh(shard=1))
    for got in spawn(run, 3, Mesh(shard=1, pipe=3)):
        assert_close(got[:4], want[:4], 1e-12)
        np.testing.assert_allclose(got[4], want[4], rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_measured_steps_are_what_ran(comm):
    trainer = make(comm, "deep", "ddp", mesh=PIPE, schedule="zb-h1", microbatches=3, **OPTIONS)
    x, y = KNOWN["deep"].batch(np.random.default_rng(5), 6)
    measured = trainer.inspect.measure(x, y, steps=2)
    for rank, program in enumerate(measured.programs):
        assert [e.action for e in measured.events if e.rank == rank] == list(program.actions)
    assert 0 <= measured.idle_share < 1
    took = {(e.rank, e.action): e.end - e.start for e in measured.events}
    for event in measured.simulate_again():
        if event.action.op in "FIW":
            assert event.end - event.start == pytest.approx(took[event.rank, event.action])
    costs = measured.stage_costs
    for some in (costs.forward, costs.backward_input, costs.backward_params):
        assert len(some) == 2
        assert min(some) > 0


@on_ranks(2)
def test_a_pipe_is_cut_by_measured_layers(comm, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))
    x = np.ones((4, 8), np.float32)
    with distributed(model, comm, tune=False, trace=tmp_path / "traced") as first:
        first.step(x, x)
        costs = {path: one.forward + one.backward for path, one in first.report().layers.items()}
    assert list(costs) == ["0", "1", "2", "3"]
    assert min(costs.values()) > 0
    cut = costs | {"0": 9.0, "1": 1.0, "2": 1.0, "3": 1.0}  # as if the first were slow, so that nothing is chance
    units = distributed(model, comm, tune=False, mesh=Mesh(pipe=2), costs=cut).inspect.placement.layout.units
    found = [[node.path for unit in units if unit.stage == stage for node in unit.nodes] for stage in range(2)]
    assert found == [["0"], ["1", "2", "3"]]


def test_messages_are_planned_once_for_each_shape_of_a_batch(monkeypatch):
    """Not once per message: what travels follows from the program and the shapes of the batch."""
    asked = []
    of = ValueShapes.shape_of

    def counted(self, value, *given):
        asked.append(value)
        return of(self, value, *given)

    monkeypatch.setattr(ValueShapes, "shape_of", counted)

    def main(comm):
        trainer, seen = make(comm, "deep", "ddp", mesh=PIPE, microbatches=2), []
        for rows in (8, 8, 8, 4, 4, 8):  # the second step is another one: it may share memory with the first
            x, y = KNOWN["deep"].batch(np.random.default_rng(5), rows)
            comm.barrier().wait()
            before = len(asked)
            comm.barrier().wait()
            trainer.step(x, y)
            comm.barrier().wait()
            seen.append(len(asked) - before)
        return seen

    first, _, *rest = spawn(main, 2)[0]
    assert first > 0
    assert rest == [0, first, 0, 0]
