"""`diff`: find the first step, action, tensor and element at which two runs differ, and by how much."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fsdpx.core.base import environment
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.extensions import import_declared_extension, list_extensions
from fsdpx.core.base.messages import format_count
from fsdpx.core.program import VERBS
from fsdpx.errors import ConfigError, LaunchError, escape_control
from fsdpx.ext.observe import chrome
from fsdpx.ext.observe.record import KIND_NAMES, RankRecord, WrittenTensor, read_records
from fsdpx.launch.ckpt import print_checkpoint_differences
from fsdpx.testing.compare import WorstElement, find_difference

__all__ = ["FirstDifference", "add_options", "diff", "find_first_tensor_difference"]

ValuePiece = tuple[int, int, np.ndarray]
"""Elements [start, stop) of a tensor, with their values."""


@dataclass(frozen=True)
class FirstDifference:
    """The first value that differs between two runs, in the order in which the first run computed its values.

    Parameters
    ----------
    step : step in which the runs first differ, counted from 1
    written : the tensor that differs, as the first run wrote it
    by : for each of the two runs, text that names the action and the rank that wrote the tensor
    worst : the element that differs most; for per-sample values, the first index of the element is the index of the
        sample in the global batch
    ranks : number of ranks of the first run, and of the second run
    before : number of values that were computed before the differing value; all of them are equal in both runs
    """

    step: int
    written: WrittenTensor
    by: tuple[str, str]
    worst: WorstElement
    ranks: tuple[int, int]
    before: int

    def __str__(self) -> str:
        one, worst, (first, second) = self.written, self.worst, self.ranks
        at = f"[{', '.join(map(str, worst.index))}]" if worst.index else ""
        also = "" if self.by[0] == self.by[1] else f" ({self.by[1]})"
        why = ""
        if one.kind in ("total", "mean") and first != second:
            ranks = format_count(first, "rank")
            why = f"\nThe first run sums over {ranks} and the second over {second}, in another order."
        return (
            f"step {self.step}, action {self.by[0]}, {one.about}:\n{KIND_NAMES[one.kind]}, {one.tensor}{at}, is "
            f"{worst.want!s} in the first run and {worst.got!s} in the second{also}:\n{worst.relative:.3g} of the "
            f"largest element apart. {worst.beyond:,} of {worst.elements:,} elements differ, and {self.before:,} "
            f"values before agree.{why}"
        )


def find_first_tensor_difference(
    a: Sequence[RankRecord], b: Sequence[RankRecord], tolerance: float = 0.0
) -> FirstDifference | None:
    """Compare all tensors that the ranks of two runs wrote, and return the first difference that exceeds `tolerance`.
    Return None if there is no such difference. Each run is given as one record per rank.

    If the programs and the sharding of both runs are identical, the runs are compared rank by rank and action by
    action. Otherwise the full tensors are compared element by element."""
    same_programs = [(one.cut, one.programs) for one in a] == [(one.cut, one.programs) for one in b]
    agreed = compared = 0
    for step in range(min(len(one.steps) for one in (*a, *b))):
        theirs: dict[Hashable, list[tuple[WrittenTensor, str]]] = defaultdict(list)
        for other, by, of in _iterate_tensors_written_in_step(b, step, same_programs):
            theirs[of].append((other, by))
        last = Counter(key[0] for key in theirs)  # type: ignore[index]
        for one, by, (key, time) in _iterate_tensors_written_in_step(a, step, same_programs):
            for other, other_by in theirs.get((key, min(time, last[key] - 1)), ()):
                compared += 1
                worst = _find_worst_common_element(one, other, tolerance)
                if worst is not None:
                    return FirstDifference(step + 1, one, (by, other_by), worst, (len(a), len(b)), agreed)
            agreed += 1
    if not compared:
        raise ConfigError("these runs have no value in common: compare runs of one model on the same batches")
    return None


def _iterate_tensors_written_in_step(
    records: Sequence[RankRecord], step: int, same_programs: bool
) -> Iterator[tuple[WrittenTensor, str, tuple[Hashable, int]]]:
    """Yield the tensors that the ranks wrote in a step, in program order, as (tensor, text that names action and rank,
    key).

    The key is the same for a tensor of one run and the corresponding tensor of the other run. The key consists of
    values that identify the tensor, and the number of times that the tensor was written before."""
    times: Counter[Hashable] = Counter()
    rows = [(one.at, record.rank, n, one) for record in records for n, one in enumerate(record.steps[step])]
    for _, rank, _, one in sorted(rows, key=lambda row: row[:3]):
        if not (same_programs or one.is_split_independent):
            continue
        key: Hashable = (rank, one.action, one.kind, one.tensor, one.runs) if same_programs else (one.kind, one.tensor)
        mine = rank, key, one.runs
        yield one, f"{one.action} on rank {rank}", (key, times[mine])
        times[mine] += 1


def _list_contiguous_ranges_of_tensor(written: WrittenTensor) -> list[ValuePiece]:
    """Return the contiguous ranges of a written tensor as (start, stop, values), where start and stop are flat indices
    into the full tensor."""
    at, found = 0, []
    for start, stop in written.runs:
        found.append((start, stop, written.values[at : at + stop - start]))
        at += stop - start
    return found


def _find_worst_common_element(one: WrittenTensor, other: WrittenTensor, tolerance: float) -> WorstElement | None:
    """Return the element with the largest difference among the elements that both runs wrote. Return None if no
    difference exceeds the tolerance."""
    overlaps = [
        (low, want[low - start : high - start], got[low - first : high - first])
        for start, stop, want in _list_contiguous_ranges_of_tensor(one)
        for first, last, got in _list_contiguous_ranges_of_tensor(other)
        if (low := max(start, first)) < (high := min(stop, last))
    ]
    if not overlaps:
        return None
    starts, wants, gots = zip(*overlaps, strict=True)
    want, got = np.concatenate(wants), np.concatenate(gots)
    wide = np.result_type(want, got)
    found = find_difference(got.astype(wide), want.astype(wide), tolerance)
    if found is None:
        return None
    numbers = np.concatenate([np.arange(low, low + part.size) for low, part in zip(starts, wants, strict=True)])
    index = _unravel_index(int(numbers[found.index[0]]), one.shape)
    return WorstElement(**{**vars(found), "tensor": one.tensor, "index": index})


def _unravel_index(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Convert a flat element index to a multi-dimensional index. The first index may be beyond shape[0], because
    `shape` may be the shape of one rank's shard."""
    index: list[int] = []
    for size in reversed(shape[1:]):
        element, at = divmod(element, size)
        index.append(at)
    return tuple([element, *index[::-1]] if shape else index)


