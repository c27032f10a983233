"""Communication between ranks: the one interface that every backend has, its verbs, and what is put around it.

Each verb makes a `Call` and issues it. One table says what each verb takes; by it calls are checked, counted and
compared.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from fsdpx.core.comm.calls import (
    COMPLETED,
    AllCounts,
    Array,
    Arrays,
    Call,
    Counts,
    Handle,
    Progress,
    RankGroup,
    ReduceOp,
    even_partition,
    get_progress,
    split_evenly,
)
from fsdpx.core.comm.plain_codec import pack, unpack
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommError, ConfigError, RankLost

__all__ = [
    "CALL_SPECS",
    "COMPLETED",
    "Array",
    "Call",
    "CallCount",
    "CallSpec",
    "Communicator",
    "CommunicatorWrapper",
    "CountingCommunicator",
    "Handle",
    "ReduceOp",
    "SurvivorCommunicator",
    "TrafficCounters",
    "can_survive",
    "count_moved_bytes",
    "describe_call",
    "drain",
    "even_partition",
    "get_terms_to_match",
    "rank_lost_error",
    "split_evenly",
    "unwrap_communicator",
]  # fmt: skip


class CallSpec(NamedTuple):
    """arrays: their names. cut: those that are cut, by one entry of `call.counts` each. at_root: the one that only root
    has. peer: what `call.root` is called. reduces: values are combined. alike: all ranks have equally many elements.
    alone: what a call of one rank is: "copy", of the first array into the second one; "nothing"; or "move", which the
    backend moves as any other."""

    arrays: tuple[str, ...] = ("send", "recv")
    cut: tuple[str, ...] = ()
    at_root: str = ""
    peer: str = ""
    reduces: bool = False
    alike: bool = True
    alone: str = "move"

    @property
    def read_positions(self) -> tuple[int, ...]:
        """Positions of the arrays that it reads."""
        return tuple(i for i, name in enumerate(self.arrays) if name != "recv" and self.peer != "source")

    @property
    def write_positions(self) -> tuple[int, ...]:
        """Positions of the arrays that it writes."""
        return tuple(i for i, name in enumerate(self.arrays) if name != "send" and self.peer != "dest")


CALL_SPECS = {
    "all_gather": CallSpec(cut=("recv",), alone="copy"),
    "reduce_scatter": CallSpec(cut=("send",), reduces=True, alone="copy"),
    "all_reduce": CallSpec(("buf",), reduces=True, alone="nothing"),
    "broadcast": CallSpec(("buf",), peer="root", alone="nothing"),
    "reduce": CallSpec(at_root="recv", peer="root", reduces=True, alone="copy"),
    "gather": CallSpec(cut=("recv",), at_root="recv", peer="root", alike=False, alone="copy"),
    "scatter": CallSpec(cut=("send",), at_root="send", peer="root", alike=False, alone="copy"),
    "all_to_all": CallSpec(cut=("send", "recv"), alike=False, alone="copy"),
    "send": CallSpec(("buf",), peer="dest"),
    "recv": CallSpec(("buf",), peer="source"),
    "barrier": CallSpec((), alone="nothing"),
}
"""By name; a verb of your own is a row here, and a function in `fsdpx.core.comm.p2p_collectives.COLLECTIVES`."""


def count_moved_bytes(comm: RankGroup, call: Call) -> int:
    """Bytes that this rank must send or receive with an optimal algorithm, whatever the backend does.

    n = bytes of the full array, own = this rank's piece. all_gather, reduce_scatter: n - own. all_reduce: 2 (n - own)
    of the balanced cut. broadcast, reduce: n. gather, scatter: n - own at root, own elsewhere. all_to_all: what goes
    to others. send, recv: n. barrier: 0. One rank alone: 0. Elements of sums have the size that they travel in."""
    verb, arrays = CALL_SPECS[call.verb], call.arrays
    if comm.size == 1 or not arrays:
        return 0
    dtype = (arrays[-1] if arrays[0] is None else arrays[0]).dtype if call.wire is None else call.wire
    if len(verb.cut) == 1:
        whole, part = arrays if verb.cut[0] == "send" else arrays[::-1]
        elements = whole.size - part.size if not verb.at_root or comm.rank == call.root else part.size
        return elements * dtype.itemsize
    n = elements = arrays[0].size
    if call.verb == "all_reduce":
        elements = 2 * (n - even_partition(n, comm.size).counts[comm.rank])
    elif call.verb == "all_to_all":
        elements = n - (call.counts[0] or even_partition(n, comm.size).counts)[comm.rank]
    return elements * dtype.itemsize


def get_terms_to_match(call: Call) -> dict[str, Any]:
    """The part of a call that must be equal on all ranks; counts as given, or as `check` has resolved them."""
    verb, terms_by_name = CALL_SPECS[call.verb], dict[str, Any]()
    if verb.arrays:
        array: Array = call.arrays[1 if ("recv" in verb.cut[:1] and not verb.at_root) or verb.at_root == "send" else 0]
        terms_by_name["dtype"] = array.dtype
        if call.shape is not None:
            terms_by_name["shape"] = list(call.shape)
        elif verb.alike:
            terms_by_name["elements"] = array.size
    if verb.reduces:
        terms_by_name["op"] = ReduceOp.from_name(call.op).name
        if call.wire is not None:
            terms_by_name["wire"] = np.dtype(call.wire)
    if verb.cut and verb.alike:
        counts = call.cuts[0].counts if call.cuts else call.counts[0]
        terms_by_name["counts"] = "even" if counts is None else list(counts)
    if call.verb == "all_reduce":
        terms_by_name["algorithm"] = call.algorithm
    if verb.peer:
        terms_by_name["root"] = call.root
    return terms_by_name


def describe_call(call: Call) -> str:
    """A call as text: its name, and what must be equal on all ranks."""
    return call.name + "".join(f", {key} {value}" for key, value in get_terms_to_match(call).items())


SUM = ReduceOp.SUM
EVEN_COUNTS: AllCounts = (None,)


class Communicator(ABC):
    """An ordered group of ranks that move flat arrays between them.

    Every verb is issued at once, returns a `Handle` and allocates nothing but the scratch it states. All ranks of the
    communicator issue the same collectives in the same order, with the same dtype and element counts. Arrays are
    one-dimensional and contiguous, of float64/32/16, bfloat16, complex64/128, int8/16/32/64, uint8/16/32/64 or bool, in
    the byte order of the machine; complex numbers have no MAX or MIN. `what` names the action and
    the tensor in errors. Arrays that only `root` needs are None elsewhere. `counts` say how many elements belong to
    each rank; the default is the balanced cut of `split_evenly`. float16 and bfloat16 are added in float32 in rank
    order and rounded once. A wrong size, dtype, layout or rank number raises ShapeError or ConfigError before anything
    is sent.

    Bytes given below are those that one rank sends (or receives) with an optimal algorithm, n = bytes of the full
    array, N = `size` (Patarasu and Yuan 2009; Chan et al. 2007). A new backend inherits `fsdpx.core.comm.Backend`, a
    communicator around another one `fsdpx.core.comm.CommunicatorWrapper`."""

    rank: int
    size: int
    progress: Progress
    """The steps that waits on this communicator and its groups poke."""
    leave: Callable[[], None] | None = None
    """Called at the end of a `with` instead of `close`."""
    watched_by: Any = None
    """What looks after ranks that wait for each other here (`fsdpx.core.comm.watched`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Closed when all is well. After an exception the others do not come to a collective: the job ends."""
        if kind is None:
            (self.leave or self.close)()

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to hear from; without them, all ranks say what this one says."""
        return self.size > 1

    @abstractmethod
    def issue(self, call: Call) -> Handle:
        """Begin `call`; every verb below comes here."""

    def _issue_call(
        self, verb: str, arrays: Arrays, op: ReduceOp, root: int, counts: AllCounts, what: str,
        tag: int = 0, how: str = "library", wire: Any = None,
    ) -> Handle:  # fmt: skip
        return self.issue(Call(verb, arrays, op, root, counts, what, tag, how, (), wire))

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        """Put every rank's `send` into every rank's `recv`, in rank order: n(N-1)/N bytes. In place when `send` is
        this rank's own piece of `recv`."""
        return self._issue_call(
            "all_gather", (send, recv), SUM, 0, EVEN_COUNTS if counts is None else (tuple(counts),), what
        )

    def reduce_scatter(
        self, send: Array, recv: Array, op: ReduceOp = SUM, counts: Sequence[int] | None = None, *, what: str = "",
        wire: Any = None,
    ) -> Handle:  # fmt: skip
        """Reduce `send` over the ranks and leave each rank its own piece in `recv`: n(N-1)/N bytes. Scratch: n for
        16-bit arrays, none else.

        In place when `recv` is the start of `send` (`send[:count]`) or its own piece there; the rest of `send` is
        then undefined.

        wire: a 16-bit float dtype in which summands of a SUM of float32 or float64 travel, in fewer bytes: what several
        ranks add are their summands rounded to it, in rank order in the dtype of `send`, which is then undefined.
        Scratch: none if `counts` are all equal, else n in that dtype."""
        cut = EVEN_COUNTS if counts is None else (tuple(counts),)
        return self._issue_call("reduce_scatter", (send, recv), op, 0, cut, what, wire=wire)

    def all_reduce(
        self, buf: Array, op: ReduceOp = SUM, algorithm: str = "library", *, what: str = "", wire: Any = None
    ) -> Handle:
        """Reduce `buf` over the ranks into every rank's `buf`: 2n(N-1)/N bytes. `algorithm` is "library" (the
        backend's own; scratch n for 16-bit arrays) or "ring" (scratch n/N; not for 16-bit
        arrays). wire: as of `reduce_scatter`, and the sum is rounded as well."""
        return self._issue_call("all_reduce", (buf,), op, 0, (), what, 0, algorithm, wire)

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        """Copy `buf` of rank `root` into `buf` of all others: n bytes."""
        return self._issue_call("broadcast", (buf,), SUM, root, (), what)

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        """Reduce `send` over the ranks into `recv` of `root`, which may be `send` itself: n bytes."""
        return self._issue_call("reduce", (send, recv), op, root, (), what)

    def gather(
        self, send: Array, recv: Array | None, root: int, counts: Sequence[int] | None = None, *, what: str = ""
    ) -> Handle:
        """Put every rank's `send` into `recv` of `root`: n(N-1)/N bytes there, n/N elsewhere."""
        return self._issue_call("gather", (send, recv), SUM, root, (_as_counts(counts),), what)

    def scatter(
        self, send: Array | None, recv: Array, root: int, counts: Sequence[int] | None = None, *, what: str = ""
    ) -> Handle:
        """Cut `send` of `root` into every rank's `recv`: n(N-1)/N bytes there, n/N elsewhere."""
        return self._issue_call("scatter", (send, recv), SUM, root, (_as_counts(counts),), what)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, *, what: str = "",
    ) -> Handle:  # fmt: skip
        """Send piece r of `send` to rank r; receive into piece r of `recv` what rank r sent here."""
        counts = (_as_counts(send_counts), _as_counts(recv_counts))
        return self._issue_call("all_to_all", (send, recv), SUM, 0, counts, what)

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        """Send `buf` to `dest`; messages of one (source, dest, tag) arrive in order. 0 <= tag < 16384."""
        return self._issue_call("send", (buf,), SUM, dest, (), what, tag)

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        """Receive from rank `source` a message of exactly `buf.size` elements."""
        return self._issue_call("recv", (buf,), SUM, source, (), what, tag)

    def barrier(self, *, what: str = "") -> Handle:
        """Complete when every rank has issued it."""
        return self._issue_call("barrier", (), SUM, 0, (), what)

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The communicator of one `color`, ordered by (key, rank); None for color None. Blocking."""

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of `ranks`, in that order. All call it, each with its own group. Blocking."""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, of any length, on every rank. Blocking."""

    def all_gather_data(self, value: Any) -> list[Any]:
        """Every rank's `value` on every rank: plain data, as `fsdpx.core.comm.plain_codec` has it. Blocking. By this
        ranks tell each other about their work: nothing that another rank sends is run."""
        return [unpack(data) for data in self.all_gather_bytes(pack(value))]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, any object of the user's, on every rank. Blocking, pickled: a rank runs what another one
        has pickled, so ranks must have proven that they belong together. For small objects, not for data."""
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(obj))]

    def window(self, nbytes: int) -> Window:
        """Memory of each rank that all others read and write without its help; ranks may ask for different amounts.
        Collective. ConfigError on a backend without one-sided operations."""
        able = "backend='node' or 'mpi', gloo inside one host, or thread ranks (fsdpx.spawn)"
        raise ConfigError(f"a window on {self!r}, which has no one-sided operations: use {able}")

    @abstractmethod
    def close(self) -> None:
        """Free what the backend holds. Collective; the communicator is unusable afterwards."""

    @abstractmethod
    def abort(self, code: int = 1) -> None:
        """End all ranks of the job now, with exit status `code`."""


