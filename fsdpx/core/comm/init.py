"""Open the communicator of all ranks, either with a backend chosen by name, or around a communicator that the user
passes.

Backends are registered in the table `BACKENDS`. `spawn` runs a function on ranks that are threads. If ranks are
processes, and a trainer or a communicator opened by this module exists, the failure of a rank ends the entire job. The
first uncaught exception in any thread is printed before the job is aborted."""

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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, TypeVarTuple, Unpack, cast

from fsdpx.core.array.devices import DeviceMap
from fsdpx.core.base import environment, hooks
from fsdpx.core.base.arguments import require_arguments_match_type_hints
from fsdpx.core.base.extensions import import_declared_extension, import_extension_if_declared, list_extensions
from fsdpx.core.base.messages import flush_and_write_stderr
from fsdpx.core.base.name_hints import wrap_with_option_check
from fsdpx.core.comm import default_communicator
from fsdpx.core.comm.backend import FakeCommunicator
from fsdpx.core.comm.calls import POLLS_BEFORE_YIELD, get_thread_stack_frames
from fsdpx.core.comm.communicator import Communicator, unwrap_communicator
from fsdpx.core.comm.default_communicator import get_compared_arguments
from fsdpx.core.comm.desync_check import require_same_settings_on_all_ranks
from fsdpx.core.comm.local import LocalCommunicator, RankDied, ThreadGroup, ThreadWorld, make_single_rank_communicator
from fsdpx.core.comm.message_backend import DEFAULT_TIMEOUT_SECONDS, MessageBackend
from fsdpx.errors import Aborted, CommError, ConfigError, DesyncError, FsdpxError, OutOfMemory, install_hint

if TYPE_CHECKING:
    from fsdpx.core.comm.communicator import SurvivorCommunicator
    from fsdpx.core.comm.node.node import NodeCommunicator

__all__ = [
    "BACKENDS", "BackendOpener", "CommunicatorRequest", "as_communicator", "find_node_communicator", "get_backend_name",
    "open_fault_tolerant_communicator", "open_local", "open_mpi", "open_world", "parse_mpi_library_name",
    "require_backend_for_device", "set_up_world", "spawn", "unwrap_message_backend",
]  # fmt: skip

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_SECONDS_TO_DELIVER = 0.1
_SECONDS_FOR_RANK_0 = 3.0


