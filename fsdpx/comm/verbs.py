"""The verbs of a communicator: one table of what each takes, from which calls are checked, counted and compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fsdpx.comm.calls import Array, Call, Ranks, ReduceOp, even_pieces

__all__ = ["VERBS", "CallSpec", "described", "moved", "terms"]


class CallSpec(NamedTuple):
    """arrays: their names. cut: those that are cut, by one entry of `call.counts` each. at_root: the one that only root
    has. peer: what `call.root` is called. reduces: values are combined. alike: all ranks have equally many elements."""

    arrays: tuple[str, ...] = ("send", "recv")
    cut: tuple[str, ...] = ()
    at_root: str = ""
    peer: str = ""
    reduces: bool = False
    alike: bool = True

    @property
    def reads(self) -> tuple[int, ...]:
        """Positions of the arrays that it reads."""
        return tuple(i for i, name in enumerate(self.arrays) if name != "recv" and self.peer != "source")

    @property
    def writes(self) -> tuple[int, ...]:
        """Positions of the arrays that it writes."""
        return tuple(i for i, name in enumerate(self.arrays) if name != "send" and self.peer != "dest")


VERBS = {
    "all_gather": CallSpec(cut=("recv",)),
    "reduce_scatter": CallSpec(cut=("send",), reduces=True),
    "all_reduce": CallSpec(("buf",), reduces=True),
    "broadcast": CallSpec(("buf",), peer="root"),
    "reduce": CallSpec(at_root="recv", peer="root", reduces=True),
    "gather": CallSpec(cut=("recv",), at_root="recv", peer="root", alike=False),
    "scatter": CallSpec(cut=("send",), at_root="send", peer="root", alike=False),
    "all_to_all": CallSpec(cut=("send", "recv"), alike=False),
    "send": CallSpec(("buf",), peer="dest"),
    "recv": CallSpec(("buf",), peer="source"),
    "barrier": CallSpec(()),
}


def moved(comm: Ranks, call: Call) -> int:
    """Bytes that this rank must send or receive with an optimal algorithm, whatever the backend does.

    n = bytes of the full array, own = this rank's piece. all_gather, reduce_scatter: n - own. all_reduce: 2 (n - own)
    of the balanced cut. broadcast, reduce: n. gather, scatter: n - own at root, own elsewhere. all_to_all: what goes
    to others. send, recv: n. barrier: 0. One rank alone: 0. Elements of sums have the size that they travel in."""
    verb, arrays = VERBS[call.verb], call.arrays
    if comm.size == 1 or not arrays:
        return 0
    dtype = (arrays[-1] if arrays[0] is None else arrays[0]).dtype if call.wire is None else call.wire
    if len(verb.cut) == 1:
        whole, part = arrays if verb.cut[0] == "send" else arrays[::-1]
        elements = whole.size - part.size if not verb.at_root or comm.rank == call.root else part.size
        return elements * dtype.itemsize
    n = elements = arrays[0].size
    if call.verb == "all_reduce":
        elements = 2 * (n - even_pieces(n, comm.size).counts[comm.rank])
    elif call.verb == "all_to_all":
        elements = n - (call.counts[0] or even_pieces(n, comm.size).counts)[comm.rank]
    return elements * dtype.itemsize


def terms(call: Call) -> dict[str, Any]:
    """The part of a call that must be equal on all ranks; counts as given, or as `check` has resolved them."""
    verb, found = VERBS[call.verb], dict[str, Any]()
    if verb.arrays:
        array: Array = call.arrays[1 if ("recv" in verb.cut[:1] and not verb.at_root) or verb.at_root == "send" else 0]
        found["dtype"] = array.dtype
        if call.shape is not None:
            found["shape"] = list(call.shape)
        elif verb.alike:
            found["elements"] = array.size
    if verb.reduces:
        found["op"] = ReduceOp.of(call.op).name
        if call.wire is not None:
            found["wire"] = np.dtype(call.wire)
    if verb.cut and verb.alike:
        counts = call.cuts[0].counts if call.cuts else call.counts[0]
        found["counts"] = "even" if counts is None else list(counts)
    if call.verb == "all_reduce":
        found["algorithm"] = call.algorithm
    if verb.peer:
        found["root"] = call.root
    return found


def described(call: Call) -> str:
    """The same as text, after its name."""
    return call.name + "".join(f", {key} {value}" for key, value in terms(call).items())
