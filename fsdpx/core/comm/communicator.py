"""The `Communicator` interface, which every backend implements, and wrappers around communicators.

Each operation creates a `Call` and issues it. The table `CALL_SPECS` describes the arguments of each operation; it is
used to check calls, to count their bytes and to compare them between ranks.
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
    get_progress,
    make_balanced_partition,
    split_evenly,
)
from fsdpx.core.comm.plain_codec import pack, unpack
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommError, ConfigError, RankLost

__all__ = [
    "CALL_SPECS", "COMPLETED", "Array", "Call", "CallCount", "CallSpec", "Communicator", "CommunicatorWrapper",
    "CountingCommunicator", "Handle", "ReduceOp", "SurvivorCommunicator", "TrafficCounters", "can_survive",
    "count_moved_bytes", "describe_call", "drain_transfers", "get_common_arguments", "make_balanced_partition",
    "make_rank_lost_error", "split_evenly", "unwrap_communicator",
]  # fmt: skip


class CallSpec(NamedTuple):
    """Description of the arguments of one communication method.

    Attributes
    ----------
    arrays : names of the arrays
    partitioned : names of the arrays that are divided among the ranks, one for each entry of `call.counts`
    at_root : name of the array that only the root passes
    peer : name of the argument that `call.root` holds, such as "root" or "dest"; "" if there is none
    reduces : whether the operation combines the values of all ranks
    same_size : whether arrays must have the same number of elements on all ranks
    on_one_rank : how the call is executed if there is only one rank: "copy" copies the first array to the second,
        "nothing" does nothing, and "move" passes the call to the backend like any other"""

    arrays: tuple[str, ...] = ("send", "recv")
    partitioned: tuple[str, ...] = ()
    at_root: str = ""
    peer: str = ""
    reduces: bool = False
    same_size: bool = True
    on_one_rank: str = "move"

    @property
    def read_positions(self) -> tuple[int, ...]:
        """Indices in `call.arrays` of the arrays that the operation reads."""
        return tuple(i for i, name in enumerate(self.arrays) if name != "recv" and self.peer != "source")

    @property
    def write_positions(self) -> tuple[int, ...]:
        """Indices in `call.arrays` of the arrays that the operation writes."""
        return tuple(i for i, name in enumerate(self.arrays) if name != "send" and self.peer != "dest")


CALL_SPECS = {
    "all_gather": CallSpec(partitioned=("recv",), on_one_rank="copy"),
    "reduce_scatter": CallSpec(partitioned=("send",), reduces=True, on_one_rank="copy"),
    "all_reduce": CallSpec(("buf",), reduces=True, on_one_rank="nothing"),
    "broadcast": CallSpec(("buf",), peer="root", on_one_rank="nothing"),
    "reduce": CallSpec(at_root="recv", peer="root", reduces=True, on_one_rank="copy"),
    "gather": CallSpec(partitioned=("recv",), at_root="recv", peer="root", same_size=False, on_one_rank="copy"),
    "scatter": CallSpec(partitioned=("send",), at_root="send", peer="root", same_size=False, on_one_rank="copy"),
    "all_to_all": CallSpec(partitioned=("send", "recv"), same_size=False, on_one_rank="copy"),
    "send": CallSpec(("buf",), peer="dest"),
    "recv": CallSpec(("buf",), peer="source"),
    "barrier": CallSpec((), on_one_rank="nothing"),
}
"""The specification of each operation, by name. A new operation needs a row here and a function in
`fsdpx.core.comm.p2p_collectives.COLLECTIVES`."""


def count_moved_bytes(comm: RankGroup, call: Call) -> int:
    """Return the number of bytes that this rank sends or receives in a call if the algorithm is optimal.

    Let n be the size of the full array in bytes, and own the size of this rank's piece of it:

    - all_gather, reduce_scatter, all_to_all: n - own
    - all_reduce: 2 (n - own), where own is a piece of the balanced partition
    - broadcast, reduce, send, recv: n
    - gather, scatter: n - own at the root, own elsewhere
    - barrier, and any call on a single rank: 0

    The elements of a sum are counted in the dtype in which they are sent."""
    verb, arrays = CALL_SPECS[call.verb], call.arrays
    if comm.size == 1 or not arrays:
        return 0
    dtype = (arrays[-1] if arrays[0] is None else arrays[0]).dtype if call.wire is None else call.wire
    if len(verb.partitioned) == 1:
        whole, part = arrays if verb.partitioned[0] == "send" else arrays[::-1]
        elements = whole.size - part.size if not verb.at_root or comm.rank == call.root else part.size
        return elements * dtype.itemsize
    n = elements = arrays[0].size
    if call.verb == "all_reduce":
        elements = 2 * (n - make_balanced_partition(n, comm.size).counts[comm.rank])
    elif call.verb == "all_to_all":
        elements = n - (call.counts[0] or make_balanced_partition(n, comm.size).counts)[comm.rank]
    return elements * dtype.itemsize


def get_common_arguments(call: Call) -> dict[str, Any]:
    """Return {name: value} of the arguments of a call that must be equal on all ranks. Element counts are taken from
    `call.partitions` if the call has been checked, else from `call.counts`."""
    verb, terms_by_name = CALL_SPECS[call.verb], dict[str, Any]()
    if verb.arrays:
        array: Array = call.arrays[
            1 if ("recv" in verb.partitioned[:1] and not verb.at_root) or verb.at_root == "send" else 0
        ]
        terms_by_name["dtype"] = array.dtype
        if call.shape is not None:
            terms_by_name["shape"] = list(call.shape)
        elif verb.same_size:
            terms_by_name["elements"] = array.size
    if verb.reduces:
        terms_by_name["op"] = ReduceOp.from_name(call.op).name
        if call.wire is not None:
            terms_by_name["wire"] = np.dtype(call.wire)
    if verb.partitioned and verb.same_size:
        counts = call.partitions[0].counts if call.partitions else call.counts[0]
        terms_by_name["counts"] = "even" if counts is None else list(counts)
    if call.verb == "all_reduce":
        terms_by_name["algorithm"] = call.algorithm
    if verb.peer:
        terms_by_name["root"] = call.root
    return terms_by_name


def describe_call(call: Call) -> str:
    """Return text with the name of a call and those of its arguments that must be equal on all ranks."""
    return call.name + "".join(f", {key} {value}" for key, value in get_common_arguments(call).items())


SUM = ReduceOp.SUM
EVEN_COUNTS: AllCounts = (None,)


class Communicator(ABC):
    """An ordered group of ranks that exchange flat arrays.

    Every operation returns a `Handle` at once, and allocates scratch memory only where its docstring says so. All
    ranks of the communicator issue the same collectives in the same order, with the same dtype and element counts.
    Arrays are one-dimensional and contiguous, of float64/32/16, bfloat16, complex64/128, int8/16/32/64, uint8/16/32/64
    or bool, in the native byte order; MAX and MIN are not defined for complex numbers. `what` names the action and the
    tensor in errors. Arrays that only `root` needs are None elsewhere. `counts` is the number of elements that belong
    to each rank; the default is the balanced partition of `split_evenly`. float16 and bfloat16 are added in float32 in
    rank order and rounded once. A wrong size, dtype, layout or rank number raises ShapeError or ConfigError before
    anything is sent.

    The optimal algorithms mentioned in the methods are those of Patarasu and Yuan (2009) and Chan et al. (2007). A new
    backend inherits `fsdpx.core.comm.Backend`; a wrapper around another communicator inherits
    `fsdpx.core.comm.CommunicatorWrapper`."""

    rank: int
    size: int
    progress: Progress
    """The transfers that every wait on this communicator and its groups advances."""
    leave: Callable[[], None] | None = None
    """Called at the end of a `with` block instead of `close`."""
    watched_by: Any = None
    """The watchdog of ranks that wait for each other on this communicator (`fsdpx.core.comm.watched`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close the communicator, but not if an exception is propagating: the other ranks would then not reach the
        collective `close`, and the exception ends the job instead."""
        if kind is None:
            (self.leave or self.close)()

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to exchange values with. On a fake communicator this is False, and gathers
        return this rank's value for all ranks."""
        return self.size > 1

    @abstractmethod
    def issue(self, call: Call) -> Handle:
        """Start `call`; all operations below go through this method.

        Parameters
        ----------
        call : operation and arguments of this rank

        Returns
        -------
        Handle
            handle of the transfer, which owns the arrays until it is complete

        Raises
        ------
        ShapeError, ConfigError
            if this rank's arguments cannot be used, before anything is sent
        """

    def _issue_call(
        self, verb: str, arrays: Arrays, op: ReduceOp, root: int, counts: AllCounts, what: str,
        tag: int = 0, algorithm: str = "library", wire: Any = None,
    ) -> Handle:  # fmt: skip
        return self.issue(Call(verb, arrays, op, root, counts, what, tag, algorithm, (), wire))

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        """Gather every rank's `send` into every rank's `recv`, in rank order. Collective.

        With an optimal algorithm, each of N ranks sends n(N-1)/N bytes, where n is the size of `recv` in bytes.

        Parameters
        ----------
        send : this rank's piece, (counts[rank],); the call is in place if `send` is this rank's piece of `recv`
        recv : full array, (sum of counts,)
        counts : elements of each rank, the same on all ranks (default: the balanced partition)
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong size, dtype or layout, before anything is sent
        """
        return self._issue_call(
            "all_gather", (send, recv), SUM, 0, EVEN_COUNTS if counts is None else (tuple(counts),), what
        )

    def reduce_scatter(
        self, send: Array, recv: Array, op: ReduceOp = SUM, counts: Sequence[int] | None = None, *, what: str = "",
        wire: Any = None,
    ) -> Handle:  # fmt: skip
        """Reduce `send` over the ranks and store each rank's piece of the result in its `recv`. Collective.

        With an optimal algorithm, each of N ranks sends n(N-1)/N bytes, where n is the size of `send` in bytes. The
        scratch memory is n bytes for 16-bit arrays, and zero otherwise. With `wire`, it is zero if `counts` are all
        equal, else the size that `send` would have in the dtype `wire`.

        Parameters
        ----------
        send : summand of this rank, (sum of counts,)
        recv : this rank's piece of the result, (counts[rank],); the call is in place if `recv` is the start of `send`
            (`send[:count]`) or this rank's piece of `send`, and the rest of `send` is undefined afterwards
        op : reduction operation
        counts : elements of each rank, the same on all ranks (default: the balanced partition)
        what : names the action and the tensor in errors
        wire : 16-bit float dtype in which the summands of a SUM of float32 or float64 are sent. They are rounded to
            it, and added in rank order in the dtype of `send`. The content of `send` is undefined afterwards (default:
            summands are sent in their own dtype)

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong size, dtype, layout, operation or wire format, before anything is sent"""
        all_counts = EVEN_COUNTS if counts is None else (tuple(counts),)
        return self._issue_call("reduce_scatter", (send, recv), op, 0, all_counts, what, wire=wire)

    def all_reduce(
        self, buf: Array, op: ReduceOp = SUM, algorithm: str = "library", *, what: str = "", wire: Any = None
    ) -> Handle:
        """Reduce `buf` over the ranks in place, so that every rank gets the result. Collective.

        With an optimal algorithm, each of N ranks sends 2n(N-1)/N bytes, where n is the size of `buf` in bytes.

        Parameters
        ----------
        buf : summand of this rank, overwritten with the result; the same number of elements on all ranks
        op : reduction operation
        algorithm : "library", the backend's own algorithm, which needs n bytes of scratch memory for 16-bit arrays; or
            "ring", which needs n/N bytes and does not support 16-bit arrays
        what : names the action and the tensor in errors
        wire : see `reduce_scatter`; here the sum is rounded as well

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong dtype, layout, operation, algorithm or wire format, before anything is sent"""
        return self._issue_call("all_reduce", (buf,), op, 0, (), what, 0, algorithm, wire)

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        """Copy `buf` from rank `root` to all other ranks. Collective. With an optimal algorithm, each rank sends or
        receives `buf.nbytes` bytes.

        Parameters
        ----------
        buf : source on `root`, destination elsewhere; the same number of elements on all ranks
        root : rank that sends
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong dtype, layout or rank number, before anything is sent"""
        return self._issue_call("broadcast", (buf,), SUM, root, (), what)

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        """Reduce `send` over the ranks into the root's `recv`. Collective. With an optimal algorithm, each rank sends
        or receives `send.nbytes` bytes.

        Parameters
        ----------
        send : summand of this rank; the same number of elements on all ranks
        recv : result on `root`, which may be `send` itself; None elsewhere
        op : reduction operation
        root : rank that gets the result
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong size, dtype, layout, operation or rank number, before anything is sent"""
        return self._issue_call("reduce", (send, recv), op, root, (), what)

    def gather(
        self, send: Array, recv: Array | None, root: int, counts: Sequence[int] | None = None, *, what: str = ""
    ) -> Handle:
        """Gather every rank's `send` into the root's `recv`, in rank order. Collective.

        With an optimal algorithm on N ranks, the root receives n(N-1)/N bytes, where n is the size of `recv` in bytes.

        Parameters
        ----------
        send : this rank's piece, (counts[rank],)
        recv : full array on `root`, (sum of counts,); None elsewhere
        root : rank that gets the full array
        counts : elements of each rank (default: the balanced partition)
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong size, dtype, layout or rank number, before anything is sent
        """
        return self._issue_call("gather", (send, recv), SUM, root, (_to_counts(counts),), what)

    def scatter(
        self, send: Array | None, recv: Array, root: int, counts: Sequence[int] | None = None, *, what: str = ""
    ) -> Handle:
        """Send to each rank its piece of the root's `send`. Collective.

        With an optimal algorithm on N ranks, the root sends n(N-1)/N bytes, where n is the size of `send` in bytes.

        Parameters
        ----------
        send : full array on `root`, (sum of counts,); None elsewhere
        recv : this rank's piece, (counts[rank],)
        root : rank that sends
        counts : elements of each rank (default: the balanced partition)
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong size, dtype, layout or rank number, before anything is sent
        """
        return self._issue_call("scatter", (send, recv), SUM, root, (_to_counts(counts),), what)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, *, what: str = "",
    ) -> Handle:  # fmt: skip
        """Send piece r of `send` to rank r, and receive from rank r into piece r of `recv`. Collective.

        Parameters
        ----------
        send : pieces for all ranks, in rank order
        recv : pieces from all ranks, in rank order
        send_counts : elements sent to each rank (default: the balanced partition of `send`)
        recv_counts : elements received from each rank (default: the balanced partition of `recv`)
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the transfer

        Raises
        ------
        ShapeError, ConfigError
            for a wrong size, dtype or layout, before anything is sent
        """
        counts = (_to_counts(send_counts), _to_counts(recv_counts))
        return self._issue_call("all_to_all", (send, recv), SUM, 0, counts, what)

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        """Start sending `buf` to rank `dest`. Messages with the same source, destination and tag arrive in order.

        Parameters
        ----------
        buf : elements to send
        dest : rank that receives
        tag : 0 <= tag < 16384; the matching receive must use the same tag
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the message

        Raises
        ------
        ShapeError, ConfigError
            for a wrong dtype, layout, rank number or tag, before anything is sent"""
        return self._issue_call("send", (buf,), SUM, dest, (), what, tag)

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        """Start receiving a message of exactly `buf.size` elements from rank `source`.

        Parameters
        ----------
        buf : array that receives the elements
        source : rank that sends
        tag : 0 <= tag < 16384; the matching send must use the same tag
        what : names the action and the tensor in errors

        Returns
        -------
        Handle
            handle of the message

        Raises
        ------
        ShapeError, ConfigError
            for a wrong dtype, layout, rank number or tag, at once"""
        return self._issue_call("recv", (buf,), SUM, source, (), what, tag)

    def barrier(self, *, what: str = "") -> Handle:
        """Start a barrier, whose handle is complete when every rank has started the barrier. Collective.

        Parameters
        ----------
        what : names the action in errors

        Returns
        -------
        Handle
            handle of the barrier"""
        return self._issue_call("barrier", (), SUM, 0, (), what)

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of all ranks that pass this rank's `color`, ordered by (key, rank). Collective,
        blocking.

        Parameters
        ----------
        color : number of the group to join; None: this rank joins no group
        key : position in the group; ranks with the same key are in rank order

        Returns
        -------
        Communicator or None
            communicator of this rank's group; None if `color` is None
        """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of `ranks`, in that order. Collective, blocking: all ranks call it, each with the
        group that it joins.

        Parameters
        ----------
        ranks : distinct ranks of this communicator, including this rank

        Returns
        -------
        Communicator
            communicator of these ranks

        Raises
        ------
        ConfigError
            if a rank does not exist or is listed twice, or if this rank is missing"""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, in rank order, on every rank. Collective, blocking.

        Parameters
        ----------
        data : bytes of any length, which may differ between ranks

        Returns
        -------
        list of bytes
            one for each rank
        """

    def all_gather_data(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank. Collective, blocking.

        Ranks use this call to exchange information about their work. Unlike `all_gather_object`, it never executes
        code that another rank has sent.

        Parameters
        ----------
        value : plain data, of the types that `fsdpx.core.comm.plain_codec` supports

        Returns
        -------
        list
            the value of each rank"""
        return [unpack(data) for data in self.all_gather_bytes(pack(value))]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's `obj`, in rank order, on every rank. Collective, blocking. For small objects, not for
        arrays.

        Objects are pickled, so a rank executes code that another rank has sent. Ranks must therefore have authenticated
        each other.

        Parameters
        ----------
        obj : any object that can be pickled

        Returns
        -------
        list
            the object of each rank
        """
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(obj))]

    def window(self, nbytes: int) -> Window:
        """Return a one-sided window: each rank contributes a part of the memory, and all ranks can read and write
        every part without any action by its owner. Collective.

        Parameters
        ----------
        nbytes : size of this rank's part in bytes; it may differ between ranks

        Returns
        -------
        Window
            window over the memory of all ranks

        Raises
        ------
        ConfigError
            on a backend without one-sided operations"""
        able = "backend='node' or 'mpi', gloo inside one host, or thread ranks (fsdpx.spawn)"
        raise ConfigError(f"a window on {self!r}, which has no one-sided operations: use {able}")

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the backend; the communicator cannot be used afterwards. Collective."""

    @abstractmethod
    def abort(self, code: int = 1) -> None:
        """End all ranks of the job at once, without waiting for them.

        Parameters
        ----------
        code : exit status of the job
        """


