"""python -m fsdpx verify and diff: where two runs differ."""

import argparse
import re
from functools import partial

import numpy as np
import pytest
from commands import command, refused, shown
from models import part

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.__main__ import main, make_parser
from fsdpx.core.base.config import PRESETS
from fsdpx.core.comm import Communicator
from fsdpx.core.engine.operations import OPERATIONS
from fsdpx.core.program import SCHEDULES, Slot
from fsdpx.errors import ConfigError, LaunchError, MeshError
from fsdpx.ext.observe.record import RankRecord, ValueRecorder, read_records
from fsdpx.launch.diff import diff, find_first_tensor_difference
from fsdpx.launch.verify import VerifyCase, VerifySize, list_cases, verify_training_on_communicator


def arguments(line: str) -> argparse.Namespace:
    return make_parser().parse_args(["verify", *line.split()])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def on_threads(line: str, ranks: int) -> list[int]:
    return spawn(lambda comm: verify_training_on_communicator(comm, arguments(line)), ranks)


SEQUENCES = ("", ", sequence parallel", ", sequence ulysses", ", sequence ring", ", sequence samples")


@pytest.mark.parametrize(
    ("options", "ranks", "cases"),
    [
        ("--mesh pipe=2 --schedule all --precision float64", 2,
         [f"fsdp float64, 2 ranks, pipe=2, {schedule}" for schedule in SCHEDULES]),
        ("--mesh tensor=2 --sequence all --precision float64", 2,
         [f"fsdp float64, 2 ranks, tensor=2{sequence}" for sequence in SEQUENCES]),
        ("--mesh tensor=2 --sequence ring", 2, [f"fsdp float{n}, 2 ranks, tensor=2, sequence ring" for n in (64, 32)]),
        ("--strategy zero1 --precision float64", 3, ["zero1 float64, 3 ranks"]),
    ],
    ids=["schedules", "sequences", "precisions", "no mesh"],
)  # fmt: skip
def test_every_case_has_a_line(options, ranks, cases, capsys):
    assert on_threads(f"{options} --steps 2", ranks) == [0] * ranks
    want = [f"OK  {case}: largest relative difference " for case in cases]
    assert [text[: len(start)] for text, start in zip(lines(capsys), want, strict=True)] == want


def test_every_strategy_has_a_line_and_three_axes_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--recompute all --microbatches 2 --steps 2 --precision float64"
    assert on_threads(f"--mesh pipe=2,shard=2 --strategy all {line}", 4) == [0] * 4
    assert on_threads(f"--mesh pipe=2,tensor=2,shard=2 --strategy ddp {line}", 8) == [0] * 8
    *found, three = lines(capsys)
    rows = [re.match(r"OK  (\w+) float64, 4 ranks, (.*), 1f1b, recompute all: ", text) for text in found]
    meshes = {match[1]: match[2] for match in rows if match}
    assert list(meshes) == list(PRESETS)
    assert (meshes["ddp"], meshes["zero3"]) == ("pipe=2 x replica=2", "pipe=2 x shard=2")
    assert three.startswith("OK  ddp float64, 8 ranks, pipe=2 x replica=2 x tensor=2, 1f1b, recompute all: ")


def test_chunks_on_a_pipe_differ_in_no_bit(capsys: pytest.CaptureFixture[str]) -> None:
    on_threads("--mesh pipe=2 --schedule zbv --chunks 4 --precision float32 --steps 2", 4)
    (line,) = lines(capsys)
    assert re.match(r"OK  fsdp float32, 4 ranks, pipe=2 x shard=2, zbv, chunks 4, sha256 \w{16}: .*allowed 0$", line)


