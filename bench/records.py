"""Results of a benchmark: a JSON file that says what was run where, and tables as text."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fsdpx.core.base.processor import read_cpuinfo_field

RESULTS = Path(__file__).parent / "results"
QUICK = Path(__file__).parents[1] / "build" / "bench"


def arguments(doc: str, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    p = argparse.ArgumentParser(allow_abbrev=False, description=doc.splitlines()[0])
    p.add_argument("--rounds", type=int, default=rounds, help="how often the competitors take turns")
    p.add_argument("--quick", action="store_true", help="few and short: to see that it runs; results go to build/bench")
    p.add_argument("--out", type=Path, help="folder of the results")
    return p


def save(name: str, options: argparse.Namespace, found: dict[str, Any]) -> Path:
    """Write NAME.json with the command and the machine; the folder it is in."""
    folder = folder_of(options)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command(), "machine": machine(), **found}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    return folder


def folder_of(options: argparse.Namespace) -> Path:
    """Where results go."""
    return options.out or (QUICK if options.quick else RESULTS)


def command() -> str:
    """The line that has started this."""
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def load(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def machine() -> str:
    """The machine and the versions in a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = read_cpuinfo_field("model name") or platform.processor() or platform.machine()
    parts = [f"{processor}, {cores} cores, {platform.system()}, Python {platform.python_version()}"]
    return ", ".join(parts + [f"{name} {_version(name)}" for name in ("numpy", "numba", "mkl", "mpich", "torch")])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def lines(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table: the first `left` columns to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in [head, *rows]
    )  # fmt: skip
