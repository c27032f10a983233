"""The `Communicator` interface, which all backends implement, and wrappers around communicators.

Each operation creates a `Call` and issues it. The table `CALL_SPECS` describes the arguments of each operation. It is
used to check calls, to count their bytes, and to compare them between ranks.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from fsdpx.core.base.dataclass import dataclass, field
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
    to_wire_dtype,
)
from fsdpx.core.comm.plain_codec import pack, unpack
from fsdpx.core.comm.windows import Window
from fsdpx.errors import CommError, ConfigError, RankLost

__all__ = [
    "CALL_SPECS", "COMPLETED", "Array", "Call", "CallCount", "CallSpec", "Communicator", "CommunicatorWrapper",
    "CountingCommunicator", "Handle", "ReduceOp", "SurvivorCommunicator", "TrafficCounters", "can_survive",
    "count_moved_bytes", "describe_call", "drain_transfers", "get_arguments_to_compare_across_ranks",
    "make_balanced_partition", "make_rank_lost_error", "split_evenly", "unwrap_communicator",
]  # fmt: skip


class CallSpec(NamedTuple):
    """Description of the arguments of a communication method.

    Attributes
    ----------
    arrays : names of the arrays
    partitioned : names of the arrays that are divided among the ranks, one for each entry of `call.counts`
    at_root : name of the array that only the root passes
    peer : name of the argument that becomes `call.root`, such as "root" or "dest"; "" if there is none
    reduces : whether the operation combines the values of all ranks
    same_size : whether the full array must have the same number of elements on all ranks
    on_one_rank : how the call is executed if there is only one rank: "copy" copies the first array to the second,
        "nothing" does nothing, and "move" passes the call to the backend as usual"""

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
"""Description of the arguments of each operation, keyed by operation name. A new operation needs an entry in this table
and a function in `fsdpx.core.comm.p2p_collectives.COLLECTIVES`."""


def count_moved_bytes(comm: RankGroup, call: Call) -> int:
    """Return the number of bytes that this rank sends or receives in a call if an optimal algorithm is used.

    Let n be the size of the full array in bytes, and let `own` be the size of this rank's piece of it. The number is:

    - all_gather, reduce_scatter, all_to_all: n - own
    - all_reduce: 2 (n - own), where `own` is taken from the balanced partition
    - broadcast, reduce, send, recv: n
    - gather, scatter: n - own on the root, own on other ranks
    - barrier, and any call on a single rank: 0

    Sizes refer to the dtype in which elements are sent."""
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


def get_arguments_to_compare_across_ranks(call: Call) -> dict[str, Any]:
    """Return a dict {name: value} of the arguments of a call that must be equal on all ranks. Element counts are taken
    from `call.partitions` if the call has been checked, and otherwise from `call.counts`."""
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
            terms_by_name["wire"] = to_wire_dtype(call.wire)
    if verb.partitioned and verb.same_size:
        counts = call.partitions[0].counts if call.partitions else call.counts[0]
        terms_by_name["counts"] = "even" if counts is None else list(counts)
    if call.verb == "all_reduce":
        terms_by_name["algorithm"] = call.algorithm
    if verb.peer:
        terms_by_name["root"] = call.root
    return terms_by_name


def describe_call(call: Call) -> str:
    """Return a description of a call: its name and the arguments that must be equal on all ranks."""
    return call.name + "".join(f", {key} {value}" for key, value in get_arguments_to_compare_across_ranks(call).items())


SUM = ReduceOp.SUM
EVEN_COUNTS: AllCounts = (None,)


class Communicator(ABC):
    """An ordered group of ranks that exchange flat arrays.

    Every operation returns a `Handle` immediately, and allocates scratch memory only if its docstring says so. All
    ranks of the communicator must issue the same collectives in the same order, with the same dtypes and element
    counts. Arrays must be one-dimensional and contiguous. Their dtype must be float64/32/16, bfloat16, complex64/128,
    int8/16/32/64, uint8/16/32/64 or bool, in native byte order; MAX and MIN are not defined for complex numbers.
    float16 and bfloat16 values are added in float32, in rank order, and the sum is rounded once.

    `what` is the name of the action and the tensor for error messages. `counts` lists the number of elements that
    belong to each rank (default: the balanced partition of `split_evenly`). Arrays that only `root` needs are None on
    other ranks. A wrong size, dtype, layout or rank number raises ShapeError or ConfigError before anything is sent.

    The optimal algorithms that docstrings mention are described by Patarasu and Yuan (2009) and Chan et al. (2007). A
    new backend inherits from `fsdpx.core.comm.Backend`, and a wrapper around another communicator inherits from
    `fsdpx.core.comm.CommunicatorWrapper`."""

    rank: int
    size: int
    progress: Progress
    """The pending transfers. Every wait on this communicator or one of its subgroups advances all of them."""
    leave: Callable[[], None] | None = None
    """If not None, this function is called at the end of a `with` block instead of `close`."""
    watched_by: Any = None
    """The watchdog for ranks that wait for each other on this communicator (`fsdpx.core.comm.watched`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close the communicator if the block has ended without an exception. After an exception, do not close it:
        `close` is collective, and the other ranks might never reach it. The exception ends the job anyway."""
        if kind is None:
            (self.leave or self.close)()

    @property
    def has_peers(self) -> bool:
        """True if there are other ranks to exchange values with. On a fake communicator it is False, and gathers return
        this rank's value for all ranks."""
        return self.size > 1

    @abstractmethod
    def issue(self, call: Call) -> Handle:
        """Start `call`. All operations below use this method.

        Parameters
        ----------
        call : the operation, and this rank's arguments

        Returns
        -------
        Handle
            handle of the transfer, which owns the arrays until it is complete

        Raises
        ------
        ShapeError, ConfigError
            if this rank's arguments are invalid, before anything is sent
        """

    def _issue_call(
        self, verb: str, arrays: Arrays, op: ReduceOp, root: int, counts: AllCounts, what: str,
        tag: int = 0, algorithm: str = "library", wire: Any = None,
    ) -> Handle:  # fmt: skip
        return self.issue(Call(verb, arrays, op, root, counts, what, tag, algorithm, (), wire))

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        """Gather the `send` arrays of all ranks into `recv` on every rank, in rank order. Collective.

        With an optimal algorithm, each of N ranks sends n(N-1)/N bytes, where n is the size of `recv` in bytes.

        Parameters
        ----------
        send : this rank's piece, (counts[rank],); the call is in place if `send` is this rank's piece of `recv`
        recv : full array, (sum of counts,)
        counts : number of elements of each rank's piece; all ranks must pass the same list (default: the balanced
            partition)
        what : name of the action and the tensor, for error messages

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
        """Reduce `send` over the ranks, and store each rank's piece of the result in its `recv`. Collective.

        With an optimal algorithm, each of N ranks sends n(N-1)/N bytes, where n is the size of `send` in bytes. 16-bit
        arrays need n bytes of scratch memory; other arrays need none. With `wire`, no scratch memory is needed if all
        `counts` are equal. If they are not, the scratch memory has as many elements as `send`, in the dtype `wire`.

        Parameters
        ----------
        send : this rank's input, (sum of counts,)
        recv : this rank's piece of the result, (counts[rank],). If `recv` is the start of `send` (`send[:count]`) or
            this rank's piece of `send`, the call is in place, and the rest of `send` is undefined after the call
        op : reduction operation
        counts : number of elements of each rank's piece; all ranks must pass the same list (default: the balanced
            partition)
        what : name of the action and the tensor, for error messages
        wire : 16-bit float dtype in which the inputs of a SUM are sent, if they are float32 or float64 arrays (default:
            their own dtype). The inputs are rounded to this dtype, sent, and added in rank order in the dtype of
            `send`. The content of `send` is undefined after the call

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
        """Reduce `buf` over the ranks in place. All ranks get the result. Collective.

        With an optimal algorithm, each of N ranks sends 2n(N-1)/N bytes, where n is the size of `buf` in bytes.

        Parameters
        ----------
        buf : this rank's input, which is overwritten with the result; the same number of elements on all ranks
        op : reduction operation
        algorithm : "library" is the backend's own algorithm, which needs n bytes of scratch memory for 16-bit arrays.
            "ring" needs n/N bytes, and does not support 16-bit arrays
        what : name of the action and the tensor, for error messages
        wire : as in `reduce_scatter`, but the sum is also rounded to this dtype

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
        buf : the source on `root`, and the destination on other ranks; the same number of elements on all ranks
        root : rank that sends
        what : name of the action and the tensor, for error messages

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
        """Reduce `send` over the ranks, and store the result in `recv` on rank `root`. Collective. With an optimal
        algorithm, each rank sends or receives `send.nbytes` bytes.

        Parameters
        ----------
        send : this rank's input; the same number of elements on all ranks
        recv : array for the result on `root`, which may be `send` itself; None on other ranks
        op : reduction operation
        root : rank that gets the result
        what : name of the action and the tensor, for error messages

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
        """Gather the `send` arrays of all ranks into `recv` on rank `root`, in rank order. Collective.

        With an optimal algorithm on N ranks, the root receives n(N-1)/N bytes, where n is the size of `recv` in bytes.

        Parameters
        ----------
        send : this rank's piece, (counts[rank],)
        recv : full array on `root`, (sum of counts,); None on other ranks
        root : rank that gets the full array
        counts : number of elements of each rank's piece (default: the balanced partition)
        what : name of the action and the tensor, for error messages

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
        """Divide the array `send` of rank `root` into pieces, and send each rank its piece. Collective.

        With an optimal algorithm on N ranks, the root sends n(N-1)/N bytes, where n is the size of `send` in bytes.

        Parameters
        ----------
        send : full array on `root`, (sum of counts,); None on other ranks
        recv : this rank's piece, (counts[rank],)
        root : rank that sends
        counts : number of elements of each rank's piece (default: the balanced partition)
        what : name of the action and the tensor, for error messages

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
        send_counts : number of elements sent to each rank (default: the balanced partition of `send`)
        recv_counts : number of elements received from each rank (default: the balanced partition of `recv`)
        what : name of the action and the tensor, for error messages

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
        what : name of the action and the tensor, for error messages

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
        buf : array for the received elements
        source : rank that sends
        tag : 0 <= tag < 16384; the matching send must use the same tag
        what : name of the action and the tensor, for error messages

        Returns
        -------
        Handle
            handle of the message

        Raises
        ------
        ShapeError, ConfigError
            for a wrong dtype, layout, rank number or tag, before anything is received"""
        return self._issue_call("recv", (buf,), SUM, source, (), what, tag)

    def barrier(self, *, what: str = "") -> Handle:
        """Start a barrier. Its handle is complete when all ranks have started the barrier. Collective.

        Parameters
        ----------
        what : name of the action, for error messages

        Returns
        -------
        Handle
            handle of the barrier"""
        return self._issue_call("barrier", (), SUM, 0, (), what)

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of all ranks that pass the same `color` as this rank, ordered by (key, rank).
        Collective, blocking.

        Parameters
        ----------
        color : integer that identifies the group to join; if None, this rank joins no group
        key : number that determines the order of ranks in the group; ranks with the same key are in rank order

        Returns
        -------
        Communicator or None
            communicator of this rank's group; None if `color` is None
        """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of `ranks`, in this order. Collective, blocking: all ranks must call it, each with the
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
        """Gather `data` from all ranks, and return it in rank order on every rank. Collective, blocking.

        Parameters
        ----------
        data : bytes of any length; the length may differ between ranks

        Returns
        -------
        list of bytes
            the data of each rank
        """

    def all_gather_value(self, value: Any) -> list[Any]:
        """Gather `value` from all ranks, and return the values in rank order on every rank. Collective, blocking.

        Ranks use this method to exchange information about their work. Unlike `all_gather_object`, it never executes
        code that another rank has sent.

        Parameters
        ----------
        value : plain data of the types that `fsdpx.core.comm.plain_codec` supports

        Returns
        -------
        list
            the value of each rank"""
        return [unpack(data) for data in self.all_gather_bytes(pack(value))]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather `obj` from all ranks, and return the objects in rank order on every rank. Use this for small objects,
        not for arrays. Collective, blocking.

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
        """Return a window for one-sided access to memory: each rank contributes a part of the memory, and all ranks can
        read and write every part without any action by its owner. Collective.

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
        """Free the backend's resources. The communicator cannot be used after this. Collective."""

    @abstractmethod
    def abort(self, code: int = 1) -> None:
        """End all ranks of the job immediately, without waiting for them.

        Parameters
        ----------
        code : exit status of the job
        """