def test_a_difference_is_found_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rank of the pipe sends on is a little too large."""
    whole = OPERATIONS["SEND"]

    def lossy(run, action, taken, read, added):
        for value in (*taken, *read):
            if value is not None and value.size:
                np.multiply(value, 1 + 1e-9, out=value)
        return whole(run, action, taken, read, added)

    monkeypatch.setitem(OPERATIONS, "SEND", lossy)
    assert on_threads("--mesh pipe=2 --precision float64 --steps 2", 2) == [1, 1]
    line, *where = lines(capsys)
    assert re.match(r"step 1, action F\d.0 on rank 0, unit", where[0])
    assert re.match(r"activation, .* \(F\d.0 on rank 1\):", where[1])
    assert re.match(r"DIFFERS  fsdp float64, 2 ranks, pipe=2, 1f1b: .* differs by \S+ relative, more than 1e-12", line)


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        ("--mesh pipe=2,tensor=2", MeshError, "needs a multiple of 4 ranks, but the world has 6"),
        ("--mesh pipe=2,shard=2", MeshError, "needs 4 ranks, but the world has 6"),
        ("--schedule zbv", ConfigError, "--schedule zbv: the mesh has no pipe axis"),
        ("--mesh pipe=2 --precision half", ConfigError, "choose float64, float32 or all"),
        ("--mesh pipe=2 --strategy zero9", ConfigError, "unknown strategy 'zero9'"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(line: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        list_cases(arguments(line), 6)


def test_a_mesh_that_one_process_cannot_fill_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "needs a multiple of 2 ranks, but the world has 1"
    assert text in refused("verify --mesh pipe=2")
    monkeypatch.setattr("fsdpx.__main__._is_connected_rank", lambda: True)  # an error of one rank ends the others
    with pytest.raises(MeshError, match=text):
        main(["verify", "--mesh", "pipe=2"])


def test_the_model_has_enough_to_cut() -> None:
    for pipe, tensor in ((1, 1), (2, 5), (8, 3)):
        size = VerifySize.for_mesh(Mesh(pipe=pipe, tensor=tensor, shard=1))
        assert size.layers >= 2 * pipe
        assert size.heads >= tensor
        assert size.width % size.heads == size.seq_len % tensor == 0


def test_only_sums_over_the_tensor_axis_may_round_with_chunks() -> None:
    pipe, tensor = Mesh(pipe=2, shard=2), Mesh(tensor=2, shard=2)
    assert VerifyCase("fsdp", "float32", pipe, chunks=4).tolerance == 0.0
    assert VerifyCase("fsdp", "float32", tensor, chunks=4).tolerance == VerifyCase("fsdp", "float32").tolerance == 1e-5


# Under MPI, test_world.py trains with the other strategies and sequences.
LINES = [
    "--mesh pipe={n} --schedule zbv --recompute all --microbatches {n}",
    "--mesh tensor={n} --sequence samples",
    "--mesh pipe=2,shard={half} --schedule zb-h1 --strategy zero2",
    "--mesh replica={half},tensor=2 --sequence ring --strategy ddp",
]


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("line", LINES)
def test_under_mpi(world: Communicator, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "{half}" in line and world.size % 2:
        pytest.skip("for an even number of ranks")
    line = line.format(n=world.size, half=world.size // 2) + " --precision float64 --steps 2"
    if world.size == 1:
        line = re.sub(r"--(schedule|sequence) \S+", "", line)
    assert verify_training_on_communicator(world, arguments(line)) == 0, lines(capsys)


ROWS, STEPS = 12, 3


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6))


def record(size, strategy="fsdp", *, model=mlp, spoil=None, folder=None, seed=3, **options):
    """What the ranks of a small training wrote. spoil: called with rank, engine and action, before it is recorded."""

    def run(comm):
        given = {"precision": "float64", "group_bytes": 512, "optimizer": optim.AdamW(lr=1e-2), **options}
        trainer = model().as_distributed(loss=nn.MSELoss(), strategy=strategy, comm=comm, seed=seed, **given)
        if spoil is not None:
            trainer.inspect.engine.add_observer(lambda action: spoil(comm.rank, trainer.inspect.engine, action))
        recorder = ValueRecorder(trainer.inspect.engine, STEPS, folder)
        for x, y in np.random.default_rng(1).normal(size=(STEPS, 2, ROWS, 6)):
            mine = part(trainer.data_group, ROWS)
            trainer.step(x[mine], y[mine])
        trainer.close()
        return recorder.kept

    return spawn(run, size)


def flip(rank, engine, action):
    """Change the last bit of one element of a gradient of rank 1, in its second step, after the action that made it."""
    if rank == 1 and engine.state.steps == 1 and str(action) == "B1.0":
        page = engine.placement.layout.pages[1]
        (field,) = (f for f in page.fields if f.name == "2.weight")
        at = field.offset + 5 * 16 + 7
        engine.state.store[Slot("grad", 1)].buffer[at : at + 1].view("u8")[...] ^= 1


def test_two_runs_that_are_the_same():
    assert find_first_tensor_difference(record(2), record(2)) is None


def test_another_learning_rate_is_seen_at_the_update():
    found = find_first_tensor_difference(record(2), record(2, optimizer=optim.AdamW(lr=2e-2)))
    assert (found.step, found.written.kind, found.written.action[:6]) == (1, "shard", "UPDATE")


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1"])
def test_a_bit_of_one_gradient_of_one_rank(strategy):
    found = find_first_tensor_difference(record(2, strategy), record(2, strategy, spoil=flip))
    assert (found.step, found.by[0]) == (2, "B1.0 on rank 1")
    assert found.written.kind == "grad"
    assert (found.worst.tensor, found.worst.index, found.worst.beyond) == ("2.weight", (5, 7), 1)
    assert found.worst.relative < 1e-15
    assert found.before > 50
    words = "step 2, action B1.0 on rank 1, unit '1..2':\ngradient of this rank's samples, 2.weight[5, 7], is "
    assert str(found).startswith(words)


@pytest.mark.parametrize("other", [(2, "fsdp"), (3, "ddp"), (4, "zero1"), (4, "hybrid")])
def test_the_first_sum_that_rounds_otherwise_at_another_number_of_ranks(other):
    def by_rows():
        """Every sample by itself: the sums over samples alone depend on the number of ranks."""
        return nn.Sequential(nn.LayerNorm(6), nn.Tanh(), nn.LayerNorm(6))

    found = find_first_tensor_difference(record(1, model=by_rows), record(*other, model=by_rows))
    assert found.step == 1
    sums = {("mean", "MEAN"), ("total", "REDUCE0")}  # whose last bit is another first depends on the processor
    assert (found.written.kind, found.written.action) in sums
    assert 0 < found.worst.relative < 1e-14
    assert f"The first run sums over 1 rank and the second over {other[0]}, in another order." in str(found)


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "zero1"), (4, "fsdp")])
def test_with_chunks_nothing_differs(size, strategy):
    one, other = record(2, reproducible_chunks=4), record(size, strategy, reproducible_chunks=4)
    assert find_first_tensor_difference(one, other) is None


@pytest.mark.parametrize(("strategy", "actions"), [("fsdp", "SETTLE"), ("ddp", "JOIN")])
def test_the_whole_gradient_is_recorded_once_where_it_is_made(strategy, actions):
    """Of a step of several microbatches, whichever action is the last to add."""
    ranks = record(2, strategy, microbatches=2)
    for step in range(STEPS):
        found = [(kept, row) for kept in ranks for row in kept.steps[step] if row.kind == "total"]
        assert {row.action.rstrip("0123") for _, row in found} == {actions}
        named = [(id(kept), row.tensor, row.runs) for kept, row in found]
        assert len(named) == len(set(named))
        trained = {row.tensor for row in ranks[0].steps[step] if row.kind == "grad"}
        assert {row.tensor for _, row in found} == trained


def test_a_strategy_alone_changes_nothing():
    assert find_first_tensor_difference(record(2, "ddp"), record(2, "zero2")) is None


def test_another_precision_is_compared_with_a_tolerance():
    double, single = record(2), record(2, precision="float32")
    assert find_first_tensor_difference(double, single).written.action == "LOAD.0"
    assert find_first_tensor_difference(double, single, 1e-4) is None


def test_the_schedule_of_a_pipe_is_compared_by_samples():
    run = partial(record, 2, mesh=Mesh(pipe=2), microbatches=4)
    one = run(schedule="gpipe")
    assert find_first_tensor_difference(one, run(schedule="1f1b"), 1e-12) is None
    found = find_first_tensor_difference(one, run(schedule="1f1b", seed=4), 1e-12)
    assert (found.step, found.written.kind) == (1, "full")


def test_records_on_disk_and_the_command(tmp_path):
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    found = find_first_tensor_difference(record(2, folder=calm), record(2, spoil=flip, folder=wild))
    assert str(find_first_tensor_difference(read_records(calm), read_records(wild))) == str(found)
    assert command(f"diff {calm} {wild}")[:2] == (1, f"{found}\n")
    shown(f"diff {calm} {calm}")
    for rank in (1, 0):
        for path in calm.glob(f"values-0000{rank}-*"):
            path.unlink()
        with pytest.raises(ConfigError, match=r"there are values of ranks|nothing was recorded"):
            read_records(calm)


def test_nothing_in_common():
    with pytest.raises(ConfigError, match="no value in common"):
        find_first_tensor_difference(record(1), [RankRecord(0, 1, "")])


SCRIPT = """
import sys
seed = int(sys.argv[1])
import numpy as np
import fsdpx
from fsdpx import nn, optim

