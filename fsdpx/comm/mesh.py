"""The mesh: which rank stands where on pipe, replica, shard and tensor, and which ranks it communicates with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from fsdpx.comm.communicator import Communicator, Counted, Counters
from fsdpx.comm.guarded import Guarded
from fsdpx.comm.local import single
from fsdpx.config import Sharding, python_fields, sharding
from fsdpx.errors import MeshError

__all__ = ["AXES", "REPLICA", "Axes", "Coordinates", "Mesh", "alone", "connect"]

AXES = ("pipe", "replica", "shard", "tensor")
"""From the slowest to the fastest in rank order by default: tensor neighbours are neighbours on the machine."""


REPLICA = ("pipe", "shard", "tensor")
"""The axes along which the ranks of one replica lie."""


class Coordinates(NamedTuple):
    """Where a rank stands."""

    pipe: int
    replica: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """Widths of the four axes; one of them may be None and is then as wide as fills the world.

    Parameters
    ----------
    replica : copies of the model on the data axis.
    shard : ranks over which each copy is cut; fills the world by default.
    pipe : pipeline stages.
    tensor : ranks over which single layers are cut.
    order : the axes from the slowest to the fastest in rank order. Ranks are numbered machine by machine as a rule, so
        that the last axis stays inside a machine.
    """

    replica: int | None = 1
    shard: int | None = None
    pipe: int | None = 1
    tensor: int | None = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        python_fields(self)
        for axis, width in zip(AXES, self._widths(), strict=True):
            if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
                wanted = "an integer of at least 1, or None to fill the world"
                raise MeshError(f"mesh axis {axis}={width!r} must be {wanted}")
        if sorted(self.order) != sorted(AXES):
            raise MeshError(f"mesh order={self.order!r}: each of {', '.join(AXES)} once, the slowest first")
        object.__setattr__(self, "order", tuple(self.order))
        if self._widths().count(None) > 1:
            raise MeshError(f"{self}: only one axis can fill the world, give numbers for the others")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """From what a command line says, `pipe=2,tensor=2`; axes left out are as by default. Else MeshError."""
        widths: dict[str, Any] = {}
        for word in text.split(","):
            axis, _, width = (part.strip() for part in word.partition("="))
            if axis not in AXES:
                raise MeshError(f"--mesh {text}: the axes are {', '.join(AXES)}, for example pipe=2,tensor=2")
            if axis in widths:
                raise MeshError(f"--mesh {text}: {axis} is named twice")
            if not width.isdecimal() or int(width) < 1:
                raise MeshError(f"--mesh {text}: {axis}={width} must be a number of ranks, at least 1")
            widths[axis] = int(width)
        return cls(**widths)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={width}" for axis, width in zip(AXES, self._widths(), strict=True))

    @property
    def size(self) -> int:
        """Number of ranks; MeshError while an axis is None."""
        return prod(self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Widths in the order of `AXES`; MeshError while an axis is None."""
        pipe, replica, shard, tensor = self._widths()
        if pipe is None or replica is None or shard is None or tensor is None:
            raise MeshError(f"{self}: call resolve(world_size) first, one axis is still open")
        return pipe, replica, shard, tensor

    def width(self, axis: str) -> int:
        """The width of an axis by name; "data" is replica x shard, "world" all of them."""
        if axis == "world":
            return self.size
        if axis == "data":
            return self.width("replica") * self.width("shard")
        return self.shape[AXES.index(axis)]

    def resolve(self, world_size: int) -> Mesh:
        """This mesh with the open axis filled; MeshError if the product of widths is not `world_size`."""
        known = prod(width for width in self._widths() if width is not None)
        rest, remainder = divmod(world_size, known)
        is_open = None in self._widths()
        if remainder or rest == 0 or (not is_open and rest != 1):
            needs = f"a multiple of {known} ranks" if is_open else f"{known} ranks"
            raise MeshError(f"mesh {self} needs {needs}, but the world has {world_size}")
        widths = dict(zip(AXES, (rest if width is None else width for width in self._widths()), strict=True))
        return Mesh(**widths, order=self.order)

    def filled(self, strategy: str | Sharding, world_size: int) -> Mesh:
        """This mesh with all widths; where it does not say how the data axis is cut, the strategy does."""
        beside, mesh = (self.pipe or 1) * (self.tensor or 1), self
        if self.shard is None and self.replica == 1 and world_size % beside == 0:
            placement = sharding(strategy, world_size // beside)
            mesh = replace(self, replica=placement.replica, shard=placement.shard)
        return mesh.resolve(world_size)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands; the last axis of `order` varies fastest."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not on mesh {self} of {self.size} ranks")
        place = {}
        for axis in reversed(self.order):
            rank, place[axis] = divmod(rank, self.width(axis))
        return Coordinates(**place)

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at these coordinates."""
        rank = 0
        for axis in self.order:
            rank = rank * self.width(axis) + getattr(coordinates, axis)
        return rank

    def line(self, coordinates: Coordinates, axes: tuple[str, ...]) -> list[int]:
        """The ranks that differ from `coordinates` along `axes` only, in the order of their coordinates."""
        every = zip(AXES, self.shape, coordinates, strict=True)
        spans = [range(width) if axis in axes else (index,) for axis, width, index in every]
        return [self.rank(Coordinates(*place)) for place in product(*spans)]

    def _widths(self) -> tuple[int | None, ...]:
        return (self.pipe, self.replica, self.shard, self.tensor)


@dataclass(frozen=True)
class Axes:
    """The communicators of one rank along each axis of a mesh; `data` is replica x shard, `world` is all, and `group`
    those ranks that train together: all of them, or those of one replica where replicas train by themselves. space: the
    ranks along each dim of a field, of those data ranks that have parts of the same samples."""

    mesh: Mesh
    coordinates: Coordinates
    world: Communicator
    replica: Communicator
    shard: Communicator
    data: Communicator
    pipe: Communicator
    tensor: Communicator
    group: Communicator
    counters: Counters
    space: tuple[Communicator, ...] = ()
    made: tuple[Communicator, ...] = ()

    @property
    def summing(self) -> tuple[str, ...]:
        """The axes over which gradients are summed; a rank without others to sum with is all of the shard axis."""
        wide = tuple(name for name in ("shard", "replica") if getattr(self, name).size > 1)
        return wide or ("shard",)

    @property
    def uncounted(self) -> Communicator:
        """The communicator of all ranks that counts nothing: for messages that are no part of training."""
        return self.world.comm if isinstance(self.world, Counted) else self.world

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """One more communicator, of ranks of the world, counted under `name`. All ranks call this, each with its own
        group; the caller closes it."""
        assert isinstance(self.world, Counted)
        return Counted(self.world.comm.subgroup(ranks), name, self.counters)

    def close(self) -> None:
        """Free the communicators that `connect` made; the one it was given stays open. Collective."""
        for comm in self.made:
            comm.close()


def connect(
    mesh: Mesh,
    comm: Communicator,
    counters: Counters | None = None,
    check: bool = False,
    local: bool = False,
    space: Sequence[int] = (),
) -> Axes:
    """The axes of this rank on `mesh`, resolved for the ranks of `comm`. Collective. local: replicas train by
    themselves. space: ranks along each dim of a field, whose product divides the data axis.

    Every distinct group is made once; an axis of width 1 is a communicator of one rank, without MPI. Calls are counted
    in `counters` by axis name. With `check`, every collective is preceded by an exchange of fingerprints."""
    mesh = mesh.resolve(comm.size)
    counters = Counters() if counters is None else counters
    place = mesh.coordinates(comm.rank)
    groups: dict[tuple[str, ...], Communicator] = {(): single()}
    made: list[Communicator] = []

    def group(axes: tuple[str, ...]) -> Communicator:
        wide = tuple(axis for axis in axes if mesh.width(axis) > 1)
        if wide not in groups:
            ranks = mesh.line(place, wide)
            part = comm if len(ranks) == comm.size else comm.subgroup(ranks)
            groups[wide] = Guarded(part) if check else part
            made.extend([] if groups[wide] is comm else [groups[wide]])
        return groups[wide]

    named = {"world": AXES, "data": ("replica", "shard")} | {axis: (axis,) for axis in AXES}
    named |= {"group": REPLICA} if local else {}
    comms = {name: Counted(group(axes), name, counters) for name, axes in named.items()}
    comms.setdefault("group", comms["world"])
    lines = []
    for dim, width in enumerate(space):
        ranks = _line_of_field(mesh.line(place, ("replica", "shard")), comm.rank, space, dim)
        part = single() if width == 1 else comm.subgroup(ranks)
        made.extend([] if width == 1 else [part])
        lines.append(Counted(Guarded(part) if check else part, "space", counters))
    return Axes(mesh, place, **comms, counters=counters, space=tuple(lines), made=tuple(made))


def _line_of_field(data: list[int], rank: int, space: Sequence[int], dim: int) -> list[int]:
    """The ranks that differ from `rank` along one dim of the field. data: the ranks of its data axis, in order: the
    first prod(space) of them have the parts of one sample, and so on."""
    group, at = divmod(data.index(rank), prod(space))
    step = prod(space[dim + 1 :])
    first = at - at // step % space[dim] * step
    return [data[group * prod(space) + first + i * step] for i in range(space[dim])]


def alone() -> Axes:
    """The axes of one rank by itself, without MPI."""
    return connect(Mesh(), single())
