"""`bench comm` times communication operations at several message sizes, within and between hosts, and reports which
transport each operation uses. `bench step` compares the training step times of several strategies."""

from __future__ import annotations

import argparse
import errno
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpx import optim
from fsdpx.core.base import environment
from fsdpx.core.base.config import parse_byte_count, resolve_sharding
from fsdpx.core.base.messages import format_count, format_ranks, format_table, reporting_if_slow, wrap_for_terminal
from fsdpx.core.base.option_names import PrecisionName, Strategy
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.base.version import __version__
from fsdpx.core.comm.calls import GeneratorHandle
from fsdpx.core.comm.communicator import Array, Communicator, Handle, ReduceOp
from fsdpx.core.comm.init import (
    find_node_communicator,
    get_backend_name,
    parse_mpi_library_name,
    unwrap_message_backend,
)
from fsdpx.core.comm.node.node import SMALL_SUM_BYTES
from fsdpx.core.comm.node.rendezvous import NodeCollective
from fsdpx.core.trainer.distribute import distribute
from fsdpx.core.trainer.initialize import init
from fsdpx.core.trainer.recipe import DistributionChoices
from fsdpx.errors import ConfigError, LaunchError
from fsdpx.launch import run
from fsdpx.launch.catalog import CatalogModel, find_model
from fsdpx.launch.options import LaunchConfig

__all__ = [
    "DEFAULT_SIZES",
    "TIMED_VERBS",
    "add_options",
    "bench",
    "compare_strategies",
    "measure_verbs",
    "run_step_bench",
]

DEFAULT_SIZES = "64,512,4KiB,32KiB,256KiB,2MiB,16MiB"
MIN_BLOCKS, MAX_COUNT, BLOCK_SECONDS = 3, 200, 1e-3
"""Each timing consists of `MIN_BLOCKS` to `MAX_COUNT` blocks. A block consists of at most `MAX_COUNT` calls and lasts
about `BLOCK_SECONDS`."""
LEVEL_NAMES = ("inside a host", "between hosts", "all ranks")
SUM = ReduceOp.SUM


class BenchArrays(NamedTuple):
    """Float32 buffers for one message size.

    Attributes
    ----------
    shared : this rank's array, in memory that the ranks of its host can access
    common : one array that all ranks of the host share
    plain : an array in private memory
    piece : an array in private memory with 1/N of the elements, where N is the number of ranks
    """

    shared: Array
    common: Array
    plain: Array
    piece: Array


class TimedVerb(NamedTuple):
    """A communication operation to time.

    Attributes
    ----------
    call : function that starts the operation and returns its handle
    bus_share : function that takes the number of ranks, and returns the minimum number of bytes that each rank must
        send or receive, divided by the size of the full array
    raw : the same operation in plain mpi4py, for comparison; None if mpi4py has no such operation
    message_count : number of messages that one call sends in sequence; the time of a call is divided by this number
    """

    call: Callable[[Communicator, BenchArrays], Handle | None]
    bus_share: Callable[[int], float]
    raw: Callable[[Any, BenchArrays], Any] | None = None
    message_count: int = 1


def _send_to_last_rank_and_back(comm: Communicator, arrays: BenchArrays) -> None:
    """Send an array from the first rank to the last one and back."""
    buf, last = arrays.shared, comm.size - 1
    if comm.rank == 0:
        comm.send(buf, last).wait()
        comm.recv(buf, last).wait()
    elif comm.rank == last:
        comm.recv(buf, 0).wait()
        comm.send(buf, 0).wait()


def _run_mpi4py_ping_pong(raw: Any, arrays: BenchArrays) -> None:
    buf, last = arrays.shared, raw.size - 1
    if raw.rank == 0:
        raw.Send(buf, last)
        raw.Recv(buf, last)
    elif raw.rank == last:
        raw.Recv(buf, 0)
        raw.Send(buf, 0)


def _compute_other_ranks_share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _compute_full_share(ranks: int) -> float:
    return 1.0


def _compute_twice_other_ranks_share(ranks: int) -> float:
    return 2 * _compute_other_ranks_share(ranks)


def _get_array_on_root_only(comm: Any, array: Array) -> Array | None:
    return array if comm.rank == 0 else None