comm = fsdpx.init()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
trainer = model.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, seed=seed)
x, y = np.random.default_rng(1).normal(size=(2, 8, 4))
mine = slice(8 // comm.size * comm.rank, 8 // comm.size * (comm.rank + 1))
trainer.step(x[mine], y[mine, :2])
trainer.close()
"""


@pytest.mark.jobs
def test_the_command_starts_two_runs(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["diff", f"-n 2 {script} 1", f"-n 1 {script} 2"]) == 1
    assert capfd.readouterr().out.startswith(
        "step 1, action GATHER0 on rank 0, page '0.weight..2.bias':\ngathered parameter, 0.weight["
    )
    with pytest.raises(LaunchError, match="has ended with status"):
        diff(make_parser().parse_args(["diff", f"{script} none", f"{script} 2"]))


def test_traces_are_compared_by_their_actions(tmp_path):
    for strategy in ("fsdp", "ddp"):
        record(2, strategy, trace=tmp_path / strategy)
    status, text, _ = command(f"diff {tmp_path}/fsdp {tmp_path}/ddp")
    assert status == 1
    assert re.match(r"rank 0, action \d+: FREE0 in the first trace, GATHER2 in the second$", text)
    shown(f"diff {tmp_path}/fsdp {tmp_path}/fsdp")


def test_what_cannot_be_run_or_compared(tmp_path):
    record(1, folder=tmp_path / "values")
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.py").write_text("")
    for first, second, words in [
        ("nothing", "here", "'nothing': there is no such folder, and no script.py or run.toml in this text to run"),
        (tmp_path / "values", "typo", "'typo': there is no such folder, and no script.py"),
        (tmp_path / "empty", "typo", "'typo': there is no such folder, and no script.py"),
        (tmp_path / "train.py", "typo", "'typo': there is no such folder, and no script.py"),
        (tmp_path / "values", tmp_path / "empty", "two of one kind are compared"),
        (tmp_path / "train.py", tmp_path / "empty", "train.py is a run and .*empty is a checkpoint: two of one kind"),
    ]:
        with pytest.raises(ConfigError, match=words):
            diff(make_parser().parse_args(["diff", str(first), str(second)]))