class CommunicatorWrapper(Communicator):
    """Base class of communicators that pass all calls on to another communicator, `comm`. Override `issue` to observe,
    delay or change calls.

    `split` and `subgroup` wrap the new group in the class of this wrapper. Override `wrap_group` if the constructor of
    that class has parameters other than the group."""

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
    """Return the innermost communicator, without the wrappers that count or check its calls."""
    while hasattr(comm, "comm"):
        comm = comm.comm
    return comm


def _to_counts(counts: Sequence[int] | None) -> Counts:
    return None if counts is None else tuple(counts)


_NAP_SECONDS = 1e-4


class SurvivorCommunicator(Communicator):
    """A communicator that reports when ranks die and lets the remaining ranks continue (Bland et al. 2013, user-level
    failure mitigation).

    A call that needs a dead rank raises RankLost, either when it is issued or in `test` or `wait`. Other calls may
    complete, so different ranks may learn of a death in different calls. A rank that learns of a death recovers in
    three steps. First it calls `revoke`, so that ranks that are waiting for it also learn of the death. Then it calls
    `agree_on_flags` together with all living ranks, and finally `shrink`. It continues with the communicator that
    `shrink` returns, and recreates its subgroups from it."""

    survives: bool
    """True if the other ranks continue to run when one dies. If False, a death ends the job, and RankLost only states
    the reason."""

    @abstractmethod
    def revoke(self) -> None:
        """Invalidate this communicator, and all of its subgroups that contain this rank, on all ranks.

        From then on, every call on them raises RankLost, including pending calls. Only `agree_on_flags` and `shrink`
        still work. This method is not collective: it does not wait for other ranks, and any rank may call it at any
        time."""

    @abstractmethod
    def agree_on_flags(self, flags: int) -> int:
        """Return the bitwise AND of the `flags` of all ranks (0 <= flags < 2^31), or 0 if any rank has died.
        Collective, blocking.

        All living ranks get the same result. The method also works on a revoked communicator, and never raises an error
        because of a death."""

    @abstractmethod
    def shrink(self) -> SurvivorCommunicator:
        """Return a new communicator of the living ranks, in rank order. Collective over the living ranks, blocking.

        If a rank dies while the new communicator is being created, the next call on it detects the death. The new
        communicator has its own `progress`, so that its waits do not advance transfers left over from the old one."""

    @abstractmethod
    def get_failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this communicator that this rank knows to be dead."""


def can_survive(comm: Communicator) -> bool:
    """Return whether the other ranks of `comm` continue to run when one dies. This requires a `SurvivorCommunicator`
    and a launcher that does not end the job when a rank dies."""
    return isinstance(comm, SurvivorCommunicator) and comm.survives


def make_rank_lost_error(call_text: str, ranks: Sequence[int]) -> RankLost:
    """Return the error for a call that cannot be completed because `ranks` have died. `call_text` is a description of
    the call. If `ranks` is empty, the error says that another rank has revoked the communicator."""
    if not ranks:
        return RankLost(f"{call_text}: another rank has revoked this communicator because a rank has died")
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return RankLost(f"{call_text}: {who} died", ranks)


def drain_transfers(handles: Iterable[Handle], seconds: float = 1.0) -> list[Handle]:
    """Test abandoned transfers until each has completed or failed, so that their buffers can be freed.

    Use this function for transfers on a revoked communicator. Errors in these transfers are expected, and therefore
    ignored. Return the handles that are still pending after `seconds` seconds. The caller must keep their buffers
    alive.
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
    """The number of calls, and the number of bytes that this rank would send or receive in these calls with an optimal
    algorithm."""

    calls: int = 0
    bytes: int = 0