class CommunicatorWrapper(Communicator):
    """Base class of communicators that pass all calls on to another communicator, `comm`. Override `issue` to observe,
    delay or change calls.

    `split` and `subgroup` wrap the new group in the class of this wrapper; override `wrap_group` if the constructor of
    that class has parameters besides the group."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size, self.progress = comm.rank, comm.size, get_progress(comm)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm!r})"

    def issue(self, call: Call) -> Handle:
        return self.comm.issue(call)

    def wrap_group(self, group: Communicator) -> Communicator:
        """Wrap `group`, a subgroup of `comm`, in the same way as `comm` is wrapped."""
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
    """Return the innermost communicator, without the wrappers that count or check calls."""
    while hasattr(comm, "comm"):
        comm = comm.comm
    return comm


def _to_counts(counts: Sequence[int] | None) -> Counts:
    return None if counts is None else tuple(counts)


_NAP_SECONDS = 1e-4


class SurvivorCommunicator(Communicator):
    """A communicator that reports when ranks die and lets the remaining ranks continue (Bland et al. 2013, user-level
    failure mitigation).

    A call that needs a dead rank raises RankLost, either when it is issued or in `test` and `wait`. Calls that do not
    need it may complete, so each rank may learn of a death in a different call. A rank that learns of a death recovers
    in three steps. First it calls `revoke`, so that ranks that are waiting for this rank learn of the death as well.
    Then it calls `agree_on_flags`, which all living ranks reach, and finally `shrink`. It continues with the
    communicator that `shrink` returns, and creates its subgroups again from that."""

    survives: bool
    """True if the other ranks live on when one dies. If not, a death ends the job, and RankLost only states the
    reason."""

    @abstractmethod
    def revoke(self) -> None:
        """Invalidate this communicator and all of its subgroups that contain this rank, on every rank.

        From then on, every call on them raises RankLost, including calls under way; only `agree_on_flags` and `shrink`
        still work. Not collective: it waits for no other rank, and any rank may call it at any time."""

    @abstractmethod
    def agree_on_flags(self, flags: int) -> int:
        """Return the bitwise AND of every rank's `flags` (0 <= flags < 2^31), or 0 if any rank has died. Collective,
        blocking.

        All living ranks get the same result. Works on a revoked communicator, and never raises because of a death.
        """

    @abstractmethod
    def shrink(self) -> SurvivorCommunicator:
        """Return a new communicator of the living ranks, in rank order. Collective over the living ranks, blocking.

        If a rank dies while the communicator is being created, the next call on the communicator detects the death.
        The new communicator has its own `progress`, so that its waits do not advance transfers left over from the old
        one."""

    @abstractmethod
    def get_failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this communicator that this rank knows to be dead."""