TIMED_VERBS = {
    "send": TimedVerb(_send_to_last_rank_and_back, _compute_full_share, _run_mpi4py_ping_pong, message_count=2),
    "all_gather": TimedVerb(
        lambda c, a: c.all_gather(a.piece, a.common), _compute_other_ranks_share,
        lambda r, a: r.Allgather(a.piece, a.plain)),
    "reduce_scatter": TimedVerb(
        lambda c, a: c.reduce_scatter(a.shared, a.piece), _compute_other_ranks_share,
        lambda r, a: r.Reduce_scatter_block(a.shared, a.piece)),
    "all_reduce": TimedVerb(
        lambda c, a: c.all_reduce(a.shared), _compute_twice_other_ranks_share,
        lambda r, a: r.Allreduce(sys.modules["mpi4py.MPI"].IN_PLACE, a.shared)),
    "all_reduce ring": TimedVerb(
        lambda c, a: c.all_reduce(a.shared, algorithm="ring"), _compute_twice_other_ranks_share),
    "broadcast": TimedVerb(
        lambda c, a: c.broadcast(a.shared, 0), _compute_full_share, lambda r, a: r.Bcast(a.shared, 0)),
    "reduce": TimedVerb(
        lambda c, a: c.reduce(a.shared, _get_array_on_root_only(c, a.plain), SUM, 0), _compute_full_share,
        lambda r, a: r.Reduce(a.shared, _get_array_on_root_only(r, a.plain), root=0)),
    "gather": TimedVerb(
        lambda c, a: c.gather(a.piece, _get_array_on_root_only(c, a.plain), 0), _compute_other_ranks_share,
        lambda r, a: r.Gather(a.piece, _get_array_on_root_only(r, a.plain), 0)),
    "scatter": TimedVerb(
        lambda c, a: c.scatter(_get_array_on_root_only(c, a.plain), a.piece, 0), _compute_other_ranks_share,
        lambda r, a: r.Scatter(_get_array_on_root_only(r, a.plain), a.piece, 0)),
    "all_to_all": TimedVerb(
        lambda c, a: c.all_to_all(a.shared, a.plain), _compute_other_ranks_share,
        lambda r, a: r.Alltoall(a.shared, a.plain)),
    "barrier": TimedVerb(lambda c, a: c.barrier(), lambda ranks: 0.0, lambda r, a: r.Barrier()),
}  # fmt: skip


def add_options(p: argparse.ArgumentParser) -> None:
    actions = p.add_subparsers(dest="action", required=True, metavar="step|comm")
    step = actions.add_parser("step", help="compare the step times of a model by strategy")
    step.add_argument("model", help="as for `show`: gpt-tiny, ..., or your function mymodule:make_model")
    step.add_argument("--strategies", default="ddp,fsdp", help="strategies to compare with the first one")
    step.add_argument("-n", "--ranks", type=int, help="start this many ranks on this host; leave it out under mpiexec")
    step.add_argument("--rounds", type=int, default=20, help="timed steps per strategy (default: 20)")
    step.add_argument("--batch", default=None, help="samples of the global batch; for your model its shape: 8x1024")
    step.add_argument("--precision", default="float32", help="float64, float32, bf16 or fp16")
    step.add_argument("--json", type=expanduser, metavar="FILE", help="write the same for programs")
    comm = actions.add_parser(
        "comm", help="under mpiexec: time and bandwidth of each operation by size, inside hosts and between them"
    )
    comm.add_argument(
        "--verbs", default=",".join(TIMED_VERBS), help=f"some of: {', '.join(TIMED_VERBS)} (default: all)"
    )
    comm.add_argument("--sizes", default=DEFAULT_SIZES, help=f"bytes of the full array (default: {DEFAULT_SIZES})")
    comm.add_argument("--seconds", type=float, default=0.05, help="per operation and size, about (default: 0.05)")
    comm.add_argument("--json", type=expanduser, metavar="FILE", help="write the same for programs")


