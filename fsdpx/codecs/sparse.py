"""Gradients of which a few elements travel: the largest, or some that all ranks choose alike by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdpx.array.namespace import namespace_of
from fsdpx.array.random import Stretch
from fsdpx.array.random import block as raw
from fsdpx.codecs.blocks import add_largest, chosen, in_whole, take_largest
from fsdpx.codecs.codec import Memory, Recut
from fsdpx.codecs.compressed import GRAIN, TURNS, Compressed, keep_numbers, pieces_of
from fsdpx.comm.calls import Array
from fsdpx.errors import ConfigError

__all__ = ["RandomK", "TopK"]

MOST = 1 << 16
"""Elements of a block: places in it are 2 bytes."""
FIRST = 0.25
"""The share that travels when a warm-up begins."""


class TopK(Compressed):
    """Of each part the ceil(fraction n) elements that are largest in size travel, 4 bytes of place and 4 of value each;
    the others are added to the next gradient (Deep Gradient Compression, Lin et al. 2018). Of equals the first travel.

    Parameters
    ----------
    fraction : of the elements, in (0, 1]; 1 is exact
    momentum : of SGD, in [0, 1): what is collected is not the gradient but its velocity u = momentum u + gradient, so
        that an element which waits comes with the momentum of all the steps (momentum correction); the optimiser then
        has none of its own. Each reduce must be of a whole step
    masking : the velocity of what has been sent begins at zero (momentum factor masking)
    warmup : reduces in which the share falls from 1/4 to `fraction`, by the same factor in each
    block : take ceil(fraction block) of each `block` elements, not of the whole part: a few more, with places of 2
        bytes, found on all threads, and such that it does not matter how parts are cut (`chunks`)
    """

    recut: Mapping[str, Recut] = {"error": "sum", "turn": "same", "velocity": "sum"}

    def __init__(
        self, fraction: float = 0.01, momentum: float | None = None, masking: bool = True, warmup: int = 0,
        block: int | None = None,
    ) -> None:  # fmt: skip
        self.fraction, self.block = _share("TopK", fraction), _block("TopK", block)
        if momentum is not None and not 0 <= momentum < 1:
            raise ConfigError(f"TopK(momentum={momentum!r}): a number in [0, 1) is needed, or None")
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ConfigError(f"TopK(warmup={warmup!r}): a number of reduces, 0 or more")
        self.momentum, self.masking, self.warmup = momentum, bool(masking), warmup
        self.whole_steps = momentum is not None

    def nbytes(self, size: int, turn: int = TURNS) -> int:
        share = self.share(turn)
        if self.block is None:
            return 8 * math.ceil(share * size)
        return -(-6 * sum(chosen(size, self.block, share)) // GRAIN) * GRAIN

    def memory(self, size: int) -> Mapping[str, int]:
        return {**super().memory(size), **({} if self.momentum is None else {"velocity": size})}

    def prepare(self, grad: Array, memory: Memory, turn: int) -> Array:
        if self.momentum is None:
            return super().prepare(grad, memory, turn)
        velocity = memory["velocity"]
        velocity *= self.momentum
        velocity += grad
        return super().prepare(velocity, memory, turn)

    def pack(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch) -> None:
        if x.size:
            share = self.share(numbers.seed)
            take_largest(xp, x, self.block or x.size, share, *self._fields(wire, x.size, share), lost)

    def packed(self, parts: Sequence[Array], counts: Sequence[int], memory: Memory, turn: int) -> None:
        if self.momentum is None:
            return
        share = self.share(turn)
        for part, velocity in zip(parts, pieces_of(memory["velocity"], counts), strict=True):
            values, places = self._fields(part, velocity.size, share)
            if self.block is not None:
                places = in_whole(namespace_of(velocity), velocity.size, self.block, share, places)
            if self.masking:
                velocity[places] = 0
            _forget(namespace_of(velocity), values, velocity)

    def unpack(self, xp: Any, wire: Array, out: Array, add: bool, numbers: Stretch) -> None:
        if out.size:
            share = self.share(numbers.seed)
            add_largest(xp, *self._fields(wire, out.size, share), self.block or out.size, share, out, add)

    def _fields(self, wire: Array, size: int, share: float) -> tuple[Array, Array]:
        """Values, and places: in the part, or in their blocks."""
        if self.block is None:
            return wire[wire.size // 2 :].view(np.float32), wire[: wire.size // 2].view(np.int32)
        k = sum(chosen(size, self.block, share))
        wire[6 * k :] = 0
        return wire[: 4 * k].view(np.float32), wire[4 * k : 6 * k].view(np.uint16)

    def share(self, turn: int) -> float:
        """Of the elements, in reduce number `turn`."""
        if turn >= self.warmup:
            return self.fraction
        return max(self.fraction, FIRST * (self.fraction / FIRST) ** (turn / self.warmup))


class RandomK(Compressed):
    """Of each part ceil(fraction n) elements travel that all ranks choose alike, one from each of as many stretches, so
    that values travel alone, 4 bytes each, padded to a multiple of 8 per part. The choice depends on the number of the
    reduce and the part alone.

    Parameters
    ----------
    fraction : of the elements, in (0, 1]; 1 is exact
    unbiased : values are multiplied by the length of their stretch, so that each element is right in the mean, and
        nothing is kept. Else what is not sent is added to the next gradient
    block : cut each `block` elements into ceil(fraction block) stretches, not the whole part: so it does not matter how
        parts are cut (`chunks`)
    """

    random = True

    def __init__(self, fraction: float = 0.01, unbiased: bool = False, block: int | None = None) -> None:
        self.fraction, self.feedback = _share("RandomK", fraction), not unbiased
        self.block = _block("RandomK", block)

    def nbytes(self, size: int, turn: int = TURNS) -> int:
        return -(-4 * self._chosen(size) // GRAIN) * GRAIN

    def pack(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch) -> None:
        self._pack(xp, x, wire, lost, numbers, not self.feedback)

    def pack_sum(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch) -> None:
        """The same elements as before, so that nothing more is lost."""
        self._pack(xp, x, wire, lost, numbers, False)

    def unpack(self, xp: Any, wire: Array, out: Array, add: bool, numbers: Stretch) -> None:
        places, _ = self._places(xp, numbers)
        _put(places, wire[: 4 * places.size].view(np.float32), out, add)

    def _pack(self, xp: Any, x: Array, wire: Array, lost: Array | None, numbers: Stretch, scaled: bool) -> None:
        places, lengths = self._places(xp, numbers)
        values = wire[: 4 * places.size].view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # one look at all, and a second one if it finds something
            odd = not (xp.isfinite(xp.vdot(x, x)) or xp.isfinite(x).all())
        _take(xp, x, places, values, lost)
        if scaled:
            values *= lengths
        if odd:  # also where it is not sent
            values[0] = xp.nan
            _forget(xp, values, lost)
        wire[4 * places.size :] = 0

    def _chosen(self, size: int) -> int:
        return math.ceil(self.fraction * size) if self.block is None else sum(chosen(size, self.block, self.fraction))

    def _places(self, xp: Any, numbers: Stretch) -> tuple[Array, Array]:
        """The places of a part that travel, and the lengths of the stretches in each of which one is chosen."""
        size = numbers.stop - numbers.start
        block = self.block or max(size, 1)
        starts, lengths = _stretches(block, self.fraction)
        whole, (rest, tail) = size // block, _stretches(size % block, self.fraction)
        starts = np.concatenate([(block * np.arange(whole)[:, None] + starts).reshape(-1), whole * block + rest])
        lengths = np.concatenate([np.tile(lengths, whole), tail])
        first = numbers.start // block * math.ceil(self.fraction * block)
        chances = raw(numbers.seed, numbers.name, first, first + starts.size) >> np.uint64(32)
        places = starts + (chances.astype(np.int64) * lengths >> 32)
        return xp.asarray(places), xp.asarray(lengths.astype(np.float32))

    def numbers(self, turn: int, sender: int, owner: int | str, start: int, size: int) -> Stretch:
        """The same for all senders, and on the way from the owner."""
        return Stretch(turn, f"codec part {sender if owner == 'all' else owner}", start, start + size)


def _share(codec: str, fraction: object) -> float:
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ConfigError(f"{codec}(fraction={fraction!r}): the share of elements that travel, in (0, 1]")
    return float(fraction)


def _block(codec: str, block: object) -> int | None:
    if block is None or (isinstance(block, int) and not isinstance(block, bool) and 1 <= block <= MOST):
        return block
    raise ConfigError(f"{codec}(block={block!r}): a number of elements from 1 to {MOST}, such as 1024, or None")


def _stretches(size: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the ceil(share size) stretches begin into which `size` elements are cut, and their lengths."""
    k = math.ceil(share * size)
    edges = np.arange(k + 1) * size // max(k, 1)
    return edges[:-1], np.diff(edges)


def _take(xp: Any, x: Array, places: Array, values: Array, lost: Array | None) -> None:
    """values = x[places]; lost becomes what is left of x, without what is no number."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        taken = x[places]
        values[...] = taken
        if lost is not None:
            if lost is not x:
                lost[...] = x
            lost[places] = taken - values
    _forget(xp, values, lost)


def _forget(xp: Any, values: Array, kept: Array | None) -> None:
    """If there is no number among the values, leave none such among what is kept."""
    if kept is not None and not xp.isfinite(values).all():
        keep_numbers(kept)


def _put(places: Array, values: Array, out: Array, add: bool) -> None:
    if add:
        out[places] += values
        return
    out[...] = 0
    out[places] = values