def add_options(p: argparse.ArgumentParser) -> None:
    what = (
        "a run, in quotes as after `fsdpx run`: '-n 2 script.py' or '-n 2 run.toml --set ...'; or the folder of a run "
        "with FSDPX_RECORD, of a checkpoint, or of traces"
    )
    p.add_argument("first", help=what)
    p.add_argument("second", help="the same for the second run")
    p.add_argument("--steps", type=int, default=3, help="steps to record of a run that is started (default: 3)")
    p.add_argument("--tolerance", type=float, default=0.0, help="relative to a tensor's largest element (default: 0)")


def diff(args: argparse.Namespace) -> int:
    """Print the first difference between two runs, checkpoints or traces. Return 1 if there is one, else 0."""
    first, second = Path(args.first), Path(args.second)
    kinds = [_classify_path_argument(path) for path in (first, second)]
    for text, kind in zip((args.first, args.second), kinds, strict=True):
        if kind == "run":
            _find_script_index(shlex.split(text), text)
    if kinds == ["trace", "trace"]:
        return _print_difference(_describe_first_differing_action(first, second))
    if kinds == ["checkpoint", "checkpoint"]:
        return print_checkpoint_differences(first, second)
    if {"trace", "checkpoint"} & set(kinds):
        raise ConfigError(f"{first} is a {kinds[0]} and {second} is a {kinds[1]}: two of one kind are compared")
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            path if kind == "record" else _run_job_and_record_values(text, Path(folder, name), args.steps)
            for path, kind, text, name in zip((first, second), kinds, (args.first, args.second), "ab", strict=True)
        ]
        return _print_difference(
            find_first_tensor_difference(read_records(runs[0]), read_records(runs[1]), args.tolerance)
        )


def _print_difference(found: object) -> int:
    """Print the difference `found`, or "no difference" if it is None. Return 1 if there is a difference, else 0."""
    print("no difference" if found is None else escape_control(str(found)))
    return 0 if found is None else 1


def _classify_path_argument(path: Path) -> str:
    """Return what a command-line argument refers to: "run" (a job to start), "record" (the values that a run
    recorded), "trace" or "checkpoint"."""
    if not path.exists() or path.suffix in (".py", ".toml"):
        return "run"
    if path.is_dir() and any(path.glob("values-*")):
        return "record"
    return "trace" if path.is_dir() and any(path.glob("rank-*.json.gz")) else "checkpoint"


def _find_script_index(words: Sequence[str], text: str) -> int:
    """Return the index in `words` of the script (.py) or run file (.toml). Raise ConfigError if there is none."""
    script = next((n for n, word in enumerate(words) if word.endswith((".py", ".toml"))), None)
    if script is None:
        raise ConfigError(f"{text!r}: there is no such folder, and no script.py or run.toml in this text to run")
    return script


def _run_job_and_record_values(text: str, folder: Path, steps: int) -> Path:
    """Run a job with `fsdpx run`, record all values that it computes in the first `steps` steps, and return the folder
    of the record."""
    words = shlex.split(text)
    script = _find_script_index(words, text)
    if words[script].endswith(".toml"):
        words[script:script] = ["-m", "fsdpx", "train"]
        words += ["--run", str(folder.with_name(f"{folder.name}-run"))]
    command = [sys.executable, "-m", "fsdpx", "run", "--max-restarts", "0", *words]
    done = subprocess.run(
        command, env=environment.make_recording_environment(folder, steps), stdout=sys.stderr, check=False
    )
    if done.returncode:
        raise LaunchError(f"{shlex.join(command)} has ended with status {done.returncode}: there is no run to compare")
    return folder


def _describe_first_differing_action(first: Path, second: Path) -> str | None:
    """Compare the traces of two runs rank by rank, and return a message about the first action that differs. Return
    None if no action differs. Times are not compared."""
    for name in list_extensions("verbs"):
        import_declared_extension("verbs", name)
    lanes = {verb.lane for verb in VERBS.values()}
    for a, b in zip(chrome.read_traces(first), chrome.read_traces(second), strict=False):
        one, other = ([event["name"] for event in rank.events if event.get("cat") in lanes] for rank in (a, b))
        for n in range(max(len(one), len(other))):
            pair = [names[n] if n < len(names) else "nothing" for names in (one, other)]
            if pair[0] != pair[1]:
                return f"rank {a.header.rank}, action {n + 1}: {pair[0]} in the first trace, {pair[1]} in the second"
    return None