def bench(args: argparse.Namespace) -> int:
    """Run `bench step` or `bench comm` and print the results. Return the exit status. Collective."""
    if args.action == "step":
        return run_step_bench(args)
    sizes = [parse_byte_count(text, "--sizes") for text in args.sizes.split(",")]
    verbs = [name.strip() for name in args.verbs.split(",")]
    unknown = [name for name in verbs if name not in TIMED_VERBS]
    if unknown:
        raise LaunchError(f"--verbs {unknown[0]}: there are {', '.join(TIMED_VERBS)}")
    with init() as comm:
        _require_writable_on_rank0(comm, args.json)
        if comm.size == 1:
            raise LaunchError("one rank has no other to talk to: mpiexec -n 2 python -m fsdpx bench comm")
        with reporting_if_slow(comm.rank == 0, "measuring", None) as count:
            report = measure_verbs(comm, sizes, verbs, args.seconds, count)
        _print_and_write_on_rank0(comm, _format_report(report), report, args.json)
    return 0


def _require_writable_on_rank0(comm: Communicator, path: Path | None) -> None:
    """Raise LaunchError on all ranks if rank 0 cannot write the file. Call this before a long measurement, so that the
    result is not lost at the end. Collective."""
    wrong = ""
    try:
        if path is not None and comm.rank == 0:
            path.open("a").close()
    except OSError as error:
        wrong = errno.errorcode.get(error.errno or 0, "")
    if wrong := comm.all_gather_value(wrong)[0]:
        raise LaunchError(f"--json {path} cannot be written ({wrong}): name a file in a folder that is there")


def _print_and_write_on_rank0(comm: Communicator, text: str, report: dict[str, Any], path: Path | None) -> None:
    """On rank 0, print `text`, and write `report` as JSON to the file `path` unless `path` is None."""
    if comm.rank == 0:
        print(wrap_for_terminal(text))
        if path is not None:
            path.write_text(json.dumps(report, indent=1))


