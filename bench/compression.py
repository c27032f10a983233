"""What does each way to send less save and cost: step time and bytes on slow networks?

    python bench/compression.py [--model small] [--ranks 2 4] [--gbit 1 10] [--seconds 4] [--precision bf16] [--quick]

Data parallelism ("ddp") over virtual hosts, one rank each, whose links carry so many gigabits a second (`hosts.py`;
needs root); elsewhere, and with --delay, over a communicator that lets each call take its time, bytes / bandwidth.
From the times at both bandwidths follow the seconds of a step that do not depend on it, and the bandwidth below which
a codec is faster than plain. A step of local training is a mean over whole rounds. Where training ends with each codec
is the question of `lossy.py`.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hosts import inside, offered, virtual_hosts
from jobs import beside, environ, finish, mpiexec, start
from plots import curves
from records import arguments, lines, save

import fsdpx
from fsdpx import optim
from fsdpx.array.blas import halves
from fsdpx.comm import Communicator
from fsdpx.comm.calls import Call, Handle
from fsdpx.comm.communicator import Wrapper, moved

__all__ = ["CODECS", "Delayed", "fitted", "tables"]

CODECS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"codec": "plain"},
    "bf16": lambda: {"codec": "bf16"},
    "int8": lambda: {"codec": "int8"},
    "top 1 %": lambda: {"codec": fsdpx.TopK(0.01)},
    "powersgd 2": lambda: {"codec": fsdpx.PowerSGD(2)},
    "powersgd 4": lambda: {"codec": fsdpx.PowerSGD(4)},
    "local SGD, H = 8": lambda: {"strategy": "local_sgd"},
    "DiLoCo, H = 50": lambda: {"strategy": "diloco"},
    "plain, float32": lambda: {"codec": "plain", "precision": "float32"},
}
"""Options by which each row differs from the others, which all compute in the same precision."""
LATENCY = 50e-6


class Delayed(Wrapper):
    """Calls are complete when their bytes have passed a link of this rank, one call after the other."""

    def __init__(self, comm: Communicator, gbit: float, free: list[float] | None = None) -> None:
        super().__init__(comm)
        self.gbit, self.free = gbit, [0.0] if free is None else free

    def issue(self, call: Call) -> Handle:
        seconds = LATENCY + moved(self, call) * 8e-9 / self.gbit if self.size > 1 else 0.0
        self.free[0] = max(time.perf_counter(), self.free[0]) + seconds
        return Late(self.comm.issue(call), self.free[0])

    def wrap(self, group: Communicator) -> Communicator:
        return Delayed(group, self.gbit, self.free)


class Late:
    """The handle of a call that is complete at `due` at the earliest."""

    def __init__(self, handle: Handle, due: float) -> None:
        self.handle, self.due = handle, due

    def test(self) -> bool:
        return self.handle.test() and time.perf_counter() >= self.due

    def wait(self) -> None:
        self.handle.wait()
        time.sleep(max(self.due - time.perf_counter(), 0.0))


# -- times -------------------------------------------------------------------------------------------------------------


def job(args: argparse.Namespace) -> int:
    """One training, timed; rank 0 prints its seconds per step, and the bytes of a step of the rank that sends most."""
    from workloads import MODELS, batch, in_fsdpx

    comm = fsdpx.init()
    model, loss = in_fsdpx(MODELS[args.model])
    options = {"optimizer": optim.AdamW(lr=3e-4), "strategy": "ddp", "precision": args.precision, **CODECS[args.job]()}
    whole = comm if args.delayed is None else Delayed(comm, args.delayed)
    trainer = model.as_distributed(loss=loss, comm=whole, tune=False, **options)
    x, y = batch(replace(MODELS[args.model], rows=args.rows * comm.size), comm.rank, comm.size)
    local = trainer.placement.options.local
    seconds, sent = measured(lambda: trainer.step(x, y), trainer, comm, args.seconds, local.every if local else 1)
    everyone = comm.all_gather_object(sent)
    if comm.rank == 0:
        print(json.dumps({"seconds": seconds, "bytes": max(everyone)}), flush=True)
    return 0


def measured(
    step: Callable[[], float], trainer: Any, comm: Communicator, seconds: float, every: int
) -> tuple[float, float]:
    """The median time of a step, and the bytes that this rank sends in one. every: steps of a round, of which only
    whole ones count."""

    def round_() -> float:
        begin = time.perf_counter()
        for _ in range(every):
            step()
        return (time.perf_counter() - begin) / every

    for _ in range(3 if every == 1 else 0):
        round_()
    trainer.reset()
    alike = max(comm.all_gather_object(round_()))  # ranks must agree on how many rounds there are
    sent = sum(n.bytes for (axis, _), n in trainer.report().traffic.items() if axis == "replica") / every
    rounds = max(math.ceil(seconds / (alike * every)), 3 if every == 1 else 1)
    return statistics.median(round_() for _ in range(rounds)), sent


def times(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every codec, in turns, at every bandwidth and number of ranks."""
    virtual, rows = offered() and not options.delay, []
    for ranks in options.ranks:
        for gbit in options.gbit:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.codecs}
            for _ in range(options.rounds):
                for name in options.codecs:
                    found[name].append(_ran(name, ranks, gbit, options, virtual))
            for name, each in found.items():
                good = [one for one in each if "failed" not in one]
                row = {"codec": name, "ranks": ranks, "gbit": gbit, "network": "virtual" if virtual else "delayed"}
                row["precision"] = CODECS[name]().get("precision", options.precision)
                row |= good[0] | {"seconds": statistics.median(o["seconds"] for o in good)} if good else each[0]
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def _ran(name: str, ranks: int, gbit: float, options: argparse.Namespace, virtual: bool) -> dict[str, Any]:
    command = [str(Path(__file__)), "--job", name, "--model", options.model, "--rows", str(options.rows)]
    command += ["--seconds", str(options.seconds), "--precision", options.precision]
    if not virtual:
        return finish(start([*mpiexec(ranks), *command, "--delayed", str(gbit)], environ()), 600)
    with virtual_hosts(ranks, gbit) as folder:
        return finish(start(inside(folder, beside("mpiexec"), ranks, [sys.executable, *command]), environ()), 600)


