"""The folder of a run: arguments, log, curve, checkpoints and trained model, where a later start finds them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.version import __version__

RUNS = Path("runs")


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    def arguments(self) -> dict[str, Any]:
        """With which the run was begun."""
        try:
            found: dict[str, Any] = json.loads(self.config.read_text())["arguments"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.config}: no run can be taken up there: {error}") from error
        return found

    def begin(self, arguments: dict[str, Any], ranks: int) -> None:
        """Write what the run is. On one rank."""
        self.path.mkdir(parents=True, exist_ok=True)
        versions = {"fsdpx": __version__, "python": sys.version.split()[0]}
        told = {"arguments": arguments, "ranks": ranks, "versions": versions, "begun": time.strftime("%F %T")}
        self.config.write_text(json.dumps(told, indent=1) + "\n")

    def draw(self) -> bool:
        """The losses by step as a picture; False without matplotlib. On one rank."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for name, style in (("loss", "-"), ("validation_loss", "o-")):
            found = [(row["step"], row[name]) for row in rows if name in row]
            axes.plot(*zip(*found, strict=True), style, label=name.replace("_", " "), linewidth=1, markersize=4)
        axes.set_xlabel("step")
        axes.set_ylabel("nats per byte")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.curve, dpi=120)
        return True


def choose(name: str, given: str | None, resume: bool, comm: Any) -> tuple[RunFolder, dict[str, Any]]:
    """The folder, and the arguments of the run that is taken up there. Rank 0 decides for all. Collective.

    given: a folder; else one of the time of day, or with `resume` the newest one of this name."""

    def decide() -> tuple[RunFolder, dict[str, Any]]:
        if not resume:
            folder = RunFolder(Path(given) if given else RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
            if folder.config.exists():
                raise ConfigError(f"{folder.path} holds a run: go on with it by --resume, or name another folder")
            return folder, {}
        known = sorted(path.parent for path in RUNS.glob(f"{name}-*/config.json"))
        if not given and not known:
            raise ConfigError(f"--resume: there is no {RUNS}/{name}-*: start without it first, or name a --run")
        folder = RunFolder(Path(given) if given else known[-1])
        return folder, folder.arguments()

    return _of_rank_0(comm, decide)


def _of_rank_0(comm: Any, decide: Callable[[], Any]) -> Any:
    found: Any = None
    try:
        found = decide() if comm.rank == 0 else None
    except ConfigError as error:
        found = error
    found = comm.all_gather_object(found)[0]
    if isinstance(found, ConfigError):
        raise found
    return found