def measure_verbs(
    comm: Communicator, sizes: Sequence[int], verbs: Sequence[str] = tuple(TIMED_VERBS), seconds: float = 0.05,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Time the communication operations `verbs`, and return the report that `--json` writes. The report is identical
    on all ranks. Collective.

    The report has one section for the ranks of each host, one for communication between hosts, and one for all ranks.
    Each section contains the latency and bandwidth of messages, and one row per operation and size. `sizes` are the
    sizes of the full array in bytes; they are rounded up so that all ranks have the same number of elements. `seconds`
    is the approximate time spent on each row. To report progress, `count` is called with the number of finished
    measurements and the total number of measurements."""
    names: list[str] = comm.all_gather_value(platform.node())
    hosts = {host: [rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)}
    buffers = _BenchBuffers(comm, max(sizes) + 4 * comm.size)
    groups = _iterate_communicators_to_measure(comm, hosts)
    levels = [_time_verbs_in_group(name, group, buffers, sizes, verbs, seconds, count) for name, group in groups]
    own = [level for level in levels if level is not None]
    buffers.free_arrays()
    everyone: list[list[dict[str, Any]]] = comm.all_gather_value(own)
    in_order = sorted((one for theirs in everyone for one in theirs), key=lambda one: LEVEL_NAMES.index(one["level"]))
    mpi = sys.modules.get("mpi4py.MPI")
    library = None if mpi is None else parse_mpi_library_name(mpi.Get_library_version())
    return {
        "fsdpx": __version__, "ranks": comm.size, "hosts": hosts, "backend": get_backend_name(), "library": library,
        "levels": in_order,
    }  # fmt: skip


def _iterate_communicators_to_measure(
    comm: Communicator, hosts: dict[str, list[int]]
) -> Iterator[tuple[str, Communicator | None]]:
    """Yield (name, communicator) for each group of ranks to measure: the ranks of this host, the first rank of each
    host, and all ranks.

    The communicator is None on ranks outside the group. Collective."""
    if len(hosts) > 1:
        ranks = next(ranks for ranks in hosts.values() if comm.rank in ranks)
        if max(map(len, hosts.values())) > 1:
            inside = comm.split(ranks[0], comm.rank)
            yield LEVEL_NAMES[0], inside if len(ranks) > 1 else None
            yield LEVEL_NAMES[1], comm.split(0 if comm.rank == ranks[0] else None, comm.rank)
    yield LEVEL_NAMES[2], comm


class _BenchBuffers:
    """Buffers of the largest message size; arrays of smaller sizes are slices of them. Like the buffers of a training
    run, they are in shared memory windows if the ranks of a host share memory."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.node = find_node_communicator(comm)
        windows = self.node is not None and self.node.is_sharing_useful
        self.made = (
            [self.node.allocate_shared(nbytes), self.node.allocate_node_buffer(nbytes)]
            if self.node and windows
            else [None, None]
        )
        own, common = (np.empty(nbytes, np.uint8) if part is None else part for part in self.made)
        self.parts = own, common, np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        for part in self.parts:
            part[...] = 0  # touch all memory now, since the operating system allocates it on first access

    def get_arrays(self, elements: int, ranks: int) -> BenchArrays:
        """Return float32 views of the buffers. `piece` has `elements` / `ranks` elements, and each other array has
        `elements` elements."""
        own, common, plain, piece = (part[: 4 * elements].view(np.float32) for part in self.parts)
        return BenchArrays(own, common, plain, piece[: elements // ranks])

    def free_arrays(self) -> None:
        for part in self.made:
            if part is not None and self.node is not None:
                self.node.free_shared(part)


def _time_verbs_in_group(
    name: str, comm: Communicator | None, buffers: _BenchBuffers, sizes: Sequence[int], verbs: Sequence[str],
    seconds: float, count: Callable[[int, int], None],
) -> dict[str, Any] | None:  # fmt: skip
    """Time every operation at every size in one group of ranks. Return the measurements on the first rank of the
    group, and None on all other ranks. Collective over the group."""
    if comm is None:
        return None
    rows: list[dict[str, Any]] = []
    cases = [(verb, size) for verb in verbs for size in (sizes if verb != "barrier" else (0,))]
    for verb, size in cases:
        count(len(rows), len(cases))
        elements = comm.size * max(math.ceil(size / (4 * comm.size)), 1)
        rows.append(_time_verb_at_size(verb, comm, buffers.get_arrays(elements, comm.size), seconds))
    if comm.rank:
        return None
    sends = [row for row in rows if row["verb"] == "send"]
    link = {"latency": sends[0]["seconds"], "bandwidth": max(row["bandwidth"] for row in sends)} if sends else {}
    return {"level": name, "host": platform.node(), "ranks": comm.size, **link, "rows": rows}


def _time_verb_at_size(name: str, comm: Communicator, arrays: BenchArrays, seconds: float) -> dict[str, Any]:
    """Time one operation at one message size, and return its row of the report. Collective."""
    verb, raw = TIMED_VERBS[name], getattr(unwrap_message_backend(comm), "raw", None)
    nbytes = arrays.shared.nbytes if name != "barrier" else 0
    by = _wait_and_find_transport(name, comm, nbytes, verb.call(comm, arrays))

    def call_ours() -> None:
        handle = verb.call(comm, arrays)
        if handle is not None:
            handle.wait()

    taken = _time_call_on_slowest_rank(comm, call_ours, seconds) / verb.message_count
    theirs = None
    if raw is not None and (by_mpi := verb.raw) is not None:
        theirs = _time_call_on_slowest_rank(comm, lambda: by_mpi(raw, arrays), seconds) / verb.message_count
    return {"verb": name, "bytes": nbytes, "seconds": taken, "bandwidth": nbytes / taken,
            "bus_bandwidth": nbytes * verb.bus_share(comm.size) / taken, "raw_seconds": theirs, "by": by}  # fmt: skip


def _time_call_on_slowest_rank(comm: Communicator, call: Callable[[], object], seconds: float) -> float:
    """Return the time per call in seconds: the median over several blocks of calls. Each block is timed on its slowest
    rank. Collective."""
    call()
    taken = max(comm.all_gather_value(_average_call_seconds(comm, call, 3)))
    calls = min(max(math.ceil(BLOCK_SECONDS / taken), 1), MAX_COUNT)
    count = min(max(math.ceil(seconds / (taken * calls)), MIN_BLOCKS), MAX_COUNT)
    blocks = [_average_call_seconds(comm, call, calls) for _ in range(count)]
    return statistics.median(map(max, zip(*comm.all_gather_value(blocks), strict=True)))


def _average_call_seconds(comm: Communicator, call: Callable[[], object], calls: int) -> float:
    """Return the time per call on this rank in seconds, averaged over `calls` calls. All ranks begin together, after a
    barrier. Collective."""
    comm.barrier(what="bench").wait()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def _wait_and_find_transport(name: str, comm: Communicator, nbytes: int, handle: Handle | None) -> str:
    """Wait for a communication call, and return the name of the transport that it used, such as "shared memory" or
    "MPI messages". The transport is inferred from the handle."""
    if handle is not None:
        handle.wait()
    carrier, node = unwrap_message_backend(comm), find_node_communicator(comm)
    if carrier is None:
        return "threads"
    library = {"mpi": "MPI", "gloo": "Gloo"}.get(carrier.library, carrier.library)
    if node is not None and handle is not None:
        if hasattr(handle, "persistent"):
            return "shared memory, compiled"
        if isinstance(handle, NodeCollective):
            return "shared memory"
        # reductions of at most SMALL_SUM_BYTES are sent as messages even within a host
        sums = name in ("reduce_scatter", "all_reduce") and nbytes > SMALL_SUM_BYTES
        if isinstance(handle, GeneratorHandle) and node.lanes is not None and (name == "all_gather" or sums):
            return f"shared memory, {library} between hosts"
    if name.endswith("ring"):
        return f"ring of {library} messages"
    return library if name in carrier.native_verbs else f"{library} messages"


def _format_report(report: dict[str, Any]) -> str:
    """Return the report of `measure_verbs` as text: one table per group of ranks, and an explanation of the columns."""
    hosts = "; ".join(f"{host}: {format_ranks(ranks)}" for host, ranks in report["hosts"].items())
    by = f"{report['backend']}, {report['library']}" if report["library"] else report["backend"]
    lines = [f"{by}; {hosts}"]
    for level in report["levels"]:
        where = f" of {level['host']}" if level["level"] == LEVEL_NAMES[0] else ""
        ranks = format_count(level["ranks"], "rank")
        lines.append(f"\n{level['level']}{where}, {ranks}{_format_latency_and_bandwidth(level)}")
        rows = [("verb", "bytes", "us", "GB/s", "bus GB/s", "MPI us", "by")]
        for row in level["rows"]:
            raw = "" if row["raw_seconds"] is None else f"{1e6 * row['raw_seconds']:.1f}"
            rates = (f"{1e-9 * row[name]:.3f}" if row["bytes"] else "" for name in ("bandwidth", "bus_bandwidth"))
            by = row["by"].replace("shared memory, compiled", "compiled").replace("shared memory", "memory")
            by = by.replace("ring of ", "").replace(" between hosts", "")
            rows.append((row["verb"], f"{row['bytes']:,}", f"{1e6 * row['seconds']:.1f}", *rates, raw, by))
        lines.append(format_table(rows, text=True))
    lines.append(
        "\nfloat32; bytes of the full array; median over blocks of calls, of the slowest rank; MPI us: the same call "
        "of mpi4py; by: memory that ranks share, compiled code on it, MPI's own collective, or messages"
    )
    return "\n".join(lines)


def _format_latency_and_bandwidth(level: dict[str, Any]) -> str:
    if "latency" not in level:
        return ""
    return f"; a message takes {1e6 * level['latency']:.1f} us, at most {1e-9 * level['bandwidth']:.2f} GB/s"


WARMUP_STEPS = 3
"""Number of untimed warm-up steps of each strategy, which touch memory for the first time and compile kernels."""


def run_step_bench(args: argparse.Namespace) -> int:
    """Compare the training step times of strategies, and print a table. With -n, the comparison runs in a new job with
    that many ranks. Return the exit status."""
    strategies: list[Any] = [name.strip() for name in args.strategies.split(",")]
    example = find_model(args.model, args.batch)
    for name in strategies:
        resolve_sharding(DistributionChoices(name).strategy_within_replica(1), 1)
    if args.rounds < 1:
        raise LaunchError(f"--rounds {args.rounds}: 1 or more")
    launcher = environment.read_environment().launcher
    if launcher is None and args.ranks is not None:
        words = ["-m", "fsdpx", "bench", "step", args.model, "--strategies", args.strategies, "--rounds",
                 str(args.rounds), "--precision", args.precision]  # fmt: skip
        words += [] if args.batch is None else ["--batch", args.batch]
        words += ["--json", str(args.json.absolute())] if args.json else []
        return run.run_job(LaunchConfig(args.ranks, max_restarts=0), words).status
    with init() as comm:
        if args.ranks not in (None, comm.size):
            raise LaunchError(f"-n {args.ranks}: the launcher has started {comm.size} ranks; leave -n out under it")
        _require_writable_on_rank0(comm, args.json)
        with reporting_if_slow(comm.rank == 0, "timing rounds", None) as count:
            report = compare_strategies(comm, example, strategies, args.rounds, args.precision, count)
        text = _format_step_report(args.model, report)
        _print_and_write_on_rank0(comm, text, {"model": args.model, **report}, args.json)
    return 0


def compare_strategies(
    comm: Communicator,
    example: CatalogModel,
    strategies: Sequence[Strategy],
    rounds: int,
    precision: PrecisionName = "float32",
    count: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Time training steps of each strategy, and return the report that `--json` writes. The report is identical on all
    ranks. Collective.

    In each round, the step time of a strategy is the time on the slowest rank. For each strategy, the report contains
    the median and the minimum of its step times over all rounds, in seconds. It also contains the median ratio of the
    strategy's step time to the first strategy's step time in the same round. To report progress, `count` is called with
    the number of finished rounds, including warm-up, and the total number of rounds."""
    first, end = (example.batch * n // comm.size for n in (comm.rank, comm.rank + 1))
    specs = example.x(example.batch), example.y(example.batch)
    x, y = (_draw_random_batch(spec, seed)[first:end] for seed, spec in enumerate(specs))
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
        for n in range(-WARMUP_STEPS, rounds):
            count(n + WARMUP_STEPS, rounds + WARMUP_STEPS)
            row = [0.0] * len(trainers)
            for k in range(len(trainers)):
                # rotate the order from round to round, so that other load on the machine affects all strategies equally
                at = (k + n) % len(trainers)
                comm.barrier(what="bench").wait()
                begin = time.perf_counter()
                trainers[at].step(x, y)
                row[at] = time.perf_counter() - begin
            taken += [row] if n >= 0 else []
    slowest = np.max(comm.all_gather_value(taken), axis=0)
    rows = [
        {"strategy": name, "seconds": statistics.median(times), "least": min(times),
         "ratio": statistics.median(times / slowest[:, 0])}
        for name, times in zip(strategies, slowest.T, strict=True)
    ]  # fmt: skip
    return {
        "fsdpx": __version__, "about": example.about, "ranks": comm.size, "batch": example.batch,
        "precision": precision, "hosts": sorted(set(comm.all_gather_value(platform.node()))), "rounds": rounds,
        "strategies": rows,
    }  # fmt: skip


def _draw_random_batch(spec: tuple[tuple[int, ...], str], seed: int) -> np.ndarray:
    """Return a random global batch with the given (shape, dtype). Integers are 0 or 1, which are valid indices and
    labels for all models."""
    shape, dtype = spec
    random = np.random.default_rng(seed)
    if not isinstance(dtype, str):
        raise ConfigError("models of one input and one target are compared")
    return random.integers(0, 2, shape).astype(dtype) if "int" in dtype else random.standard_normal(shape).astype(dtype)


def _format_step_report(name: str, report: dict[str, Any]) -> str:
    rows = [("strategy", "ms per step", "min ms", f"relative to {report['strategies'][0]['strategy']}")]
    rows += [
        (one["strategy"], f"{1e3 * one['seconds']:.2f}", f"{1e3 * one['least']:.2f}", f"{one['ratio']:.3f}")
        for one in report["strategies"]
    ]
    ranks = format_count(report["ranks"], "rank")
    head = f"{name}: {report['about']}; batch {report['batch']}, {report['precision']}, {ranks}"
    return (
        f"{head} on {', '.join(report['hosts'])}\n{format_table(rows)}\nmedians of "
        f"{format_count(report['rounds'], 'round')}, in which each strategy makes one step; times are those of the "
        "slowest rank, and ratios compare steps of the same round"
    )