class CommunicatorWrapper(Communicator):
    """A communicator around another one, `comm`: override `issue` to see, delay or change its calls.

    Groups are wrapped alike; override `wrap_group` if that takes more than `type(self)(group)`."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size, self.progress = comm.rank, comm.size, get_progress(comm)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm!r})"

    def issue(self, call: Call) -> Handle:
        return self.comm.issue(call)

    def wrap_group(self, group: Communicator) -> Communicator:
        """This wrapper around a group of `comm`."""
        return type(self)(group)

    @property
    def has_peers(self) -> bool:
        return self.comm.has_peers

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.comm.split(color, key)
        return None if part is None else self.wrap_group(part)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        return self.wrap_group(self.comm.subgroup(ranks))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.comm.all_gather_bytes(data)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.comm.all_gather_object(obj)

    def window(self, nbytes: int) -> Window:
        return self.comm.window(nbytes)

    def close(self) -> None:
        self.comm.close()

    def abort(self, code: int = 1) -> None:
        self.comm.abort(code)


def unwrap_communicator(comm: Any) -> Any:
    """The communicator inside what counts or guards it."""
    while hasattr(comm, "comm"):
        comm = comm.comm
    return comm


def _as_counts(counts: Sequence[int] | None) -> Counts:
    return None if counts is None else tuple(counts)


_NAP_SECONDS = 1e-4


class SurvivorCommunicator(Communicator):
    """A communicator that tells its ranks of deaths, and outlives them (Bland et al. 2013, user-level failure
    mitigation).

    A call that needs a dead rank raises RankLost, when it is issued or in `test` and `wait`; other calls may go on, so
    ranks hear of a death at different places. Every rank that hears of it recovers in these steps: `revoke`, so that
    ranks waiting for this one hear of it, too; `agree_on_flags`, which ranks that have heard of nothing also reach;
    `shrink`; then go on with the new communicator and groups of it."""

    survives: bool
    """Whether the others live on when a rank dies. If not, a death ends the job; RankLost then only says why."""

    @abstractmethod
    def revoke(self) -> None:
        """Give up this communicator and the groups that this rank is in that `split` and `subgroup` made from it: every
        call that any rank has under way or begins there, except `agree` and `shrink`, raises RankLost. Local: it waits
        for no other, and any rank may call it at any time."""

    @abstractmethod
    def agree_on_flags(self, flags: int) -> int:
        """The bitwise AND of every rank's `flags` (0 <= flags < 2^31), 0 if any rank has died: the same on all ranks
        that live. Blocking; works on a revoked communicator, never raises for a death."""

    @abstractmethod
    def shrink(self) -> SurvivorCommunicator:
        """A new communicator of the ranks that live, in rank order. Blocking; all that live call it. No rank in it is
        known to be dead when it is made; a death meanwhile is found out with the next call. It has a `progress` of its
        own: its waits do not run into leftovers of the old one."""

    @abstractmethod
    def failed_ranks(self) -> tuple[int, ...]:
        """Ranks of this communicator that are known here to be dead."""


def can_survive(comm: Communicator) -> bool:
    """Whether `comm` is a `SurvivorCommunicator` whose ranks live on when one of them dies."""
    return isinstance(comm, SurvivorCommunicator) and comm.survives


def rank_lost_error(where: str, ranks: Sequence[int]) -> RankLost:
    """The error of a call, described by `where`, that will not be complete because `ranks` have died; none: because
    a rank gave the communicator up."""
    if not ranks:
        return RankLost(f"{where}: another rank has given this communicator up, for a rank that has died")
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return RankLost(f"{where}: {who} died", ranks)


def drain(handles: Iterable[Handle], seconds: float = 1.0) -> list[Handle]:
    """Test transfers whose result is no longer wanted until each is complete or broken; then their buffers are free.

    For what was under way on a revoked communicator: its errors are expected and dropped. Returns those that are
    neither after `seconds`; their buffers must stay."""
    left, deadline = [handle for handle in handles if not _is_over(handle)], time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(_NAP_SECONDS)
        left = [handle for handle in left if not _is_over(handle)]
    return left


def _is_over(handle: Handle) -> bool:
    try:
        return handle.test()
    except CommError:
        return not getattr(handle, "active", False)


@dataclass(slots=True)
class CallCount:
    """Calls, and the bytes that this rank must send or receive with an optimal algorithm."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class TrafficCounters:
    """Counts by (axis, verb), for one rank. total: all bytes so far. tallies: what layers count themselves, by path."""

    table: dict[tuple[str, str], CallCount] = field(default_factory=dict)
    total: int = field(default=0, compare=False)
    tallies: dict[str, list[int]] = field(default_factory=dict, compare=False)

    def add_calls(self, axis: str, verb: str, nbytes: int, calls: int = 1) -> None:
        """Note `calls` calls of `verb` on `axis` that moved `nbytes` in all."""
        count = self.table.get((axis, verb))
        if count is None:
            count = self.table[axis, verb] = CallCount()
        count.calls += calls
        count.bytes += nbytes
        self.total += nbytes

    def add_tally(self, name: str, numbers: Sequence[int]) -> None:
        """Add to the numbers that a layer counts."""
        before = self.tallies.get(name, [0] * len(numbers))
        self.tallies[name] = [a + b for a, b in zip(before, numbers, strict=True)]

    def sum_counts(self, axis: str | None = None, verb: str | None = None) -> CallCount:
        """The sum over what matches; None matches everything."""
        counts = [count for key, count in self.table.items() if axis in (None, key[0]) and verb in (None, key[1])]
        return CallCount(sum(count.calls for count in counts), sum(count.bytes for count in counts))

    def copy(self) -> TrafficCounters:
        """These counts as they are now."""
        return TrafficCounters({key: CallCount(count.calls, count.bytes) for key, count in self.table.items()})

    def counts_since(self, earlier: TrafficCounters) -> TrafficCounters:
        """The counts added since `earlier` was copied; entries without new calls are left out."""
        later = TrafficCounters()
        for (axis, verb), count in self.table.items():
            before = earlier.table.get((axis, verb), CallCount())
            if count.calls > before.calls:
                later.add_calls(axis, verb, count.bytes - before.bytes, count.calls - before.calls)
        return later

    def clear(self) -> None:
        """Forget all."""
        self.table.clear()
        self.tallies.clear()

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """(axis, verb, calls, bytes), sorted by axis and verb."""
        for (axis, verb), count in sorted(self.table.items()):
            yield axis, verb, count.calls, count.bytes


class CountingCommunicator(CommunicatorWrapper):
    """A communicator that notes each call under its axis, with the bytes that `moved` says. One rank counts nothing."""

    def __init__(self, comm: Communicator, axis: str, counters: TrafficCounters) -> None:
        super().__init__(comm)
        self.axis, self.counters = axis, counters

    def __repr__(self) -> str:
        return f"CountingCommunicator({self.comm!r}, {self.axis!r})"

    def issue(self, call: Call) -> Handle:
        handle = self.comm.issue(call)
        if self.size > 1:
            self.counters.add_calls(self.axis, call.verb, count_moved_bytes(self, call))
        return handle

    def wrap_group(self, group: Communicator) -> Communicator:
        return CountingCommunicator(group, self.axis, self.counters)
