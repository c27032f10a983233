"""Variants of one training compared: every variant and seed is a job of its own, and a row of the results.

A script's own command line starts a job as `SCRIPT job VARIANT OPTIONS`; rank 0 prints what it found as JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from jobs import environ, finish, mpiexec, start
from records import arguments, command, folder_of, load, save

__all__ = ["compare", "job", "parser"]


def parser(
    doc: str, which: str, variants: Iterable[str], seeds: Sequence[int] = (0, 1, 2), ranks: int = 1, steps: int = 300
) -> argparse.ArgumentParser:
    """The options of all such scripts; `which` chooses among the variants."""
    p = arguments(doc, rounds=1)
    p.add_argument("--seeds", nargs="+", type=int, default=[*seeds])
    p.add_argument("--ranks", type=int, default=ranks)
    p.add_argument("--steps", type=int, default=steps, help="of each training; schedules of learning rates follow")
    p.add_argument(which, dest="variants", nargs="+", default=[*variants], choices=[*variants])
    p.add_argument("--add", action="store_true", help="keep what the results have of others, trained as long")
    return p


def job() -> tuple[str, dict[str, Any]] | None:
    """The variant and the options, if this process is a rank of a job."""
    return (sys.argv[2], json.loads(sys.argv[3])) if sys.argv[1:2] == ["job"] else None


def compare(
    script: str,
    kind: str,
    options: argparse.Namespace,
    asked: dict[str, Any],
    tables: Callable[[dict[str, Any]], list[tuple[str, str]]],
    jobs: int = 1,
) -> int:
    """Run the jobs, and print and save what they found. kind: of variants, the key of their names. asked: what all jobs
    are asked for, beside the seed. jobs: so many at a time."""
    seeds, found = options.seeds[:1] if options.quick else options.seeds, {**asked, "ranks": options.ranks, "rows": []}
    if options.add:
        found |= _kept(Path(script).stem, kind, options, found, set(product(seeds, options.variants)))
    here = [sys.executable] if options.ranks == 1 else mpiexec(options.ranks)

    def row(seed_and_name: tuple[int, str]) -> dict[str, Any]:
        seed, name = seed_and_name
        words = [*here, script, "job", name, json.dumps({**asked, "seed": seed})]
        return {kind: name, "seed": seed, **finish(start(words, environ()), patience=7200)}

    with ThreadPoolExecutor(jobs) as pool:
        for made in pool.map(row, product(seeds, options.variants)):
            found["rows"].append(made)
            print(json.dumps(made), flush=True)
            save(Path(script).stem, options, found)
    for title, text in tables(found):
        print(f"{title}\n{text}\n", flush=True)
    return 0


def _kept(
    name: str, kind: str, options: argparse.Namespace, asked: dict[str, Any], new: set[tuple[int, str]]
) -> dict[str, Any]:
    """The rows of earlier results that are not made anew, and the commands of all."""
    found = load(name, folder_of(options)) or sys.exit(f"--add: {folder_of(options)} has no results of {name}")
    if other := [key for key in asked if key != "rows" and found[key] != asked[key]]:
        sys.exit(f"--add: the results are of {other[0]}={found[other[0]]}, not {asked[other[0]]}")
    rows = [row for row in found["rows"] if (row["seed"], row[kind]) not in new]
    return {"command": f"{found['command']}; {command(name)}", "rows": rows}