def can_survive(comm: Communicator) -> bool:
    """Return whether the other ranks of `comm` continue when one of them dies. This requires a `SurvivorCommunicator`,
    and a launcher that does not end the job when a rank dies."""
    return isinstance(comm, SurvivorCommunicator) and comm.survives


def make_rank_lost_error(call_text: str, ranks: Sequence[int]) -> RankLost:
    """Return the error for the call described by `call_text`, which cannot complete because `ranks` have died. If
    `ranks` is empty, the error says that another rank has revoked the communicator."""
    if not ranks:
        return RankLost(f"{call_text}: another rank has revoked this communicator because a rank has died")
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return RankLost(f"{call_text}: {who} died", ranks)


def drain_transfers(handles: Iterable[Handle], seconds: float = 1.0) -> list[Handle]:
    """Test abandoned transfers until each has completed or failed, so that their buffers can be freed.

    Meant for transfers on a revoked communicator, whose errors are expected and therefore ignored. Returns the handles
    that are still pending after `seconds`; the caller must keep their buffers alive.
    """
    left, deadline = [handle for handle in handles if not _is_complete_or_failed(handle)], time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(_NAP_SECONDS)
        left = [handle for handle in left if not _is_complete_or_failed(handle)]
    return left


def _is_complete_or_failed(handle: Handle) -> bool:
    try:
        return handle.test()
    except CommError:
        return not getattr(handle, "active", False)


