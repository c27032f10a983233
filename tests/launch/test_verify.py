"""`verify` on thread ranks and under MPI: every mesh, schedule and sequence, a line each; what differs is named."""

import argparse
import re

import numpy as np
import pytest
from amount import in_full

import fsdpx
from fsdpx.__main__ import main, parser
from fsdpx.comm import Communicator
from fsdpx.config import PRESETS
from fsdpx.errors import ConfigError, MeshError
from fsdpx.launch.verify import VerifyCase, VerifySize, cases, verify_on
from fsdpx.program import SCHEDULES


def arguments(line: str) -> argparse.Namespace:
    return parser().parse_args(["verify", *line.split()])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def on_threads(line: str, ranks: int) -> list[int]:
    return fsdpx.spawn(lambda comm: verify_on(comm, arguments(line)), ranks)


@in_full
def test_every_schedule_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads("--mesh pipe=3 --schedule all --precision float64 --steps 2", 3) == [0] * 3
    want = [f"OK  fsdp float64, 3 ranks, pipe=3, {schedule}: " for schedule in SCHEDULES]
    assert [text[: len(start)] for text, start in zip(lines(capsys), want, strict=True)] == want


@in_full
def test_every_sequence_has_a_line_in_each_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_threads("--mesh pipe=2,tensor=2 --sequence all --steps 2", 4) == [0] * 4
    sequences = ("", ", sequence parallel", ", sequence ulysses", ", sequence ring", ", sequence samples")
    formats = ("float64", "float32")
    want = [f"OK  fsdp {f}, 4 ranks, pipe=2 x tensor=2, 1f1b{s}: " for f in formats for s in sequences]
    assert [text[: len(start)] for text, start in zip(lines(capsys), want, strict=True)] == want


@in_full
def test_every_strategy_on_three_axes(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--mesh pipe=2,tensor=2,shard=2 --strategy all --recompute all --steps 2 --precision float64"
    assert on_threads(line, 8) == [0] * 8
    found = [re.match(r"OK  (\w+) float64, 8 ranks, (.*), 1f1b, recompute all: ", text) for text in lines(capsys)]
    assert all(found)
    meshes = {match[1]: match[2] for match in found if match}
    assert list(meshes) == list(PRESETS)
    assert meshes["ddp"] == "pipe=2 x replica=2 x tensor=2"
    assert meshes["zero3"] == "pipe=2 x shard=2 x tensor=2"


@in_full
def test_chunks_on_a_pipe_differ_in_no_bit(capsys: pytest.CaptureFixture[str]) -> None:
    on_threads("--mesh pipe=2 --schedule zbv --chunks 4 --precision float32 --steps 2", 4)
    (line,) = lines(capsys)
    assert re.match(r"OK  fsdp float32, 4 ranks, pipe=2 x shard=2, zbv, chunks 4, sha256 \w{16}: .*allowed 0$", line)


def test_without_a_mesh_the_line_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    on_threads("--strategy zero1 --precision float64 --steps 2", 3)
    (line,) = lines(capsys)
    assert line.startswith("OK  zero1 float64, 3 ranks: largest relative difference ")


def test_a_difference_is_found_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rank of the pipe sends on is a little too large."""
    from fsdpx.engine import operations

    whole = operations.OPERATIONS["SEND"]

    def lossy(run, action, taken, read, added):  # type: ignore[no-untyped-def]
        for value in (*taken, *read):
            if value is not None and value.size:
                np.multiply(value, 1 + 1e-9, out=value)
        return whole(run, action, taken, read, added)

    monkeypatch.setitem(operations.OPERATIONS, "SEND", lossy)
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
        ("--mesh pipes=2", MeshError, "the axes are pipe, replica, shard, tensor"),
        ("--schedule zbv", ConfigError, "--schedule zbv: the mesh has no pipe axis"),
        ("--mesh pipe=2 --precision half", ConfigError, "choose float64, float32 or all"),
        ("--mesh pipe=2 --strategy zero9", ConfigError, "unknown strategy 'zero9'"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(line: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        cases(arguments(line), 6)


def test_a_mesh_that_one_process_cannot_fill_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--mesh", "pipe=2"]) == 2
    assert "needs a multiple of 2 ranks, but the world has 1" in capsys.readouterr().err


def test_the_model_has_enough_to_cut() -> None:
    for pipe, tensor in ((1, 1), (2, 5), (8, 3)):
        size = VerifySize.on(fsdpx.Mesh(pipe=pipe, tensor=tensor, shard=1))
        assert size.layers >= 2 * pipe
        assert size.heads >= tensor
        assert size.width % size.heads == size.seq_len % tensor == 0


def test_only_sums_over_the_tensor_axis_may_round_with_chunks() -> None:
    pipe, tensor = fsdpx.Mesh(pipe=2, shard=2), fsdpx.Mesh(tensor=2, shard=2)
    assert VerifyCase("fsdp", "float32", pipe, chunks=4).tolerance == 0.0
    assert VerifyCase("fsdp", "float32", tensor, chunks=4).tolerance == VerifyCase("fsdp", "float32").tolerance == 1e-5


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize(
    "line",
    [
        "--mesh pipe={n} --schedule zbv",
        "--mesh pipe={n} --schedule interleaved --recompute all",
        "--mesh tensor={n} --sequence all",
        "--mesh shard={n} --strategy zero2",
        "--mesh pipe=2,shard={half} --schedule zb-h1 --strategy all",
        "--mesh replica={half},tensor=2 --sequence ring --strategy ddp",
    ],
)
def test_under_mpi(world: Communicator, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "{half}" in line and world.size % 2:
        pytest.skip("for an even number of ranks")
    line = line.format(n=world.size, half=world.size // 2)
    if world.size == 1:
        line = re.sub(r"--(schedule|sequence) \S+", "", line)
    assert verify_on(world, arguments(f"{line} --precision float64 --steps 2")) == 0, lines(capsys)
