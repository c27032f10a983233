"""Communication between ranks: the one interface that every backend has. Each verb makes a `Call` and issues it."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from fsdpx.comm.calls import DONE, AllCounts, Array, Arrays, Call, Counts, Handle, ReduceOp, even_pieces, split_evenly
from fsdpx.comm.plain import pack, unpack
from fsdpx.comm.steps import Progress, progress_of
from fsdpx.comm.window import Window
from fsdpx.errors import ConfigError

__all__ = ["DONE", "Array", "Call", "Communicator", "Handle", "ReduceOp", "Wrapper", "even_pieces", "split_evenly"]

SUM = ReduceOp.SUM
EVEN: AllCounts = (None,)


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
    array, N = `size` (Patarasu and Yuan 2009; Chan et al. 2007). A new backend inherits `fsdpx.comm.Backend`, a
    communicator around another one `fsdpx.comm.Wrapper`."""

    rank: int
    size: int
    progress: Progress
    """The steps that waits on this communicator and its groups poke."""
    leave: Callable[[], None] | None = None
    """Called at the end of a `with` instead of `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Closed when all is well. After an exception the others do not come to a collective: the job ends."""
        if kind is None:
            (self.leave or self.close)()

    @abstractmethod
    def issue(self, call: Call) -> Handle:
        """Begin `call`; every verb below comes here."""

    def _call(
        self, verb: str, arrays: Arrays, op: ReduceOp, root: int, counts: AllCounts, what: str,
        tag: int = 0, how: str = "library", wire: Any = None,
    ) -> Handle:  # fmt: skip
        return self.issue(Call(verb, arrays, op, root, counts, what, tag, how, (), wire))

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int] | None = None, *, what: str = "") -> Handle:
        """Put every rank's `send` into every rank's `recv`, in rank order: n(N-1)/N bytes. In place when `send` is
        this rank's own piece of `recv`."""
        return self._call("all_gather", (send, recv), SUM, 0, EVEN if counts is None else (tuple(counts),), what)

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
        cut = EVEN if counts is None else (tuple(counts),)
        return self._call("reduce_scatter", (send, recv), op, 0, cut, what, wire=wire)

    def all_reduce(
        self, buf: Array, op: ReduceOp = SUM, algorithm: str = "library", *, what: str = "", wire: Any = None
    ) -> Handle:
        """Reduce `buf` over the ranks into every rank's `buf`: 2n(N-1)/N bytes. `algorithm` is "library" (the
        backend's own; scratch n for 16-bit arrays) or "ring" (`fsdpx.comm.ring`; scratch n/N; not for 16-bit arrays).
        wire: as of `reduce_scatter`, and the sum is rounded as well."""
        return self._call("all_reduce", (buf,), op, 0, (), what, 0, algorithm, wire)

    def broadcast(self, buf: Array, root: int, *, what: str = "") -> Handle:
        """Copy `buf` of rank `root` into `buf` of all others: n bytes."""
        return self._call("broadcast", (buf,), SUM, root, (), what)

    def reduce(self, send: Array, recv: Array | None, op: ReduceOp, root: int, *, what: str = "") -> Handle:
        """Reduce `send` over the ranks into `recv` of `root`, which may be `send` itself: n bytes."""
        return self._call("reduce", (send, recv), op, root, (), what)

    def gather(
        self, send: Array, recv: Array | None, root: int, counts: Sequence[int] | None = None, *, what: str = ""
    ) -> Handle:
        """Put every rank's `send` into `recv` of `root`: n(N-1)/N bytes there, n/N elsewhere."""
        return self._call("gather", (send, recv), SUM, root, (_counts(counts),), what)

    def scatter(
        self, send: Array | None, recv: Array, root: int, counts: Sequence[int] | None = None, *, what: str = ""
    ) -> Handle:
        """Cut `send` of `root` into every rank's `recv`: n(N-1)/N bytes there, n/N elsewhere."""
        return self._call("scatter", (send, recv), SUM, root, (_counts(counts),), what)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None, *, what: str = "",
    ) -> Handle:  # fmt: skip
        """Send piece r of `send` to rank r; receive into piece r of `recv` what rank r sent here."""
        counts = (_counts(send_counts), _counts(recv_counts))
        return self._call("all_to_all", (send, recv), SUM, 0, counts, what)

    def send(self, buf: Array, dest: int, tag: int = 0, *, what: str = "") -> Handle:
        """Send `buf` to `dest`; messages of one (source, dest, tag) arrive in order. 0 <= tag < 16384."""
        return self._call("send", (buf,), SUM, dest, (), what, tag)

    def recv(self, buf: Array, source: int, tag: int = 0, *, what: str = "") -> Handle:
        """Receive from rank `source` a message of exactly `buf.size` elements."""
        return self._call("recv", (buf,), SUM, source, (), what, tag)

    def barrier(self, *, what: str = "") -> Handle:
        """Complete when every rank has issued it."""
        return self._call("barrier", (), SUM, 0, (), what)

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The communicator of one `color`, ordered by (key, rank); None for color None. Blocking."""

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of `ranks`, in that order. All call it, each with its own group. Blocking."""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, of any length, on every rank. Blocking."""

    def all_gather_plain(self, value: Any) -> list[Any]:
        """Every rank's `value` on every rank: plain data, as `fsdpx.comm.plain` has it. Blocking. By this ranks tell
        each other about their work: nothing that another rank sends is run."""
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


class Wrapper(Communicator):
    """A communicator around another one, `comm`: override `issue` to see, delay or change its calls.

    Groups are wrapped alike; override `wrap` if that takes more than `type(self)(group)`."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size, self.progress = comm.rank, comm.size, progress_of(comm)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm!r})"

    def issue(self, call: Call) -> Handle:
        return self.comm.issue(call)

    def wrap(self, group: Communicator) -> Communicator:
        """The same around a group of `comm`."""
        return type(self)(group)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        part = self.comm.split(color, key)
        return None if part is None else self.wrap(part)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        return self.wrap(self.comm.subgroup(ranks))

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


def _counts(counts: Sequence[int] | None) -> Counts:
    return None if counts is None else tuple(counts)
