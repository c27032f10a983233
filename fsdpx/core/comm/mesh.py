"""The device mesh: the coordinates of each rank along the axes pipe (pipeline), replica, shard and tensor, and the
communicators along these axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

from fsdpx.core.base.config import Sharding, convert_fields_to_python_numbers, resolve_sharding
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.name_hints import did_you_mean, wrap_constructor_with_option_check
from fsdpx.core.comm.communicator import Communicator, CountingCommunicator, TrafficCounters
from fsdpx.core.comm.desync_check import CheckedCommunicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import MeshError

__all__ = [
    "AXES", "AXES_OF_ONE_REPLICA", "Mesh", "MeshAxes", "MeshCoordinates", "SampleGroups", "connect_axes",
    "make_single_rank_axes",
]  # fmt: skip

AXES = ("pipe", "replica", "shard", "tensor")
"""The axes in the default rank order, from the slowest-varying to the fastest-varying coordinate. With this order,
neighbors on the tensor axis are on the same host."""


AXES_OF_ONE_REPLICA = ("pipe", "shard", "tensor")
"""The axes along which the ranks of one replica are arranged."""


class MeshCoordinates(NamedTuple):
    """The position of a rank along each of the four mesh axes."""

    pipe: int
    replica: int
    shard: int
    tensor: int


@wrap_constructor_with_option_check
@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each of the four mesh axes. One of these numbers may be None; it is then chosen so that
    all ranks are used.

    If `domain` is set, each sample is divided among several ranks. These ranks are neighbors on the data axis (replica
    x shard). They shard and replicate parameters like all other data ranks. For example,
    `Mesh(replica=2, domain=(2, 2))` on 8 ranks processes two samples at a time, each divided among 4 ranks.

    Parameters
    ----------
    replica : number of copies of the model on the data axis
    shard : number of ranks over which each copy is sharded; if None (default), chosen so that all ranks are used
    pipe : number of pipeline stages
    tensor : number of ranks over which single layers are sharded (tensor parallelism)
    order : the axes, from the slowest-varying to the fastest-varying coordinate; ranks are usually numbered host by
        host, so the last axis stays inside a host
    domain : number of ranks along each of the 1 to 3 dimensions of a sample's field, if samples are divided
        (`distribute(domain=grid)`)
    """

    replica: int | None = 1
    shard: int | None = None
    pipe: int | None = 1
    tensor: int | None = 1
    order: tuple[str, ...] = AXES
    domain: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        convert_fields_to_python_numbers(self)
        for axis, width in zip(AXES, self._get_axis_widths(), strict=True):
            if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
                wanted = "an integer of at least 1, or None to fill the world"
                raise MeshError(f"mesh axis {axis}={width!r} must be {wanted}")
        if sorted(self.order) != sorted(AXES):
            raise MeshError(f"mesh order={self.order!r}: each of {', '.join(AXES)} once, the slowest first")
        object.__setattr__(self, "order", tuple(self.order))
        object.__setattr__(self, "domain", _parse_dim_widths("domain", self.domain))
        if self._get_axis_widths().count(None) > 1:
            raise MeshError(f"{self}: only one axis can fill the world, give numbers for the others")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a command-line argument such as `pipe=2,tensor=2` into a mesh.

        Parameters
        ----------
        text : comma-separated axis=width pairs, optionally with a pair such as domain=2x2; omitted axes have their
            default widths

        Returns
        -------
        Mesh
            mesh with these widths

        Raises
        ------
        MeshError
            if `text` is not of this form"""
        widths: dict[str, Any] = {}
        for word in text.split(","):
            axis, _, width = (part.strip() for part in word.partition("="))
            if axis not in (*AXES, "domain"):
                hint = f"the axes are {', '.join(AXES)}, for example pipe=2,tensor=2{did_you_mean(axis, AXES)}"
                raise MeshError(f"--mesh {text}: {hint}")
            if axis in widths:
                raise MeshError(f"--mesh {text}: {axis} is named twice")
            along = width.split("x")
            if not all(n.isdecimal() and int(n) for n in along) or (axis in AXES and len(along) > 1):
                raise MeshError(f"--mesh {text}: {axis}={width} must be a number of ranks, at least 1")
            widths[axis] = int(width) if axis in AXES else tuple(map(int, along))
        return cls(**widths)

    def __str__(self) -> str:
        axes = [f"{axis}={width}" for axis, width in zip(AXES, self._get_axis_widths(), strict=True)]
        return " x ".join(axes) + (f" (domain={'x'.join(map(str, self.domain))})" if self.domain else "")

    @property
    def size(self) -> int:
        """Number of ranks in the mesh. Raises MeshError if the width of an axis is None."""
        return prod(self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Number of ranks along each axis, in the order of `AXES`. Raises MeshError if the width of an axis is None."""
        pipe, replica, shard, tensor = self._get_axis_widths()
        if pipe is None or replica is None or shard is None or tensor is None:
            raise MeshError(f"{self}: call resolve(world_size) first, one axis is still open")
        return pipe, replica, shard, tensor

    def width_of(self, axis: str) -> int:
        """Return the number of ranks along an axis.

        Parameters
        ----------
        axis : one of `AXES`, "data" (replica x shard) or "world" (all ranks)

        Returns
        -------
        int
            number of ranks along the axis

        Raises
        ------
        MeshError
            if the width of an axis is None
        """
        if axis == "world":
            return self.size
        if axis == "data":
            return self.width_of("replica") * self.width_of("shard")
        return self.shape[AXES.index(axis)]

    def resolve_open_axis(self, world_size: int) -> Mesh:
        """Return this mesh with all widths set. If a width is None, choose it so that all ranks are used.

        Parameters
        ----------
        world_size : number of ranks of the job

        Returns
        -------
        Mesh
            the mesh with all four widths set

        Raises
        ------
        MeshError
            if the product of the widths cannot equal `world_size`
        """
        known = prod(width for width in self._get_axis_widths() if width is not None)
        rest, remainder = divmod(world_size, known)
        is_open = None in self._get_axis_widths()
        if remainder or rest == 0 or (not is_open and rest != 1):
            needs = f"a multiple of {known} ranks" if is_open else f"{known} ranks"
            widths_by_axis = zip(AXES, self._get_axis_widths(), strict=True)
            given = ", ".join(f"{axis}={width}" for axis, width in widths_by_axis if width not in (None, 1))
            remedy = "change the mesh or the number of ranks"
            raise MeshError(f"mesh {given or self} needs {needs}, but the world has {world_size}: {remedy}")
        widths = (rest if width is None else width for width in self._get_axis_widths())
        filled: dict[str, Any] = dict(zip(AXES, widths, strict=True))
        return replace(self, **filled)

    def fill_from_strategy(self, strategy: str | Sharding, world_size: int) -> Mesh:
        """Return this mesh with all widths set. If the replica and shard widths are not set, the sharding strategy
        determines them.

        Parameters
        ----------
        strategy : name of a strategy or a `Sharding`, as accepted by `distribute`
        world_size : number of ranks of the job

        Returns
        -------
        Mesh
            the mesh with all four widths set

        Raises
        ------
        MeshError
            if the product of the widths cannot equal `world_size`
        """
        beside, mesh = (self.pipe or 1) * (self.tensor or 1), self
        if self.shard is None and self.replica == 1 and world_size % beside == 0:
            placement = resolve_sharding(strategy, world_size // beside)
            mesh = replace(self, replica=placement.replica, shard=placement.shard)
        elif self.domain and self.shard is None and self.replica is not None and world_size % beside == 0:
            data = world_size // beside
            if data == self.replica * prod(self.domain) and resolve_sharding(strategy, data).shard == 1:
                # each rank holds a full copy of the model, even if several ranks share a sample, so the shard width is
                # 1
                mesh = replace(self, replica=data, shard=1)
        return mesh.resolve_open_axis(world_size)

    def coordinates_of(self, rank: int) -> MeshCoordinates:
        """Return the coordinates of a rank. The coordinate along the last axis in `order` varies fastest.

        Parameters
        ----------
        rank : 0 <= rank < size

        Returns
        -------
        MeshCoordinates
            coordinate along each axis

        Raises
        ------
        MeshError
            if there is no such rank
        """
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not on mesh {self} of {self.size} ranks")
        place = {}
        for axis in reversed(self.order):
            rank, place[axis] = divmod(rank, self.width_of(axis))
        return MeshCoordinates(**place)

    def data_rank_of(self, rank: int) -> int:
        """Return the position of a rank on the data axis. This position determines the rank's share of the batch.

        Parameters
        ----------
        rank : 0 <= rank < size

        Returns
        -------
        int
            (replica coordinate) * (width of the shard axis) + (shard coordinate)

        Raises
        ------
        MeshError
            if there is no such rank"""
        place = self.coordinates_of(rank)
        return place.replica * self.width_of("shard") + place.shard

    def rank_of(self, coordinates: MeshCoordinates) -> int:
        """Return the rank at these coordinates.

        Parameters
        ----------
        coordinates : coordinate along each axis

        Returns
        -------
        int
            the rank
        """
        rank = 0
        for axis in self.order:
            rank = rank * self.width_of(axis) + getattr(coordinates, axis)
        return rank

    def ranks_along(self, coordinates: MeshCoordinates, axes: tuple[str, ...]) -> list[int]:
        """Return the ranks whose coordinates differ from `coordinates` only along `axes`.

        Parameters
        ----------
        coordinates : coordinates of one rank
        axes : names of mesh axes, from `AXES`

        Returns
        -------
        list of int
            the ranks, in the order of their coordinates
        """
        first = self.rank_of(coordinates._replace(**dict.fromkeys(set(axes) & set(AXES), 0)))
        steps = (self.rank_of(MeshCoordinates(*(int(axis == one) for one in AXES))) for axis in AXES if axis in axes)
        widths = (width for axis, width in zip(AXES, self.shape, strict=True) if axis in axes)
        spans = (range(0, width * step, step) for width, step in zip(widths, steps, strict=True))
        return [first + sum(place) for place in product(*spans)]

    def _get_axis_widths(self) -> tuple[int | None, ...]:
        return (self.pipe, self.replica, self.shard, self.tensor)


def _parse_dim_widths(name: str, widths: Any) -> tuple[int, ...]:
    """Return `widths` (the number of ranks along each of 1 to 3 dimensions) as a tuple. If `widths` is invalid, raise a
    MeshError that names the option `name`."""
    given = tuple(widths) if isinstance(widths, Iterable) else (widths,)
    if len(given) > 3 or any(isinstance(n, bool) or not hasattr(n, "__index__") or n < 1 for n in given):
        raise MeshError(f"mesh {name}={widths!r}: ranks along each of 1 to 3 dims, at least 1, such as (2, 2)")
    return tuple(map(int, given))


@dataclass(frozen=True)
class MeshAxes:
    """The communicators of one rank along the axes of a mesh. The communicators below are described by the ranks that
    belong to them.

    Attributes
    ----------
    replica, shard, pipe, tensor : ranks whose coordinates differ from this rank's only along the axis of that name
    data : ranks along the data axis, which is replica x shard
    world : all ranks
    group : ranks that train in lockstep: all ranks, or the ranks of one replica if replicas train independently (local
        SGD)
    parts : data ranks that share this rank's samples
    domain : for each divided dimension of the samples, the ranks of `parts` along this dimension
    samples : this rank, and the data ranks that hold the corresponding part of other samples
    counters : counts of calls and bytes for each axis
    groups : the groups of ranks that share samples; None if samples are not divided"""

    mesh: Mesh
    coordinates: MeshCoordinates
    world: Communicator
    replica: Communicator
    shard: Communicator
    data: Communicator
    pipe: Communicator
    tensor: Communicator
    group: Communicator
    parts: Communicator
    samples: Communicator
    counters: TrafficCounters
    domain: tuple[Communicator, ...] = ()
    opened_communicators: tuple[Communicator, ...] = ()
    groups: SampleGroups | None = None

    @property
    def reduction_axes(self) -> tuple[str, ...]:
        """Names of the axes over which gradients are summed: "shard" and "replica", excluding axes with only one rank.
        If both axes have only one rank, the result is ("shard",)."""
        wide = tuple(name for name in ("shard", "replica") if getattr(self, name).size > 1)
        return wide or ("shard",)

    @cached_property
    def rank_groups_sharing_samples(self) -> list[list[int]]:
        """The groups of data ranks that share samples, as one list of data ranks per group."""
        if self.groups is None:
            return [[rank] for rank in range(self.data.size)]
        data = self.mesh.ranks_along(self.coordinates, ("replica", "shard"))
        return [[data.index(rank) for rank in member] for member in self.groups.members]

    @property
    def uncounted_world(self) -> Communicator:
        """A communicator of all ranks that does not count traffic. It is used for messages that are not part of
        training."""
        return self.world.comm if isinstance(self.world, CountingCommunicator) else self.world

    def subgroup(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Return a new communicator of `ranks` (ranks of `world`). Traffic is counted under `name`. The caller must
        close the communicator. Collective: every rank must call this method with the ranks of its own subgroup."""
        assert isinstance(self.world, CountingCommunicator)
        return CountingCommunicator(self.world.comm.subgroup(ranks), name, self.counters)

    def close(self) -> None:
        """Close the communicators that `connect_axes` opened. The communicator that was passed to `connect_axes` stays
        open. Collective."""
        for comm in self.opened_communicators:
            comm.close()


class SampleGroups(NamedTuple):
    """The groups of data ranks that share samples (domain parallelism).

    Attributes
    ----------
    axis : name under which messages between the ranks of a group are counted
    dims : number of ranks along each divided dimension
    own_ranks : world ranks that hold parts of this rank's samples; the position along the last dimension varies fastest
    members : for each group along this rank's data axis, the world ranks of the group, in the same order as in
        `own_ranks`"""

    axis: str
    dims: tuple[int, ...]
    own_ranks: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    def ranks_along(self, rank: int, dim: int) -> list[int]:
        """Return the world ranks whose grid position differs from the position of `rank` only along dimension `dim`, in
        the order of their positions."""
        rank_index, step = self.own_ranks.index(rank), prod(self.dims[dim + 1 :])
        first = rank_index - rank_index // step % self.dims[dim] * step
        return [self.own_ranks[first + i * step] for i in range(self.dims[dim])]


def connect_axes(
    mesh: Mesh, comm: Communicator, check: bool = False, local: bool = False, samples: SampleGroups | None = None
) -> MeshAxes:
    """Create the communicators of this rank along the axes of `mesh`. Collective.

    Each distinct group is created only once. An axis of width 1 gets a communicator of one rank, without MPI. The calls
    on each axis are counted under the name of the axis.

    Parameters
    ----------
    mesh : the mesh; if a width is None, it is chosen so that all ranks of `comm` are used
    comm : communicator of all ranks in the mesh
    check : whether ranks compare a fingerprint of each collective before it starts
    local : whether replicas train independently (local SGD); if so, `group` contains only the ranks of one replica
    samples : the groups of ranks that share samples (default: each data rank has its own samples)

    Returns
    -------
    MeshAxes
        communicators of this rank

    Raises
    ------
    MeshError
        if the mesh does not fit the number of ranks"""
    mesh = mesh.resolve_open_axis(comm.size)
    counters, place = TrafficCounters(), mesh.coordinates_of(comm.rank)
    groups: dict[tuple[str, ...], Communicator] = {(): make_single_rank_communicator()}
    communicators: list[Communicator] = []

    def open_subgroup(ranks: Sequence[int]) -> Communicator:
        everyone = ranks == range(comm.size) or (len(ranks) == comm.size and list(ranks) == [*range(comm.size)])
        part = comm if everyone else comm.subgroup(ranks)
        part = CheckedCommunicator(part) if check else part
        communicators.extend([] if part is comm else [part])
        return part

    def open_axis_group(axes: tuple[str, ...]) -> Communicator:
        wide = tuple(axis for axis in axes if mesh.width_of(axis) > 1)
        if wide not in groups:
            whole = prod(map(mesh.width_of, wide)) == comm.size
            groups[wide] = open_subgroup(range(comm.size) if whole else mesh.ranks_along(place, wide))
        return groups[wide]

    named = {"world": AXES, "data": ("replica", "shard")} | {axis: (axis,) for axis in AXES}
    named |= {"group": AXES_OF_ONE_REPLICA} if local else {}
    comms = {name: CountingCommunicator(open_axis_group(axes), name, counters) for name, axes in named.items()}
    comms.setdefault("group", comms["world"])
    single_comm = make_single_rank_communicator()
    if samples is None:
        comms |= {"parts": CountingCommunicator(single_comm, "parts", counters), "samples": comms["data"]}
        return MeshAxes(mesh, place, **comms, counters=counters, opened_communicators=tuple(communicators))  # type: ignore[arg-type]
    # creating a group is collective over all ranks, so all ranks must create their groups in the same order
    here = samples.own_ranks
    parts = single_comm if len(here) == 1 else open_subgroup(here)
    others = [member[here.index(comm.rank)] for member in samples.members]
    alike = single_comm if len(others) == 1 else open_subgroup(others)
    lines = []
    for dim, width in enumerate(samples.dims):
        line = (
            single_comm
            if width == 1
            else parts
            if width == len(here)
            else open_subgroup(samples.ranks_along(comm.rank, dim))
        )
        lines.append(CountingCommunicator(line, samples.axis, counters))
    comms |= {
        "parts": CountingCommunicator(parts, samples.axis, counters),
        "samples": CountingCommunicator(alike, "data", counters),
    }
    return MeshAxes(
        mesh,
        place,
        counters=counters,
        domain=tuple(lines),
        opened_communicators=tuple(communicators),
        groups=samples,
        **comms,
    )


def make_single_rank_axes() -> MeshAxes:
    """Return the `MeshAxes` of a job with a single rank, without MPI."""
    return connect_axes(Mesh(), make_single_rank_communicator())
