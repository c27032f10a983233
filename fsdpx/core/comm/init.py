"""Opening the world: from the name of a backend, or from what the user already has, to a communicator.

`BACKENDS` is the registry: a new backend is one more entry. `spawn` runs a function on ranks that are threads. Where
ranks are processes, one that fails ends all, while a communicator that was opened here or a trainer lives: an uncaught
exception in any thread is printed once, then the job is aborted.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fsdpx.core.array.devices import DeviceMap
from fsdpx.core.base import environment, hooks
from fsdpx.core.base.arguments import require_arguments
from fsdpx.core.base.extensions import find_extension, list_extensions, load_extension
from fsdpx.core.base.messages import flush_and_write
from fsdpx.core.base.name_hints import suggest_arguments
from fsdpx.core.comm import default_communicator
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.calls import PATIENT, get_stack_frames
from fsdpx.core.comm.communicator import Communicator, unwrap_communicator
from fsdpx.core.comm.default_communicator import get_compared_arguments
from fsdpx.core.comm.desync_check import require_same_settings
from fsdpx.core.comm.local import LocalCommunicator, RankDied, ThreadGroup, ThreadWorld, make_single_rank_communicator
from fsdpx.core.comm.message_backend import DEFAULT_TIMEOUT_SECONDS, MessageBackend
from fsdpx.errors import Aborted, CommError, ConfigError, DesyncError, FsdpxError, OutOfMemory, install_hint

if TYPE_CHECKING:
    from fsdpx.core.comm.communicator import SurvivorCommunicator
    from fsdpx.core.comm.node.node import NodeCommunicator

__all__ = [
    "BACKENDS",
    "BackendOpener",
    "CommunicatorRequest",
    "adopt_communicator",
    "backend_name",
    "find_message_backend",
    "find_node_communicator",
    "first_line",
    "open_local",
    "open_mpi",
    "open_survivor_communicator",
    "open_world",
    "spawn",
    "start_world",
]  # fmt: skip

_SECONDS_TO_DELIVER = 0.1
_SECONDS_FOR_RANK_0 = 3.0


def _make_excepthook(former: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook: an uncaught exception, the first one, ends all ranks, after what the program does about it.

    Without it the other ranks wait for ever: Python ends, and MPI_Finalize of the failed rank waits for them."""
    begun, process = threading.Lock(), os.getpid()

    def end_all_ranks(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != process:  # a child that was forked is no rank
            former(kind, error, trace)
            flush_and_write()
            os._exit(1)  # Python's own way out would finalize MPI, and wait there
        former_hook = None if former is sys.__excepthook__ else partial(former, kind, error, trace)
        _print_and_end_all(begun, former_hook, kind, error, trace)

    return end_all_ranks


def _make_thread_excepthook(former: Callable[..., Any]) -> Callable[..., Any]:
    """The same for `threading.excepthook`."""
    begun, process = threading.Lock(), os.getpid()

    def end_all_ranks(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != process or issubclass(args.exc_type, SystemExit):  # which ends a thread quietly
            former(args)
            return
        name = args.thread.name if args.thread is not None else "unknown"
        former_hook = None if former is threading.__excepthook__ else partial(former, args)
        _print_and_end_all(begun, former_hook, args.exc_type, args.exc_value, args.exc_traceback, name)

    return end_all_ranks


hooks.register_hooks(
    hooks.Hook(sys, "excepthook", _make_excepthook), hooks.Hook(threading, "excepthook", _make_thread_excepthook)
)


def _print_and_end_all(
    begun: threading.Lock, own: Callable[[], object] | None, kind: type[BaseException], error: BaseException | None,
    trace: TracebackType | None, thread: str = "",
) -> None:  # fmt: skip
    """Print the exception and end all ranks, once. An error that all ranks raise together is printed once: the others
    leave it to rank 0, which ends them. own: what the program does about it, first of all."""
    comm = hooks.find_newest_communicator()
    if not begun.acquire(blocking=False):
        return
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    if own is not None:
        code = _run_hook(own) or code
    flush_and_write()
    if comm is None:
        return
    if comm.rank > 0 and _is_raised_on_all_ranks(error):
        time.sleep(_SECONDS_FOR_RANK_0)
    flush_and_write(format_rank_traceback(comm.rank, kind, error, trace, thread))
    hooks.notify_end(code, kind.__name__)
    time.sleep(_SECONDS_TO_DELIVER)  # the launcher forwards output in a process that abort will kill
    comm.abort(code)


def _run_hook(own: Callable[[], object]) -> int:
    """Run a hook of the program, which must not keep the job from its end; the status that it wants to end with."""
    try:
        own()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        flush_and_write(f"fsdpx: the program's own excepthook failed:\n{traceback.format_exc()}")
    return 0


def _is_raised_on_all_ranks(error: BaseException | None) -> bool:
    """Whether other ranks are likely to raise the same: what is wrong with choices, batches and calls is checked or
    agreed on by all of them."""
    return isinstance(error, DesyncError) or (
        isinstance(error, FsdpxError) and not isinstance(error, CommError | OutOfMemory)
    )


def format_rank_traceback(
    rank: int, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, thread: str = ""
) -> str:
    """The traceback, every line in its place, under a head that names rank and host."""
    head = f"[rank {rank}/{platform.node()}]" + (f" in thread {thread}" if thread else "")
    return f"{head} {''.join(traceback.format_exception(kind, error, trace))}"


class CommunicatorRequest(NamedTuple):
    """A request for a communicator. comm: of another library, to be adopted; rank, size: of a fake; device_map:
    which GPU each local rank takes, where it is of GPUs."""

    settings: environment.Environment
    comm: Any = None
    rank: int | None = None
    size: int | None = None
    device_map: DeviceMap = None


class BackendOpener(NamedTuple):
    """How a backend is opened. adopts: whether it takes communicators of another library like this one. suits: whether
    it is the one to take where no name is given; the first that suits is taken."""

    open: Callable[[CommunicatorRequest], Communicator]
    adopts: Callable[[Any], bool] = lambda comm: False
    suits: Callable[[CommunicatorRequest], bool] = lambda asked: False


def open_world(
    backend: str | None = None, comm: Any = None, *, rank: int | None = None, size: int | None = None,
    device_map: DeviceMap = None,
) -> Communicator:  # fmt: skip
    """The communicator of all ranks of this job.

    backend: "node", MPI between machines and shared memory inside them; "mpi", messages only; "gloo", ranks without
    MPI that meet where MASTER_ADDR and MASTER_PORT or FSDPX_STORE say, Gloo between machines and shared memory inside
    them; "nccl", MPI, and NCCL for arrays of GPUs, of which each rank takes one by `device_map`; "local", one rank by
    itself (for several, `fsdpx.spawn`); "fake", rank `rank` of `size` that moves nothing;
    None: node if an MPI launcher started this process (mpi with FSDPX_NODE=0, and where ranks may die: shared memory
    does not outlive them), gloo if torchrun or alike did, else local. comm: an mpi4py communicator (duplicated) or a
    `Communicator` (taken as it is) instead. With MPI and Gloo, an uncaught exception from now on ends all ranks.
    LaunchError if MPI sees another number of ranks than the launcher started, or if ranks do not come."""
    if comm is not None:
        return adopt_communicator(comm, backend, device_map)
    if backend is not None and backend not in BACKENDS and find_extension("backend", backend) is None:
        names = ", ".join(dict.fromkeys((*BACKENDS, *list_extensions("backend"))))
        raise ConfigError(f"unknown backend {backend!r}: use one of {names}, or None to find out")
    if backend != "fake" and (rank is not None or size is not None):
        started = f"backend={backend!r} has the ranks that were started"
        raise ConfigError(f"rank and size belong to backend='fake'; {started}")
    return _open_backend(backend, CommunicatorRequest(environment.read_environment(), None, rank, size, device_map))


def adopt_communicator(comm: Any, backend: str | None = None, device_map: DeviceMap = None) -> Communicator:
    """`comm` as a `Communicator`: itself, or around a duplicate of an mpi4py communicator."""
    if hasattr(comm, "all_gather") and hasattr(comm, "reduce_scatter"):
        return comm
    comm = default_communicator.as_mpi4py(comm)
    default_communicator.require_member(comm)
    able = [name for name, opener in BACKENDS.items() if opener.adopts(comm)]
    if not able:
        raise ConfigError(f"comm={comm!r} is neither an mpi4py communicator nor an fsdpx Communicator")
    if backend not in (None, *able):
        library = type(comm).__module__.partition(".")[0]
        raise ConfigError(f"comm is an {library} communicator, but backend={backend!r}: leave backend out")
    return _open_backend(backend, CommunicatorRequest(environment.read_environment(), comm, device_map=device_map))


def backend_name() -> str:
    """The name of the backend of the default communicator; if there is none, of the one that would be opened."""
    opened = default_communicator.get_default()
    if opened is None:
        return next(
            name
            for name, opener in BACKENDS.items()
            if opener.suits(CommunicatorRequest(environment.read_environment()))
        )
    comm = unwrap_communicator(opened.comm)
    library = getattr(comm, "library", "mpi")
    return type(comm).__name__.removesuffix("Communicator").lower() if library == "mpi" else library


def find_node_communicator(comm: Any) -> NodeCommunicator | None:
    """The node communicator inside its counting or guarding wrappers, if there is one."""
    comm = unwrap_communicator(comm)
    return comm if hasattr(comm, "allocate_node_buffer") else None


def find_message_backend(comm: Any) -> MessageBackend | None:
    """The carrier that moves bytes between processes, inside its wrappers; None unless ranks are processes."""
    comm = unwrap_communicator(comm)
    comm = getattr(comm, "carrier", comm)
    return comm if isinstance(comm, MessageBackend) else None


def open_survivor_communicator(comm: Any = None) -> SurvivorCommunicator:
    """A communicator of the same ranks that can outlive some of them, a new one beside `comm`. Collective.

    comm: None, for all ranks of this job; an mpi4py communicator; or a communicator of fsdpx, also in shared memory:
    the new one moves messages only, as what lies in memory that ranks share does not outlive them. Whether it does
    survive deaths is what `fsdpx.core.comm.can_survive` says: MPI has to be Open MPI 5 started with `mpiexec --with-ft
    ulfm`, thread ranks have to be started by `spawn(survive=True)`. ConfigError for a fake communicator."""
    comm = default_communicator.as_mpi4py(comm)
    given = _open_or_reuse_world() if comm is None else adopt_communicator(comm, "mpi" if _is_mpi4py(comm) else None)
    inner = unwrap_communicator(given)
    if isinstance(inner, LocalCommunicator):
        return cast("SurvivorCommunicator", inner.subgroup(range(inner.size)))
    mpi: Any = getattr(inner, "carrier", inner)
    if not hasattr(mpi, "raw"):
        able = "ranks of MPI (backend='mpi' or 'node') or thread ranks (fsdpx.spawn)"
        raise ConfigError(f"ranks of {inner!r} cannot die or come back: use {able}")
    from fsdpx.core.comm.mpi.mpi import UlfmCommunicator, require_ulfm

    if environment.read_environment().ulfm:
        require_ulfm()
    resilient_comm = UlfmCommunicator(mpi.raw, mpi.timeout)
    resilient_comm.progress.patience = mpi.progress.patience
    opened = default_communicator.get_default()
    if given is not comm and not (opened and given is opened.comm):
        mpi.close()
    return resilient_comm


def _open_or_reuse_world() -> Communicator:
    """All ranks of this job: the default communicator, or one for messages."""
    opened = default_communicator.get_default()
    launcher = environment.read_environment().launcher
    return opened.comm if opened else open_world("mpi" if launcher is not None and launcher.mpi else None)


def _open_backend(backend: str | None, asked: CommunicatorRequest) -> Communicator:
    if backend is None and asked.comm is None and asked.settings.launcher is None:
        warning = environment.check_single_process()
        if warning:
            print(f"fsdpx: {warning}", file=sys.stderr, flush=True)
    suits = (name for name, opener in BACKENDS.items() if opener.suits(asked))
    name = backend or next(suits)
    return BACKENDS[name].open(asked) if name in BACKENDS else _open_extension(name, asked)


def _is_mpi4py(comm: Any) -> bool:
    return type(comm).__module__.startswith("mpi4py")


def _is_mpi(asked: CommunicatorRequest) -> bool:
    launcher = asked.settings.launcher
    return launcher is not None and launcher.mpi if asked.comm is None else _is_mpi4py(asked.comm)


def _is_gloo(asked: CommunicatorRequest) -> bool:
    launcher = asked.settings.launcher
    return asked.comm is None and launcher is not None and not launcher.mpi


def open_local(asked: CommunicatorRequest) -> Communicator:
    from fsdpx.core.array import cores

    cores.share_cores(1)
    return make_single_rank_communicator()


def open_mpi(asked: CommunicatorRequest, shared: bool = False) -> Communicator:
    """shared: memory inside machines, where there are several ranks."""
    from fsdpx.core.comm.mpi.start import guard_mpi_start

    with guard_mpi_start() if asked.comm is None else nullcontext():
        _check_mpi(asked)
        from fsdpx.core.comm.mpi.mpi import MpiCommunicator, MpiWorld

        hooks.hold_hooks(ranks := MpiWorld(), ranks)
        opened = start_world(MpiCommunicator(asked.comm, asked.settings.timeout or DEFAULT_TIMEOUT_SECONDS), shared)
        hooks.release_hooks(ranks)  # an exception goes on to hold them, in its traceback
        return opened


def _open_extension(name: str, asked: CommunicatorRequest) -> Communicator:
    opened: Communicator = load_extension("backend", name)(asked)
    return opened


def start_world(carrier: MessageBackend, shared: bool) -> Communicator:
    """All ranks of the job have met. shared: memory inside machines, where there are several ranks."""
    from fsdpx.core.array import cores
    from fsdpx.core.comm.node.node import NodeCommunicator

    hooks.hold_hooks(carrier, carrier)
    if carrier.size > 1:
        require_same_settings(carrier, environment.read_environment().shared_settings, get_compared_arguments())
    world_comm = NodeCommunicator(carrier) if shared and carrier.size > 1 else carrier
    ranks_here = world_comm.all_gather_data(platform.node()).count(platform.node())
    world_comm.progress.patience = PATIENT if cores.share_cores(ranks_here) * ranks_here <= cores.count_cores() else 0
    return world_comm


def _check_mpi(asked: CommunicatorRequest) -> None:
    """MPI is loaded, and agrees with the launcher."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = f"{install_hint('mpich')} brings one; or use backend='local'"
        raise ConfigError(f"no MPI library could be loaded ({error}): {remedy}") from error
    library = first_line(MPI.Get_library_version())
    environment.check_size(MPI.COMM_WORLD.Get_size(), asked.settings, f"MPI ({library})")


def first_line(text: str) -> str:
    """The name that an MPI library gives itself, of its `Get_library_version()`."""
    return " ".join(text.strip("\0\n ").split("\n")[0].strip("\0").split())


BACKENDS = {
    "node": BackendOpener(
        partial(open_mpi, shared=True), _is_mpi4py, lambda a: _is_mpi(a) and a.settings.shares_memory
    ),
    "mpi": BackendOpener(open_mpi, _is_mpi4py, _is_mpi),
    "nccl": BackendOpener(partial(_open_extension, "nccl"), _is_mpi4py),
    "gloo": BackendOpener(partial(_open_extension, "gloo"), suits=_is_gloo),
    "local": BackendOpener(open_local, suits=lambda asked: asked.comm is None),
    "fake": BackendOpener(lambda a: FakeCommunicator(a.rank or 0, 1 if a.size is None else a.size)),
}


_GRACE_SECONDS = 2.0


@partial(suggest_arguments, when="failed")
def spawn(
    fn: Callable[..., Any], size: int, *args: Any,
    timeout: float | None = None, delays: int | None = None, survive: bool = False,
) -> list[Any]:  # fmt: skip
    """Run `fn(comm, *args)` on ranks that are threads of this process; what each of them returned, by rank.

    The first exception of any rank ends the others and is raised again here, with a note that names the rank.
    A rank that returns while others wait for it in a call is such an exception, at once: DesyncError names both.
    `fsdpx.all_reduce` and its kind use the rank's own communicator inside `fn`.

    Parameters
    ----------
    size : number of ranks.
    timeout : seconds that a rank may wait for others; then CommTimeout names the ranks that have not come, and a note
        says where they stand. None: FSDPX_TIMEOUT, else half an hour. There is no limit on the whole.
    delays : seed of random sleeps of up to 2 ms before each communication, for tests.
    survive : a rank that raises `RankDied` dies alone: the others, whose communicators are survivors, live on, and its
        result is None. If all die, the first death is raised here.
    """
    if not callable(fn):
        raise ConfigError(f"spawn({fn!r}, ...): first the function, then the number of ranks, as in spawn(train, 4)")
    require_arguments(spawn, (fn, size), {"timeout": timeout, "delays": delays, "survive": survive}, "spawn")
    if size < 1:
        raise ConfigError(f"spawn needs at least 1 rank, not {size}")
    world = ThreadWorld(
        environment.read_environment().timeout or DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout, survive
    )
    group = ThreadGroup(world, range(size))
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    deaths: list[tuple[int, RankDied]] = []

    def run_rank(rank: int) -> None:
        jitter = None if delays is None else random.Random(int(delays) * 1_000_003 + rank)
        comm: Communicator = LocalCommunicator(group, rank, delays=jitter)
        try:
            with default_communicator.use_communicator(comm):
                results[rank] = fn(comm, *args)
        except BaseException as error:
            if survive and isinstance(error, RankDied):
                deaths.append((rank, error))
                world.record_death(rank)
                return
            failures.append((rank, error))
            world.record_failure(error)
        world.record_return(rank)

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    try:
        with _exits_named:
            for thread in threads:
                thread.start()
            late = _join_ranks(threads, world)
    except BaseException as stop:  # Ctrl-C in a session that goes on: ranks end at their next call
        world.record_failure(stop)
        raise
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], Aborted)), failures[0])
        error.add_note(f"[rank {rank}] of {size} thread ranks")
        if late:
            error.add_note(_stack_of_threads(late))
        raise error
    if len(deaths) == size:
        rank, death = deaths[0]
        death.add_note(f"[rank {rank}] the first of {size} thread ranks, all of which died")
        raise death
    return results


class _NamedExits:
    """While thread ranks run, `os._exit` says which of them ends them all."""

    def __init__(self) -> None:
        self._hook, self._lock, self._inside = hooks.Hook(os, "_exit", self._wrap_exit), threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self._hook.put_in_place()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._hook.take_out()

    @staticmethod
    def _wrap_exit(former: Callable[..., Any]) -> Callable[..., Any]:
        process = os.getpid()

        def exit_with_rank_name(status: int) -> None:
            opened = default_communicator.get_default()
            if opened is not None and opened.of_thread and os.getpid() == process:
                rank = f"[rank {opened.comm.rank}] of {opened.comm.size} thread ranks"
                flush_and_write(f"fsdpx: os._exit({status}) by {rank}: the process ends, and all of them with it\n")
            former(status)

        return exit_with_rank_name


_exits_named = _NamedExits()


def _join_ranks(threads: list[threading.Thread], world: ThreadWorld) -> list[threading.Thread]:
    """Wait for all ranks; when one has failed, the others have a short grace to notice. Returns those that have not."""

    def is_over() -> bool:
        return len(world.dead | world.returned) == len(threads)

    with world.condition:
        world.condition.wait_for(lambda: world.failure is not None or is_over())
        world.condition.wait_for(is_over, _GRACE_SECONDS)
        done = world.dead | world.returned
    for rank in done:
        threads[rank].join()
    return [thread for rank, thread in enumerate(threads) if rank not in done]


def _stack_of_threads(threads: list[threading.Thread]) -> str:
    stands = []
    for thread in threads:
        lines = traceback.StackSummary.extract(get_stack_frames(thread.ident or 0)[:1]).format()
        stands.append(f"{thread.name} at {lines[0].strip() if lines else 'gone'}")
    return "\n".join(stands)
