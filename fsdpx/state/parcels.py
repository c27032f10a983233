"""Gradients of chunks that a codec packs one by one, and the sum of what arrives of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.array.namespace import namespace_of
from fsdpx.array.random import Stretch
from fsdpx.codecs import Compressed
from fsdpx.codecs.compressed import TURNS, pieces_of
from fsdpx.comm.communicator import DONE, Handle
from fsdpx.layout.ranges import Piece
from fsdpx.layout.tree import Stack, TreeNode, depth, root
from fsdpx.state.gradients import ChunkGradients, Reduction, Subtrees
from fsdpx.state.transfer import Transfer

__all__ = ["Parcels", "parcel_nbytes"]


def parcel_nbytes(codec: Compressed, pieces: Sequence[Piece], turn: int = TURNS) -> int:
    """Bytes of a chunk's gradient on its way to the owner of these pieces of a page: each is packed by itself."""
    return sum(_nbytes(codec, pieces, turn))


class Parcels(ChunkGradients):
    """Gradients of chunks that stay apart. leaves: a buffer for each. dealt: the chunks of each rank of the axis."""

    def __init__(self, leaves: list[Any], chunks: range, total: int, dealt: Sequence[range]) -> None:
        super().__init__(leaves, chunks, total, ())
        self.total, self.dealt = total, dealt
        self.whole: list[Any] = []

    def reduce(self, reduction: Reduction) -> Transfer:
        """Each chunk of this rank is packed with the memory of its own, and its parts go to their owners, which
        unpack all chunks and add them along the tree: one message to each owner, chunk by chunk."""
        self._close()
        r, mine, real = reduction, len(self.chunks), not getattr(namespace_of(reduction.part), "holds_no_data", False)
        assert isinstance(r.codec, Compressed)
        turn = r.codec.next_turn(_of(r.memory, "shard"))
        sizes = [parcel_nbytes(r.codec, pieces, turn) for pieces in r.page.pieces]
        own, sent = sizes[r.page.rank], [n * mine for n in sizes]
        counts = [own * len(chunks) for chunks in self.dealt]
        wire = r.carry[: sum(sent)]
        handle: Handle = DONE
        if real:
            owners = [pieces_of(part, [n] * mine) for part, n in zip(pieces_of(wire, sent), sizes, strict=True)]
            for i, (chunk, leaf) in enumerate(zip(self.chunks, self.whole, strict=True)):
                _pack(r, turn, chunk, leaf, [parcels[i] for parcels in owners], r.sizes if i else (0.0, 0.0))
        arrived = wire
        if r.comm.size > 1:
            arrived = r.carry[sum(sent) : sum(sent) + sum(counts)]
            handle = r.comm.all_to_all(wire, arrived, sent, counts, what=r.what)

        def total() -> Subtrees:
            found = _total(r, turn, pieces_of(arrived, [own] * self.total)) if real else r.part
            return Subtrees([(root(self.total), found)], r.scratch[:0], self.total)

        return Transfer(handle, total)

    def _keep(self, chunk: int, leaf: Any) -> None:
        self.whole.append(leaf)


def _pack(r: Reduction, turn: int, chunk: int, leaf: Any, parcels: Sequence[Any], before: Sequence[float]) -> None:
    """The gradient of a chunk, to its part for each owner. before: see `Reduction.measured`."""
    assert isinstance(r.codec, Compressed)
    memory = {**_of(r.memory, "shard"), **_of(r.memory, f"chunk{chunk}")}
    pieces = [piece for some in r.page.pieces for piece in some]
    wires = [
        wire
        for parcel, some in zip(parcels, r.page.pieces, strict=True)
        for wire in pieces_of(parcel, _nbytes(r.codec, some, turn))
    ]
    numbers = [_numbers(r, turn, chunk, piece) for piece in pieces]
    with r.measured(leaf, memory, before):
        r.codec.pack_all(leaf, [piece.stop - piece.start for piece in pieces], wires, memory, turn, numbers)


def _total(r: Reduction, turn: int, parcels: Sequence[Any]) -> Any:
    """The sum of what all chunks have sent of this rank's part, in `r.scratch`."""
    assert isinstance(r.codec, Compressed)
    own, total, pieces = r.page.mine.size, len(parcels), r.page.pieces[r.page.rank]
    free = pieces_of(r.scratch, [own] * depth(total, range(total)))

    def add(left: Any, right: Any) -> Any:
        left += right
        free.append(right)
        return left

    stack: Stack[Any] = Stack(total, add)
    xp, first, sizes = namespace_of(r.part), r.page.mine.start, _nbytes(r.codec, pieces, turn)
    for chunk, parcel in enumerate(parcels):
        part = free.pop()
        for piece, wire in zip(pieces, pieces_of(parcel, sizes), strict=True):
            out = part[piece.start - first : piece.stop - first]
            r.codec.unpack(xp, wire, out, False, _numbers(r, turn, chunk, piece))
        stack.push(TreeNode(0, chunk), part)
    return stack.entries[0][1]


def _numbers(r: Reduction, turn: int, chunk: int, piece: Piece) -> Stretch:
    """Those of a piece of a parameter: by what it is, not by where it lies."""
    field = r.page.page.fields[piece.have]
    assert isinstance(r.codec, Compressed)
    return r.codec.numbers(turn, chunk, field.name, piece.start - field.offset, piece.stop - piece.start)


def _nbytes(codec: Compressed, pieces: Sequence[Piece], turn: int) -> list[int]:
    return [codec.nbytes(piece.stop - piece.start, turn) for piece in pieces]


def _of(memory: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """What is kept under "whose/name"."""
    names = (key.partition("/") for key in memory)
    return {name: memory[f"{who}/{name}"] for who, _, name in names if who == whose}
