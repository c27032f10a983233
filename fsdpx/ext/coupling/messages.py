"""Finds the cells that the ranks of two grids exchange, and packs them into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.namespace import parse_dtype, to_host
from fsdpx.core.comm.plain_codec import pack, unpack
from fsdpx.errors import DataError

__all__ = [
    "Overlap", "PartFacts", "find_overlap", "find_overlaps_with_receivers", "find_overlaps_with_senders",
    "pack_message", "parse_number_dtype", "to_native_byte_order_on_host", "unpack_message",
]  # fmt: skip

ALIGNMENT_BYTES = 64
"""Each array in a message begins at a multiple of this number of bytes."""
LENGTH_BYTES = 8


class PartFacts(NamedTuple):
    """Describes one rank's part of the field. All ranks of both sides have this description of each rank.

    Attributes
    ----------
    layout : order of the dims of arrays, one letter per dim, with "c" for the channels
    shape : number of cells of the full field along each dim
    offsets, local_shape : first cell and number of cells of the part along each dim
    """

    layout: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Dict from dim letter to the range [start, stop) of cells in the part."""
        letters = self.layout.replace("c", "")
        return {a: (start, start + n) for a, start, n in zip(letters, self.offsets, self.local_shape, strict=True)}

    @property
    def shape_by_letter(self) -> dict[str, int]:
        """Number of cells of the full field along each dim, as a dict keyed by the dim's letter in the layout."""
        return dict(zip(self.layout.replace("c", ""), self.shape, strict=True))

    def compute_array_shape(self, channels: int) -> tuple[int, ...]:
        """Return the shape of an array for this part. `channels` is the number of channels, or -1 if the array has no
        channels dim."""
        sizes = {letter: stop - start for letter, (start, stop) in self.ranges.items()} | {"c": channels}
        return tuple(sizes[letter] for letter in self.layout if letter != "c" or channels >= 0)

    def make_slices_for_ranges(self, ranges: Mapping[str, tuple[int, int]], has_channels: bool) -> tuple[slice, ...]:
        """Return a tuple of slices that selects the cells in `ranges` from an array of this part. `ranges` refer to
        cells of the full field."""
        own, index = self.ranges, []
        for letter in self.layout if has_channels else self.layout.replace("c", ""):
            if letter == "c":
                index.append(slice(None))
                continue
            (start, stop), (first, _) = ranges[letter], own[letter]
            index.append(slice(start - first, stop - first) if start < stop else slice(0))
        return tuple(index)


class Overlap(NamedTuple):
    """The cells held both by this rank and by rank `rank` on the other side of the bridge. `ranges` maps each dim
    letter to the range [start, stop) of these cells, which may be empty."""

    rank: int
    theirs: PartFacts
    ranges: dict[str, tuple[int, int]]


def find_overlaps_with_receivers(
    own: PartFacts, place: int, senders: int, receivers: Mapping[int, PartFacts]
) -> list[Overlap]:
    """Return the overlaps of this sender's part with the parts of all receivers to which it sends messages.

    The sender sends messages to the first receiver, and to all receivers whose parts overlap with its own part. In
    addition, each receiver whose part has no cells gets messages from one of the senders, so that every receiver gets a
    message. `senders` is the number of sender ranks, and `place` is the index of this rank among them."""
    found = [(i, find_overlap(rank, own, theirs)) for i, (rank, theirs) in enumerate(receivers.items())]
    return [overlap for i, overlap in found if has_messages_between(place, senders, i, overlap.theirs, overlap.ranges)]


def find_overlaps_with_senders(own: PartFacts, place: int, senders: Mapping[int, PartFacts]) -> list[Overlap]:
    """Return the overlaps of this receiver's part, `own`, with the parts of all senders that send messages to this
    rank. `place` is the index of this rank among the receivers. `senders` maps the rank of each sender to its part."""
    found = [(i, find_overlap(rank, own, theirs)) for i, (rank, theirs) in enumerate(senders.items())]
    return [overlap for i, overlap in found if has_messages_between(i, len(senders), place, own, overlap.ranges)]


def has_messages_between(
    sender: int, senders: int, receiver: int, part: PartFacts, ranges: Mapping[str, tuple[int, int]]
) -> bool:
    """Return whether the sender with index `sender` sends messages to the receiver with index `receiver`. `senders` is
    the number of senders. `part` is the receiver's part. `ranges` contains, for each dim, the range of cells that the
    parts of the sender and the receiver have in common."""
    if receiver == 0 or all(start < stop for start, stop in ranges.values()):
        return True
    return 0 in part.local_shape and sender == receiver % senders


def find_overlap(rank: int, own: PartFacts, theirs: PartFacts) -> Overlap:
    """Return the cells that this rank's part `own` and the part `theirs` of rank `rank` have in common."""
    ranges = {}
    for letter, (start, stop) in theirs.ranges.items():
        first, last = own.ranges[letter]
        ranges[letter] = max(start, first), min(stop, last)
    return Overlap(rank, theirs, ranges)


def to_native_byte_order_on_host(array: Any, what: str) -> np.ndarray:
    """Return an array of numbers in host memory, in the byte order of this machine.

    Raises DataError, with a message that begins with `what`, if the array holds objects, strings or times."""
    host = np.asarray(to_host(array))
    if host.dtype.kind not in "biufc" and host.dtype.name != "bfloat16":
        raise DataError(f"{what} is an array of {host.dtype}: give numbers")
    return host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))


def pack_message(facts: Any, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Pack `facts` and arrays into one array of bytes, and return this array. `facts` must be plain data, and the
    arrays must be in the form that `to_native_byte_order_on_host` returns. The arrays need not be contiguous.

    Raises DataError if `facts` are not plain data."""
    head = pack([facts, [[array.dtype.name, list(array.shape)] for array in arrays]])
    starts, at = [], _round_up_to_alignment(LENGTH_BYTES + len(head))
    for array in arrays:
        starts.append(at)
        at = _round_up_to_alignment(at + array.nbytes)
    body = np.empty(at, np.uint8)
    body[:LENGTH_BYTES].view(np.int64)[0] = len(head)
    body[LENGTH_BYTES : LENGTH_BYTES + len(head)] = np.frombuffer(head, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        body[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return body


def unpack_message(body: np.ndarray) -> tuple[Any, list[np.ndarray]]:
    """Return the facts and the arrays that `pack_message` packed into `body`. The arrays are views of `body`."""
    length = int(body[:LENGTH_BYTES].view(np.int64)[0])
    facts, kinds = unpack(body[LENGTH_BYTES : LENGTH_BYTES + length])
    arrays, at = [], _round_up_to_alignment(LENGTH_BYTES + length)
    for name, shape in kinds:
        dtype = parse_number_dtype(name)
        stop = at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        arrays.append(body[at:stop].view(dtype).reshape(shape))
        at = _round_up_to_alignment(stop)
    return facts, arrays


def parse_number_dtype(name: str) -> np.dtype:
    """Return the dtype whose name is `name`; "bfloat16" is the dtype from ml_dtypes. Raise ValueError for object
    dtypes, because their bytes would be read as memory addresses."""
    dtype = parse_dtype(name) if name == "bfloat16" else np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"dtype {name!r} is not a dtype of numbers")
    return dtype


def _round_up_to_alignment(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