@dataclass(slots=True)
class TrafficCounters:
    """The number of calls and bytes of one rank, for each mesh axis and operation.

    Attributes
    ----------
    total : number of bytes so far, for all axes and operations together
    tallies : counts kept by the layers themselves, such as tokens per expert, keyed by layer path"""

    table: dict[tuple[str, str], CallCount] = field(default_factory=dict)
    total: int = field(default=0, compare=False)
    tallies: dict[str, list[int]] = field(default_factory=dict, compare=False)

    def add_calls(self, axis: str, verb: str, nbytes: int, calls: int = 1) -> None:
        """Count `calls` calls of operation `verb` on mesh axis `axis`, which together transferred `nbytes` bytes."""
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
        """Return the number of calls and bytes for one axis and one operation. None means all axes, or all
        operations."""
        counts = [count for key, count in self.table.items() if axis in (None, key[0]) and verb in (None, key[1])]
        return CallCount(sum(count.calls for count in counts), sum(count.bytes for count in counts))

    def copy(self) -> TrafficCounters:
        """Return a snapshot of all counts and tallies."""
        table = {key: CallCount(count.calls, count.bytes) for key, count in self.table.items()}
        return TrafficCounters(table, self.total, {name: list(numbers) for name, numbers in self.tallies.items()})

    def get_counts_since(self, earlier: TrafficCounters) -> TrafficCounters:
        """Return the counts that have been added since the snapshot `earlier`. Axes and operations without new calls
        are left out."""
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
    """A communicator that counts its calls and their bytes (see `count_moved_bytes`) under the name of a mesh axis.
    Calls on a communicator with only one rank are not counted."""

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
