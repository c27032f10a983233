"""The memory of a rank's process: what a dry run expects, beside what Linux says of real ranks.

    python bench/footprint.py [--models tiny mlp] [--ranks 1 2 4] [--quick]

PSS is that of a host on which nothing else runs: files that others have mapped as well are divided by the ranks
of the job alone. A job that compiled kernels or tuned, which takes memory once, is not counted: it runs again.
"""

import contextlib
import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

from jobs import environ, finish, mpiexec, start
from memory import peak_rss
from records import arguments, lines, save
from workloads import MODELS, batch, in_fsdpx

__all__ = ["compare", "tables"]

STRATEGIES = ("ddp", "fsdp")
STEPS = 4


def main() -> int:
    if sys.argv[1:2] == ["job"]:
        return job(*sys.argv[2:])
    p = arguments(__doc__, rounds=1)
    p.add_argument("--models", nargs="+", default=[m for m in MODELS if not MODELS[m].dims], choices=MODELS)
    p.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    options = p.parse_args()
    models, ranks = (options.models[:1], options.ranks[:2]) if options.quick else (options.models, options.ranks)
    found: dict[str, Any] = {"rows": []}
    for m, n, s in product(models, ranks, STRATEGIES):
        if n > 1 or s == "ddp":  # alone they are the same
            found["rows"].append(compare(m, s, n))
            save("footprint", options, found)
    for title, text in tables(found):
        print(f"{title}\n{text}\n", flush=True)
    return 0


def compare(model: str, strategy: str, ranks: int, steps: int = STEPS) -> dict[str, Any]:
    """Bytes of the rank with most, expected and measured."""
    found = _measured(model, strategy, ranks, steps)
    if found.get("first"):
        found = _measured(model, strategy, ranks, steps)
    expected = [_expected(model, strategy, ranks, rank) for rank in range(ranks)]
    most = {f"expected {kind}": max(getattr(one, kind) for one in expected) for kind in ("rss", "pss")}
    return {"model": model, "strategy": strategy, "ranks": ranks, **most, **found}


def _measured(model: str, strategy: str, ranks: int, steps: int) -> dict[str, Any]:
    here = [sys.executable] if ranks == 1 else mpiexec(ranks)
    return finish(start([*here, str(Path(__file__)), "job", model, strategy, str(steps)], environ()), patience=300)


def _expected(model: str, strategy: str, ranks: int, rank: int) -> Any:
    import fsdpx
    from fsdpx import optim

    layers, loss = in_fsdpx(MODELS[model])
    x, y = ((a.shape, a.dtype.name) for a in batch(MODELS[model], rank, ranks))
    options = {"loss": loss, "optimizer": optim.AdamW(lr=3e-4), "strategy": strategy}
    return fsdpx.dry_run(layers, x, y, ranks=ranks, rank=rank, ranks_per_host=ranks, **options).footprint


def job(model: str, strategy: str, steps: str) -> int:
    """Some steps on one rank; rank 0 prints the most bytes of any, and whether one kept something for later jobs."""
    import fsdpx
    from fsdpx import optim

    comm, before = fsdpx.init(), cached()
    layers, loss = in_fsdpx(MODELS[model])
    trainer = layers.as_distributed(loss=loss, optimizer=optim.AdamW(lr=3e-4), strategy=strategy)
    x, y = batch(MODELS[model], comm.rank, comm.size)
    for _ in range(int(steps)):
        trainer.step(x, y)
    first = cached() != before
    everyone = comm.all_gather_object((peak_rss(), alone(comm.size), first))
    if comm.rank == 0:
        rss, pss, first = (max(values) for values in zip(*everyone, strict=True))
        print(json.dumps({"rss": rss, "pss": pss, "first": first}), flush=True)
    return 0


def cached() -> tuple[int, int]:
    """Number of the files that later jobs find, and the time of the newest. A list of them all would count as memory
    of the job."""
    from fsdpx.core.base import environment

    number = newest = 0
    for folder, _, names in os.walk(environment.read_environment().cache):
        for name in names:
            if name.endswith((".code", ".json")):
                with contextlib.suppress(FileNotFoundError):  # of a job that replaces its file now
                    number, newest = number + 1, max(newest, os.stat(f"{folder}/{name}").st_mtime_ns)
    return number, newest


def alone(ranks: int) -> int:
    """The PSS of this process now, as if its files were mapped by the ranks alone."""
    found = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            words = line.split()
            if words[-1:] == ["kB"]:
                found[words[0]] = int(words[1]) * 1024
    return found["Pss_Anon:"] + found["Pss_Shmem:"] + found["RssFile:"] // ranks


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    head = ("model", "strategy", "ranks", "RSS expected", "measured", "ratio", "PSS expected", "measured", "ratio")
    rows = []
    for row in found["rows"]:
        cells = [row["model"], row["strategy"], str(row["ranks"])]
        for kind in ("rss", "pss"):
            expected, measured = row[f"expected {kind}"], row.get(kind)
            ratio = "failed" if measured is None else f"{expected / measured:.2f}"
            cells += [f"{expected / 2**20:,.0f}", "" if measured is None else f"{measured / 2**20:,.0f}", ratio]
        rows.append(tuple(cells))
    return [("processes", lines(head, rows, 2))]


if __name__ == "__main__":
    sys.exit(main())
