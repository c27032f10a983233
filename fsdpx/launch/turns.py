"""`bench step`: strategies take turns of one step each on the same ranks, so that the load of a machine meets all."""

from __future__ import annotations

import argparse
import errno
import json
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx import environment, optim
from fsdpx.comm.communicator import Communicator
from fsdpx.config import sharding
from fsdpx.errors import ConfigError, LaunchError
from fsdpx.facade.distribute import distribute
from fsdpx.facade.functional import init
from fsdpx.launch import run
from fsdpx.launch.catalog import CatalogModel, entry
from fsdpx.launch.options import LaunchConfig
from fsdpx.state.tuning import table
from fsdpx.trainer.recipe import Distribution
from fsdpx.version import __version__

__all__ = ["compare", "step", "unwritable"]

WARM = 3
"""Steps of each strategy that are not timed: memory is touched, kernels are compiled."""


def step(args: argparse.Namespace) -> int:
    """Start the ranks if they are not there, measure and print; the exit status."""
    strategies, example = [name.strip() for name in args.strategies.split(",")], entry(args.model, args.batch)
    for name in strategies:
        sharding(Distribution(name).within(1), 1)
    if args.rounds < 1:
        raise LaunchError(f"--rounds {args.rounds}: 1 or more")
    launcher = environment.read().launcher
    if launcher is None and args.ranks is not None:
        words = ["-m", "fsdpx", "bench", "step", args.model, "--strategies", args.strategies, "--rounds",
                 str(args.rounds), "--precision", args.precision]  # fmt: skip
        words += [] if args.batch is None else ["--batch", args.batch]
        words += ["--json", str(args.json.absolute())] if args.json else []
        return run.run(LaunchConfig(args.ranks, max_restarts=0), words).status
    with init() as comm:
        if args.ranks not in (None, comm.size):
            raise LaunchError(f"-n {args.ranks}: the launcher has started {comm.size} ranks; leave -n out under it")
        if wrong := comm.all_gather_plain(unwritable(args.json))[0]:
            raise LaunchError(f"--json {args.json} cannot be written ({wrong}): name a file in a folder that is there")
        report = compare(comm, example, strategies, args.rounds, args.precision)
        if comm.rank == 0:
            print(_text(args.model, report))
            if args.json is not None:
                args.json.write_text(json.dumps({"model": args.model, **report}, indent=1))
    return 0


def compare(
    comm: Communicator, example: CatalogModel, strategies: Sequence[str], rounds: int, precision: str = "float32"
) -> dict[str, Any]:
    """The content of `--json`, the same on all ranks: of each strategy the median time of a step, its slowest rank's,
    and the median of its ratio to the first one's of the same round. Collective."""
    first, end = (example.batch * n // comm.size for n in (comm.rank, comm.rank + 1))
    x, y = (_drawn(spec(example.batch), seed)[first:end] for seed, spec in enumerate((example.x, example.y)))
    taken: list[list[float]] = []
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(
                distribute(
                    example.model(), loss=example.loss, optimizer=optim.AdamW(lr=1e-3), comm=comm, strategy=name,
                    precision=precision,
                )
            )
            for name in strategies
        ]  # fmt: skip
        for n in range(-WARM, rounds):
            row = [0.0] * len(trainers)
            for k in range(len(trainers)):
                at = (k + n) % len(trainers)  # each is the first of a round as often as the others
                comm.barrier(what="bench").wait()
                begin = time.perf_counter()
                trainers[at].step(x, y)
                row[at] = time.perf_counter() - begin
            taken += [row] if n >= 0 else []
    slowest = np.max(comm.all_gather_plain(taken), axis=0)
    rows = [
        {"strategy": name, "seconds": statistics.median(times), "least": min(times),
         "ratio": statistics.median(times / slowest[:, 0])}
        for name, times in zip(strategies, slowest.T, strict=True)
    ]  # fmt: skip
    return {
        "fsdpx": __version__, "about": example.about, "ranks": comm.size, "batch": example.batch,
        "precision": precision, "hosts": sorted(set(comm.all_gather_plain(platform.node()))), "rounds": rounds,
        "strategies": rows,
    }  # fmt: skip


def unwritable(path: Path | None) -> str:
    """Why the file cannot be written, known before anything is measured."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "")
    return ""


def _drawn(spec: tuple[tuple[int, ...], str], seed: int) -> np.ndarray:
    """A global batch; whole numbers are 0 and 1, which all models take."""
    shape, dtype = spec
    random = np.random.default_rng(seed)
    if not isinstance(dtype, str):
        raise ConfigError("models of one input and one target are compared")
    return random.integers(0, 2, shape).astype(dtype) if "int" in dtype else random.standard_normal(shape).astype(dtype)


def _text(name: str, report: dict[str, Any]) -> str:
    rows = [("strategy", "ms a step", "least ms", f"beside {report['strategies'][0]['strategy']}")]
    rows += [
        (one["strategy"], f"{1e3 * one['seconds']:.2f}", f"{1e3 * one['least']:.2f}", f"{one['ratio']:.3f}")
        for one in report["strategies"]
    ]
    head = f"{name}: {report['about']}; batch {report['batch']}, {report['precision']}, {report['ranks']} ranks"
    return (
        f"{head} on {', '.join(report['hosts'])}\n{table(rows)}\nmedians of {report['rounds']} rounds, in which each "
        "strategy makes one step; the slowest rank counts; ratios are of steps of the same round"
    )