def fitted(rows: list[dict[str, Any]], ranks: int, codec: str) -> tuple[float, float] | None:
    """(c, k) of seconds = c + k / gbit through the times at the lowest and the highest bandwidth."""
    found = {r["gbit"]: r["seconds"] for r in rows if (r["ranks"], r["codec"]) == (ranks, codec) and "seconds" in r}
    if len(found) < 2:
        return None
    low, high = min(found), max(found)
    k = max((found[low] - found[high]) / (1 / low - 1 / high), 0.0)
    return found[low] - k / low, k


def _break_even(plain: tuple[float, float], other: tuple[float, float]) -> str:
    saved, spent = plain[1] - other[1], other[0] - plain[0]
    if saved <= 0:
        return "never"
    return f"{saved / spent:,.1f} Gbit/s" if spent > 0 else "always"


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows, made = found["rows"], []
    gbits = sorted({row["gbit"] for row in rows})
    for ranks in sorted({row["ranks"] for row in rows}):
        text = []
        known = {(r["codec"], r["gbit"]): r for r in rows if r["ranks"] == ranks}
        plain = fitted(rows, ranks, "plain")
        for name in dict.fromkeys(r["codec"] for r in rows):
            each = [known.get((name, g), {}) for g in gbits]
            if any("seconds" not in one for one in each):
                reason = next(one.get("failed", "not measured") for one in each if "seconds" not in one)
                text.append([name, *[""] * (2 * len(gbits) + 2), reason])
                continue
            base = {g: known.get(("plain", g), {}).get("seconds", 0.0) for g in gbits}
            beside = [base[one["gbit"]] / one["seconds"] for one in each]
            mine = fitted(rows, ranks, name)
            even = _break_even(plain, mine) if plain and mine and name != "plain" else ""
            seconds = [f"{1e3 * one['seconds']:,.0f} ms" for one in each]
            sent = f"{each[0]['bytes'] / 1e6:,.2f} MB"
            text.append([name, each[0]["precision"], sent, *seconds, *(f"{b:.2f}" for b in beside), even])
        at = [*(f"{g:g} Gbit/s" for g in gbits), *(f"x at {g:g}" for g in gbits)]
        head = ["codec", "computing", "sent", *at, "faster below"]
        made.append((f"{ranks} ranks", lines(head, text)))
    return made


def plot(folder: Path, found: dict[str, Any], model: str) -> None:
    """Step time by bandwidth, as fitted."""
    rows, panels = found["rows"], {}
    for ranks in sorted({row["ranks"] for row in rows}):
        named = {}
        for name in dict.fromkeys(r["codec"] for r in rows):
            if line := fitted(rows, ranks, name):
                named[name] = [(g, line[0] + line[1] / g) for g in np.geomspace(0.1, 100, 13)]
        if named:
            panels[f"{ranks} ranks"] = named
    curves(folder / "compression_step.png", f"{model}: seconds of a step", panels, "Gbit/s", "seconds")


def main() -> int:
    p = arguments(__doc__, rounds=1)
    p.add_argument("--model", default="small")
    p.add_argument("--rows", type=int, default=1, help="samples of a rank: the fewer, the more a step waits")
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    p.add_argument("--gbit", nargs="+", type=float, default=[1.0, 10.0])
    p.add_argument("--precision", default="bf16" if halves.candidates() else "float32", help="of layers")
    p.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    p.add_argument("--seconds", type=float, default=4.0, help="how long each training is timed")
    p.add_argument("--delay", action="store_true", help="a communicator that delays, instead of virtual hosts")
    p.add_argument("--job", help=argparse.SUPPRESS)
    p.add_argument("--delayed", type=float, help=argparse.SUPPRESS)
    options = p.parse_args()
    if options.job:
        return job(options)
    if options.quick:
        options.model, options.ranks, options.seconds = "tiny", options.ranks[:1], 0.5
    found: dict[str, Any] = {"model": options.model, "samples": options.rows, "rows": times(options)}
    folder = save("compression", options, found)
    plot(folder, found, options.model)
    for title, text in tables(found):
        print(f"{title}\n{text}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