@dataclass(slots=True)
class CallCount:
    """Number of calls, and number of bytes that this rank would send or receive in them with an optimal algorithm."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class TrafficCounters:
    """Counts of the calls and bytes of one rank, by mesh axis and operation.

    Attributes
    ----------
    total : number of bytes so far, over all axes and operations
    tallies : numbers that layers count themselves, such as tokens per expert; the key is the path of the layer"""

    table: dict[tuple[str, str], CallCount] = field(default_factory=dict)
    total: int = field(default=0, compare=False)
    tallies: dict[str, list[int]] = field(default_factory=dict, compare=False)

    def add_calls(self, axis: str, verb: str, nbytes: int, calls: int = 1) -> None:
        """Count `calls` calls of operation `verb` on mesh axis `axis` that transferred `nbytes` bytes in total."""
        count = self.table.get((axis, verb))
        if count is None:
            count = self.table[axis, verb] = CallCount()
        count.calls += calls
        count.bytes += nbytes
        self.total += nbytes

    def add_tally(self, name: str, numbers: Sequence[int]) -> None:
        """Add `numbers` elementwise to the counts that a layer keeps under `name`."""
        before = self.tallies.get(name, [0] * len(numbers))
        self.tallies[name] = [a + b for a, b in zip(before, numbers, strict=True)]

    def sum_counts(self, axis: str | None = None, verb: str | None = None) -> CallCount:
        """Return the number of calls and bytes of one axis and operation. None means all axes, or all operations."""
        counts = [count for key, count in self.table.items() if axis in (None, key[0]) and verb in (None, key[1])]
        return CallCount(sum(count.calls for count in counts), sum(count.bytes for count in counts))

    def copy(self) -> TrafficCounters:
        """Return a snapshot of all counts and tallies."""
        table = {key: CallCount(count.calls, count.bytes) for key, count in self.table.items()}
        return TrafficCounters(table, self.total, {name: list(numbers) for name, numbers in self.tallies.items()})

    def get_counts_since(self, earlier: TrafficCounters) -> TrafficCounters:
        """Return the counts added since the snapshot `earlier`. Entries without new calls are left out."""
        later = TrafficCounters()
        for (axis, verb), count in self.table.items():
            before = earlier.table.get((axis, verb), CallCount())
            if count.calls > before.calls:
                later.add_calls(axis, verb, count.bytes - before.bytes, count.calls - before.calls)
        return later

    def clear(self) -> None:
        """Reset all counts and tallies to zero."""
        self.table.clear()
        self.total = 0
        self.tallies.clear()

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield (axis, operation, calls, bytes), sorted by axis and operation."""
        for (axis, verb), count in sorted(self.table.items()):
            yield axis, verb, count.calls, count.bytes


class CountingCommunicator(CommunicatorWrapper):
    """A communicator that counts its calls and their bytes (see `count_moved_bytes`) under the name of a mesh axis. It
    does not count calls if it has only one rank."""

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