def _make_excepthook(former: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `sys.excepthook` that, at the first uncaught exception, calls the script's own hook `former` and then
    ends all ranks.

    Without this hook the job would hang: Python would exit on the failed rank, where MPI_Finalize would then wait for
    the other ranks.
    """
    begun, process = threading.Lock(), os.getpid()

    def end_all_ranks(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != process:  # a forked child process is not a rank, so it must not end the others
            former(kind, error, trace)
            flush_and_write_stderr()
            os._exit(1)  # os._exit, because a normal exit would wait in MPI_Finalize
        former_hook = None if former is sys.__excepthook__ else partial(former, kind, error, trace)
        _print_exception_and_end_all_ranks(begun, former_hook, kind, error, trace)

    return end_all_ranks


def _make_thread_excepthook(former: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `threading.excepthook` that does the same as the hook of `_make_excepthook`."""
    begun, process = threading.Lock(), os.getpid()

    def end_all_ranks(args: threading.ExceptHookArgs) -> None:
        # a forked child, or SystemExit, which ends only this thread
        if os.getpid() != process or issubclass(args.exc_type, SystemExit):
            former(args)
            return
        name = args.thread.name if args.thread is not None else "unknown"
        former_hook = None if former is threading.__excepthook__ else partial(former, args)
        _print_exception_and_end_all_ranks(begun, former_hook, args.exc_type, args.exc_value, args.exc_traceback, name)

    return end_all_ranks


hooks.register_process_hooks(
    hooks.Hook(sys, "excepthook", _make_excepthook), hooks.Hook(threading, "excepthook", _make_thread_excepthook)
)


def _print_exception_and_end_all_ranks(
    begun: threading.Lock, script_hook: Callable[[], object] | None, kind: type[BaseException],
    error: BaseException | None, trace: TracebackType | None, thread: str = "",
) -> None:  # fmt: skip
    """Run the script's own hook `script_hook`, then print the exception and end all ranks. Only the first call with the
    same lock `begun` has an effect.

    An error that all ranks raise together is printed only once: the other ranks sleep, so that rank 0 can print the
    error and end all ranks."""
    comm = hooks.find_communicator_to_abort()
    if not begun.acquire(blocking=False):
        return
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    if script_hook is not None:
        code = _run_excepthook_of_script(script_hook) or code
    flush_and_write_stderr()
    if comm is None:
        return
    if comm.rank > 0 and _is_raised_on_all_ranks(error):
        time.sleep(_SECONDS_FOR_RANK_0)
    flush_and_write_stderr(format_rank_traceback(comm.rank, kind, error, trace, thread))
    hooks.notify_exit_listeners(code, kind.__name__)
    time.sleep(_SECONDS_TO_DELIVER)  # give the launcher time to forward the output before `abort` kills the launcher
    comm.abort(code)


def _run_excepthook_of_script(script_hook: Callable[[], object]) -> int:
    """Run an excepthook of the script, and ignore its exceptions so that the job ends in any case. Return the exit
    status that the hook requests, or 0 if it requests none."""
    try:
        script_hook()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        flush_and_write_stderr(f"fsdpx: the program's own excepthook failed:\n{traceback.format_exc()}")
    return 0


def _is_raised_on_all_ranks(error: BaseException | None) -> bool:
    """Return whether the other ranks probably raise the same error. Errors in options, batches and calls are raised on
    all ranks, because all ranks check them or agree on them."""
    return isinstance(error, DesyncError) or (
        isinstance(error, FsdpxError) and not isinstance(error, CommError | OutOfMemory)
    )


def format_rank_traceback(
    rank: int, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, thread: str = ""
) -> str:
    """Return the traceback of an exception as text that begins with the rank, the host name and, if given, the
    thread."""
    head = f"[rank {rank}/{platform.node()}]" + (f" in thread {thread}" if thread else "")
    return f"{head} {''.join(traceback.format_exception(kind, error, trace))}"


class CommunicatorRequest(NamedTuple):
    """The arguments for opening a communicator.

    Attributes
    ----------
    comm : communicator of another library to use; if None, open a new one
    rank, size : rank and size of a fake communicator
    device_map : GPU of each local rank, for backends that use GPUs"""

    settings: environment.Environment
    comm: Any = None
    rank: int | None = None
    size: int | None = None
    device_map: DeviceMap = None


class BackendOpener(NamedTuple):
    """A backend's entry in `BACKENDS`.

    Attributes
    ----------
    open : function that opens the requested communicator
    adopts : function that returns whether the backend can use a given communicator of another library
    suits : function that returns whether the backend can be the default for a request; the first suitable backend in
        `BACKENDS` is the default
    device : name of the device whose arrays the backend transfers; "" if the device does not matter
    """

    open: Callable[[CommunicatorRequest], Communicator]
    adopts: Callable[[Any], bool] = lambda comm: False
    suits: Callable[[CommunicatorRequest], bool] = lambda request: False
    device: str = ""


def open_world(
    backend: str | None = None, comm: Any = None, *, rank: int | None = None, size: int | None = None,
    device_map: DeviceMap = None,
) -> Communicator:  # fmt: skip
    """Return the communicator of all ranks of this job. Collective. With MPI and Gloo, an uncaught exception ends all
    ranks from now on.

    Parameters
    ----------
    backend : "node": MPI between hosts, shared memory inside a host. "mpi": MPI messages only. "gloo": ranks without
        MPI, which connect through MASTER_ADDR and MASTER_PORT or through FSDPX_STORE; Gloo between hosts, shared memory
        inside a host. "nccl": MPI, and NCCL for GPU arrays. "local": a single rank (for several, use `fsdpx.spawn`).
        "fake": a rank that transfers nothing. If an MPI launcher started this process, the default is "node", or "mpi"
        if FSDPX_NODE=0 or if ranks may die, because shared memory does not outlive its ranks. If torchrun or a similar
        launcher started this process, the default is "gloo". Otherwise it is "local"
    comm : existing communicator to use instead of opening one. An mpi4py communicator is duplicated; a `Communicator`
        is returned unchanged
    rank, size : rank and size of a fake communicator
    device_map : the GPU of each local rank, for "nccl"

    Returns
    -------
    Communicator
        communicator of all ranks

    Raises
    ------
    ConfigError
        for an unknown backend, arguments that the backend does not accept, or a missing library
    LaunchError
        if the number of MPI ranks differs from the number that the launcher started, or if some ranks do not arrive"""
    if comm is not None:
        return as_communicator(comm, backend, device_map)
    if backend is not None and backend not in BACKENDS and import_extension_if_declared("backend", backend) is None:
        names = ", ".join(dict.fromkeys((*BACKENDS, *list_extensions("backend"))))
        raise ConfigError(f"unknown backend {backend!r}: use one of {names}, or None to find out")
    if backend != "fake" and (rank is not None or size is not None):
        started = f"backend={backend!r} has the ranks that were started"
        raise ConfigError(f"rank and size belong to backend='fake'; {started}")
    return _open_backend(backend, CommunicatorRequest(environment.read_environment(), None, rank, size, device_map))


def as_communicator(comm: Any, backend: str | None = None, device_map: DeviceMap = None) -> Communicator:
    """Convert `comm` to a `Communicator`. A `Communicator` is returned unchanged. An mpi4py communicator is duplicated,
    and the result is a `Communicator` that uses the duplicate. For `backend` and `device_map`, see `open_world`."""
    if hasattr(comm, "all_gather") and hasattr(comm, "reduce_scatter"):
        return comm
    comm = default_communicator.to_mpi4py(comm)
    default_communicator.require_valid_intracomm(comm)
    able = [name for name, opener in BACKENDS.items() if opener.adopts(comm)]
    if not able:
        raise ConfigError(f"comm={comm!r} is neither an mpi4py communicator nor an fsdpx Communicator")
    if backend not in (None, *able):
        library = type(comm).__module__.partition(".")[0]
        raise ConfigError(f"comm is an {library} communicator, but backend={backend!r}: leave backend out")
    return _open_backend(backend, CommunicatorRequest(environment.read_environment(), comm, device_map=device_map))


def require_backend_for_device(backend: str | None, device: str) -> None:
    """Raise ConfigError if the backend transfers only arrays of a device other than `device`. For `backend`, see
    `open_world`."""
    needed = BACKENDS[backend].device if backend in BACKENDS else ""
    if needed and needed != device:
        raise ConfigError(
            f"backend={backend!r} transfers arrays of device={needed!r}, and device={device!r}: say device={needed!r}"
        )


def get_backend_name() -> str:
    """Return the name of the default communicator's backend. If there is no default communicator, return the name of
    the backend that `fsdpx.init()` would use."""
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
    """Return the `NodeCommunicator` inside the wrappers of `comm`, or None if there is none."""
    comm = unwrap_communicator(comm)
    return comm if hasattr(comm, "allocate_node_buffer") else None


def unwrap_message_backend(comm: Any) -> MessageBackend | None:
    """Return the backend inside `comm` (below its wrappers and a `NodeCommunicator`) that sends messages between
    processes, or None if ranks are not processes."""
    comm = unwrap_communicator(comm)
    comm = getattr(comm, "carrier", comm)
    return comm if isinstance(comm, MessageBackend) else None


def open_fault_tolerant_communicator(comm: Any = None) -> SurvivorCommunicator:
    """Return a new communicator of the ranks of `comm` that keeps working when some of these ranks die. `comm` can
    still be used afterwards. Collective.

    Ranks can survive deaths only with Open MPI 5 started by `mpiexec --with-ft ulfm`, or if they are threads started by
    `spawn(survive=True)`. `fsdpx.core.comm.can_survive` returns whether they can.

    Parameters
    ----------
    comm : an mpi4py communicator, an fsdpx communicator, or None for all ranks of this job. It may use shared memory,
        but the new communicator only sends messages, because shared memory does not outlive its ranks

    Returns
    -------
    SurvivorCommunicator
        communicator of the ranks of `comm`

    Raises
    ------
    ConfigError
        if the ranks of `comm` are neither MPI ranks nor threads; a fake communicator, for example, has no ranks that
        could die"""
    comm = default_communicator.to_mpi4py(comm)
    given = (
        _open_or_reuse_world()
        if comm is None
        else as_communicator(comm, "mpi" if _is_mpi4py_communicator(comm) else None)
    )
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
    resilient_comm.progress.polls_before_yield = mpi.progress.polls_before_yield
    opened = default_communicator.get_default()
    if given is not comm and not (opened and given is opened.comm):
        mpi.close()
    return resilient_comm


def _open_or_reuse_world() -> Communicator:
    """Return the default communicator. If there is none, open a communicator of all ranks of this job. With MPI, the
    opened communicator only sends messages and does not use shared memory."""
    opened = default_communicator.get_default()
    launcher = environment.read_environment().launcher
    return opened.comm if opened else open_world("mpi" if launcher is not None and launcher.mpi else None)


def _open_backend(backend: str | None, request: CommunicatorRequest) -> Communicator:
    if backend is None and request.comm is None and request.settings.launcher is None:
        warning = environment.require_single_process_and_get_note()
        if warning:
            print(f"fsdpx: {warning}", file=sys.stderr, flush=True)
    suits = (name for name, opener in BACKENDS.items() if opener.suits(request))
    name = backend or next(suits)
    return BACKENDS[name].open(request) if name in BACKENDS else _open_extension(name, request)


def _is_mpi4py_communicator(comm: Any) -> bool:
    return type(comm).__module__.startswith("mpi4py")


def _is_mpi_requested(request: CommunicatorRequest) -> bool:
    launcher = request.settings.launcher
    return launcher is not None and launcher.mpi if request.comm is None else _is_mpi4py_communicator(request.comm)


def _is_gloo_requested(request: CommunicatorRequest) -> bool:
    launcher = request.settings.launcher
    return request.comm is None and launcher is not None and not launcher.mpi


def open_local(request: CommunicatorRequest) -> Communicator:
    from fsdpx.core.array import cores

    cores.set_threads_per_rank(1)
    return make_single_rank_communicator()


def open_mpi(request: CommunicatorRequest, shared: bool = False) -> Communicator:
    """Open a communicator of all MPI ranks, or of the ranks of the mpi4py communicator in `request`. If `shared` is
    true and there are several ranks, ranks on the same host communicate through shared memory."""
    from fsdpx.core.comm.mpi.start import guarding_mpi_start

    with guarding_mpi_start() if request.comm is None else nullcontext():
        _require_mpi_with_all_ranks(request)
        from fsdpx.core.comm.mpi.mpi import MpiCommunicator, MpiWorld

        hooks.install_process_hooks_while_alive(ranks := MpiWorld(), ranks)
        opened = set_up_world(
            MpiCommunicator(request.comm, request.settings.timeout or DEFAULT_TIMEOUT_SECONDS), shared
        )
        # without this call, a traceback that refers to `ranks` could keep the hooks alive
        hooks.release_hooks_of_owner(ranks)
        return opened


def _open_extension(name: str, request: CommunicatorRequest) -> Communicator:
    opened: Communicator = import_declared_extension("backend", name)(request)
    return opened


def set_up_world(carrier: MessageBackend, shared: bool) -> Communicator:
    """Return a communicator of all ranks. It sends messages through `carrier`, a backend that is already connected.
    Collective.

    Also install excepthooks, check that all ranks have the same settings, and divide the CPU cores of each host among
    its ranks. If `shared` is true and there are several ranks, ranks on the same host communicate through shared
    memory."""
    from fsdpx.core.array import cores
    from fsdpx.core.comm.node.node import NodeCommunicator

    hooks.install_process_hooks_while_alive(carrier, carrier)
    if carrier.size > 1:
        require_same_settings_on_all_ranks(
            carrier, environment.read_environment().settings_required_equal_on_all_ranks, get_compared_arguments()
        )
    world_comm = NodeCommunicator(carrier) if shared and carrier.size > 1 else carrier
    ranks_here = world_comm.all_gather_value(platform.node()).count(platform.node())
    launcher = environment.read_environment().launcher
    # if ranks are not bound to cores, ranks outside this communicator, such as those of a solver, share the same cores
    is_bound = cores.count_usable_cores() < (os.cpu_count() or 1)
    on_host = 0 if is_bound or launcher is None else launcher.local_size or 0
    busy = cores.set_threads_per_rank(ranks_here) * max(ranks_here, on_host)
    world_comm.progress.polls_before_yield = POLLS_BEFORE_YIELD if busy <= cores.count_usable_cores() else 0
    return world_comm


def _require_mpi_with_all_ranks(request: CommunicatorRequest) -> None:
    """Raise ConfigError if MPI cannot be loaded. Raise LaunchError if the number of MPI ranks differs from the number
    that the launcher started."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = f"{install_hint('mpich')} brings one; or use backend='local'"
        raise ConfigError(f"no MPI library could be loaded ({error}): {remedy}") from error
    library = parse_mpi_library_name(MPI.Get_library_version())
    environment.require_expected_world_size(MPI.COMM_WORLD.Get_size(), request.settings, f"MPI ({library})")


def parse_mpi_library_name(text: str) -> str:
    """Return the name of an MPI library. `text` is the result of `Get_library_version()`; the name is its first
    line."""
    return " ".join(text.strip("\0\n ").split("\n")[0].strip("\0").split())


BACKENDS = {
    "node": BackendOpener(
        partial(open_mpi, shared=True),
        _is_mpi4py_communicator,
        lambda a: _is_mpi_requested(a) and a.settings.can_share_memory,
    ),
    "mpi": BackendOpener(open_mpi, _is_mpi4py_communicator, _is_mpi_requested),
    "nccl": BackendOpener(partial(_open_extension, "nccl"), _is_mpi4py_communicator, device="cuda"),
    "gloo": BackendOpener(partial(_open_extension, "gloo"), suits=_is_gloo_requested),
    "local": BackendOpener(open_local, suits=lambda request: request.comm is None),
    "fake": BackendOpener(lambda a: FakeCommunicator(a.rank or 0, 1 if a.size is None else a.size)),
}


_GRACE_SECONDS = 2.0


@partial(wrap_with_option_check, when="failed")
def spawn(
    fn: Callable[[Communicator, Unpack[Ts]], T], size: int, *args: *Ts,
    timeout: float | None = None, delays: int | None = None, survive: bool = False,
) -> list[T]:  # fmt: skip
    """Run `fn(comm, *args)` on `size` ranks, each of which is a thread of this process. Return the results in rank
    order.

    The first exception on any rank ends the other ranks. `spawn` raises this exception again, with a note that names
    the rank. If a rank returns while others are waiting for it in a call, DesyncError is raised immediately. It names
    the ranks that have returned and the ranks that are waiting. Inside `fn`, the functional API (`fsdpx.all_reduce` and
    others) uses the communicator of the rank that calls it.

    Parameters
    ----------
    fn : function of a communicator and `args`; it is called once on each rank
    size : number of ranks
    args : further arguments of `fn`; all ranks get the same objects
    timeout : number of seconds that a rank may wait for others before CommTimeout is raised. The error names the ranks
        that have not arrived, and a note shows where they are. The default is FSDPX_TIMEOUT, or half an hour if
        FSDPX_TIMEOUT is not set. The run as a whole has no time limit
    delays : seed for random sleeps of up to 2 ms before each communication, for tests (default: no sleeps)
    survive : if true, a rank that raises `RankDied` dies without ending the others, and its result is None. The ranks
        then get communicators that survive such deaths. If all ranks die, `spawn` raises the first `RankDied`

    Returns
    -------
    list
        result of each rank

    Raises
    ------
    ConfigError
        if an argument is invalid
    CommTimeout
        if a rank has waited too long for others
    DesyncError
        if ranks have called different collectives, or if one has returned while others are waiting for it"""
    if not callable(fn):
        raise ConfigError(f"spawn({fn!r}, ...): first the function, then the number of ranks, as in spawn(train, 4)")
    require_arguments_match_type_hints(
        spawn, (fn, size), {"timeout": timeout, "delays": delays, "survive": survive}, "spawn"
    )
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
            with default_communicator.using_communicator(comm):
                results[rank] = fn(comm, *args)
        except BaseException as error:
            if survive and isinstance(error, RankDied):
                deaths.append((rank, error))
                world.record_death(rank)
                return
            failures.append((rank, error))
            world.record_failure(error)
        world.mark_rank_as_returned(rank)

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    try:
        with _exits_named:
            for thread in threads:
                thread.start()
            late = _join_and_find_unfinished_threads(threads, world)
    # such as Ctrl-C in an interactive session; the rank threads then end at their next communication calls
    except BaseException as stop:
        world.record_failure(stop)
        raise
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], Aborted)), failures[0])
        error.add_note(f"[rank {rank}] of {size} thread ranks")
        if late:
            error.add_note(_format_thread_positions(late))
        raise error
    if len(deaths) == size:
        rank, death = deaths[0]
        death.add_note(f"[rank {rank}] the first of {size} thread ranks, all of which died")
        raise death
    return results


class _NamedExits:
    """Context manager that makes `os._exit` first print which rank has called it, if that rank runs as a thread."""

    def __init__(self) -> None:
        self._hook, self._lock, self._inside = (
            hooks.Hook(os, "_exit", self._wrap_exit_to_print_rank),
            threading.Lock(),
            0,
        )

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self._hook.install()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._hook.uninstall()

    @staticmethod
    def _wrap_exit_to_print_rank(former: Callable[..., Any]) -> Callable[..., Any]:
        process = os.getpid()

        def exit_with_rank_name(status: int) -> None:
            opened = default_communicator.get_default()
            if opened is not None and opened.of_thread and os.getpid() == process:
                rank = f"[rank {opened.comm.rank}] of {opened.comm.size} thread ranks"
                flush_and_write_stderr(
                    f"fsdpx: os._exit({status}) by {rank}: the process ends, and all of them with it\n"
                )
            former(status)

        return exit_with_rank_name


_exits_named = _NamedExits()


def _join_and_find_unfinished_threads(threads: list[threading.Thread], world: ThreadWorld) -> list[threading.Thread]:
    """Wait until the threads of all ranks have ended. After a failure, wait for at most _GRACE_SECONDS. Return the
    threads that are still running."""

    def is_over() -> bool:
        return len(world.dead | world.returned) == len(threads)

    with world.condition:
        world.condition.wait_for(lambda: world.failure is not None or is_over())
        world.condition.wait_for(is_over, _GRACE_SECONDS)
        done = world.dead | world.returned
    for rank in done:
        threads[rank].join()
    return [thread for rank, thread in enumerate(threads) if rank not in done]


def _format_thread_positions(threads: list[threading.Thread]) -> str:
    stands = []
    for thread in threads:
        lines = traceback.StackSummary.extract(get_thread_stack_frames(thread.ident or 0)[:1]).format()
        stands.append(f"{thread.name} at {lines[0].strip() if lines else 'gone'}")
    return "\n".join(stands)
