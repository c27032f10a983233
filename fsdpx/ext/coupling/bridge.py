"""`Bridge`: exchanges fields and weights between the solver ranks and training ranks of one job."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import open_fault_tolerant_communicator
from fsdpx.core.comm.local import LocalCommunicator
from fsdpx.core.comm.plain_codec import pack
from fsdpx.errors import ConfigError, DataError
from fsdpx.ext.coupling.messages import (
    Overlap,
    PartFacts,
    find_overlaps_with_receivers,
    find_overlaps_with_senders,
    pack_message,
    to_native_byte_order_on_host,
    unpack_message,
)
from fsdpx.ext.coupling.streams import Receiver, Sender, wait_until
from fsdpx.ext.fields.grid import Grid

__all__ = ["Bridge", "Snapshot"]

SIDES = ("solver", "trainer")
TAGS = {"solver": 0, "trainer": 2, "weights": 4}
"""Tags of the fields that each side sends, and of the weights. The control messages of each stream have the next higher
tag."""
DEFAULT_DEPTH = 2


class Snapshot(NamedTuple):
    """Fields that the other side sent together in one call of `send`.

    Attributes
    ----------
    number : number of snapshots sent before this one, including snapshots dropped in mode "latest"
    fields : this rank's part of each field, in the layout of its grid and without ghost cells
    scalars : the values that were sent with the fields
    """

    number: int
    fields: tuple[np.ndarray, ...]
    scalars: dict[str, Any]


class Bridge:
    """Connects ranks that run a solver with ranks that train on its fields. Collective over `comm`.

    Both sides partition the same global field, each with its own grid. A sender rank sends each receiver rank one
    message with the cells that both ranks hold. Both sides have the same methods: one side receives what the other side
    sends. All ranks of a side must make the same calls in the same order. A rank is on one side only; if solver and
    training share ranks, no bridge is needed.

    On the solver ranks::

        with fsdpx.Bridge(comm, solver=grid) as bridge:
            for step in range(steps):
                u = advance(u)
                bridge.send(u, step=step)

    On the training ranks::

        with fsdpx.Bridge(comm, trainer=grid) as bridge:
            for snapshot in bridge:
                trainer.step(*snapshot.fields)

    Parameters
    ----------
    comm : communicator of all ranks of both sides: an mpi4py communicator, which is duplicated, or an fsdpx
        communicator
    solver : on solver ranks, the grid of the solver, whose ghost cells are not sent; None on training ranks
    trainer : on training ranks, the grid of the trainer, which has no ghost cells; None on solver ranks
    mode : what happens if one side is faster. All ranks pass the same mode. "lockstep": `send` returns when the other
        side has received the fields. "queue" (default): `send` waits only while `depth` snapshots are in transit.
        "latest": `send` drops snapshots that the other side is not ready for. On solver ranks, `send` then waits for no
        other rank. When the trainer asks for a snapshot, it receives the first one that all solver ranks can still
        send. On training ranks, `send` is collective. The newest snapshot and the newest weights from the trainer
        always reach the solver, even if the trainer has already closed the bridge
    depth : maximum number of snapshots in transit in mode "queue"; default 2

    Raises
    ------
    ConfigError : on all ranks, if a rank passes no grid or two grids, a side has no ranks, a grid holds an ensemble,
        the fields of both sides differ in shape or in the letters of their layouts, or ranks pass different modes
    """

    def __init__(
        self, comm: Any, *, solver: Grid | None = None, trainer: Grid | None = None,
        mode: Literal["lockstep", "queue", "latest"] = "queue", depth: int | None = None,
    ) -> None:  # fmt: skip
        self._comm: Communicator = open_fault_tolerant_communicator(comm)
        error = _explain_argument_error(solver, trainer, mode, depth)
        side, grid = ("solver", solver) if trainer is None else ("trainer", trainer)
        mine = (error, "", None, "", ()) if error or grid is None else ("", mode, depth, side, _list_part_facts(grid))
        everyone = self._comm.all_gather_value(mine)
        parts = {name: {r: PartFacts(*p) for r, (*_, s, p) in enumerate(everyone) if s == name} for name in SIDES}
        _require_consistent_arguments_of_ranks(everyone, parts)
        assert grid is not None
        self._grid, self._part = grid, parts[side][self._comm.rank]
        self._other = SIDES[side == "solver"]
        self._side = self._comm.subgroup(list(parts[side]))
        self._senders, self._receivers = self._plan_field_streams(side, parts, mode, depth)
        self._open_weight_stream(side, parts, mode, depth)
        self._is_closed = False
        self._end = _register_end_announcement_at_exit(self._comm, self._senders, self._receivers)

    def send(self, *fields: Any, **scalars: Any) -> None:
        """Send this rank's parts of one or more fields to the other side. The arrays are copied.

        Does nothing once the other side has closed the bridge (see `agree_on_whether_other_side_closed`).

        Parameters
        ----------
        fields : arrays in the layout of this rank's grid, with or without ghost cells, and with or without a channels
            dim, of any numeric dtype; all ranks of a side pass the same number of arrays, with the same dtypes and
            numbers of channels
        scalars : values to send with the fields, such as the step number: numbers, strings, or lists and dicts of
            these, the same on all ranks of a side

        Raises
        ------
        DataError : if an array does not have the shape of this rank's part, or a value cannot be sent
        CommTimeout : if the other side does not receive within the time limit (FSDPX_TIMEOUT)
        RankLost : if a rank has died but this rank survives; the bridge can no longer be used
        """
        self._require_open("send")
        arrays = [self._without_ghosts(field, f"Bridge.send: field {i}") for i, field in enumerate(fields)]
        pack_message(scalars, ())  # raises an error for invalid values now, before the snapshot gets a number
        overlaps = self._overlaps_out

        def make_body(rank: int) -> np.ndarray:
            index = [
                self._part.make_slices_for_ranges(overlaps[rank].ranges, a.ndim == len(self._part.layout))
                for a in arrays
            ]
            return pack_message(scalars, [a[where] for a, where in zip(arrays, index, strict=True)])

        self._senders[0].send(make_body)

    def receive(self, wait: bool = True) -> Snapshot | None:
        """Receive fields that the other side has sent. Collective over the ranks of this side if `wait` is False. On
        training ranks, mode "latest" makes every call collective.

        Parameters
        ----------
        wait : whether to wait for a snapshot; if False, return None unless all ranks of this side have a snapshot

        Returns
        -------
        Snapshot or None
            with the attributes `number`, `fields` (this rank's parts, in the layout of its grid and without ghost
            cells) and `scalars` (a dict). None if the other side has closed the bridge, or if `wait` is False and some
            rank of this side has no snapshot yet

        Raises
        ------
        DataError : if ranks of the other side have sent different scalars, numbers of fields, dtypes or numbers of
            channels
        CommTimeout : if nothing arrives within the time limit (FSDPX_TIMEOUT)
        RankLost : if a rank has died but this rank survives; the bridge can no longer be used
        """
        self._require_open("receive")
        received = self._receivers[0].receive(wait)
        if received is None:
            return None
        messages = [(self._overlaps_in[rank], *unpack_message(body)) for rank, body in received.bodies.items()]
        _require_ranks_sent_equal_fields(messages)
        fields = tuple(self._join_pieces(i, messages) for i in range(len(messages[0][2])))
        return Snapshot(received.number, fields, messages[0][1])

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield snapshots until the other side closes the bridge."""
        while (snapshot := self.receive()) is not None:
            yield snapshot

    def send_weights(self, weights: Any) -> None:
        """Send weights to the solver ranks. Call this method on training ranks only. Collective over the training
        ranks.

        Parameters
        ----------
        weights : a trainer, whose `parameters()` are sent, or a dict of arrays, which must be equal on all training
            ranks

        Raises
        ------
        ConfigError : if called on a solver rank, or with anything but a trainer or a dict
        DataError : if weights are not numbers
        """
        self._require_open("send_weights")
        if self._other != "solver":
            raise ConfigError("Bridge.send_weights sends from training ranks to solver ranks: call it there")
        if not isinstance(weights, Mapping) and not hasattr(weights, "parameters"):
            raise ConfigError(f"Bridge.send_weights({weights!r}): give a trainer, or a dict of arrays by name")
        found = weights if isinstance(weights, Mapping) else weights.parameters()
        arrays = {
            name: to_native_byte_order_on_host(array, f"Bridge.send_weights: {name}") for name, array in found.items()
        }
        self._senders[-1].send(lambda rank: pack_message(list(arrays), list(arrays.values())))

    def receive_weights(self, wait: bool = True) -> dict[str, np.ndarray] | None:
        """Receive weights from the training ranks, in the form that a trainer's `load_parameters` takes. Call this
        method on solver ranks only. Collective over the solver ranks if `wait` is False.

        Parameters
        ----------
        wait : whether to wait for weights; if False, return None unless new weights have arrived on all solver ranks

        Returns
        -------
        dict or None
            full arrays by name; None if the trainer has closed the bridge, or if `wait` is False and some solver rank
            has no new weights yet

        Raises
        ------
        ConfigError : if called on a training rank
        """
        self._require_open("receive_weights")
        if self._other != "trainer":
            raise ConfigError("Bridge.receive_weights receives on solver ranks: call it there")
        received = self._receivers[-1].receive(wait)
        if received is None:
            return None
        names, arrays = unpack_message(next(iter(received.bodies.values())))
        return dict(zip(names, arrays, strict=True))

    def agree_on_whether_other_side_closed(self) -> bool:
        """Return whether the other side has closed the bridge. The result is the same on all ranks of this side.
        Collective over this side.

        Returns
        -------
        bool
        """
        self._require_open("agree_on_whether_other_side_closed")
        return bool(self._side.all_gather_value(self._senders[0].has_closed_receiver())[0])

    def close(self) -> None:
        """Close the bridge, and wait until the other side closes it as well. Closing the bridge ends the other side's
        iteration over snapshots. Collective over both sides; later calls do nothing.

        If one side closes the bridge early, anything that the other side sends afterwards is discarded. The end of a
        `with` block closes the bridge, unless an exception is propagating. If this side's script ends without closing
        the bridge, the other side's iteration ends as well."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._end)
        for receiver in self._receivers:
            receiver.start_closing()
        for sender in self._senders:
            sender.start_closing()

        def are_all_closed() -> bool:
            closed = [end.is_closed() for end in self._senders] + [end.is_closed() for end in self._receivers]
            return all(closed)

        wait_until(self._comm, are_all_closed, "the other side to close the bridge")
        self._side.close()
        self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"Bridge({'solver' if self._other == 'trainer' else 'trainer'}={self._grid!r})"

    def _plan_field_streams(
        self, side: str, parts: Mapping[str, Mapping[int, PartFacts]], mode: str, depth: int | None
    ) -> tuple[list[Sender], list[Receiver]]:
        """Determine which cells this rank exchanges with each rank of the other side. Return the senders and receivers
        of the two streams of fields, one stream in each direction."""
        comm, ours, theirs = self._comm, parts[side], parts[self._other]
        place = list(ours).index(comm.rank)
        out = find_overlaps_with_receivers(self._part, place, len(ours), theirs)
        incoming = find_overlaps_with_senders(self._part, place, theirs)
        self._overlaps_out: dict[int, Overlap] = {overlap.rank: overlap for overlap in out}
        self._overlaps_in: dict[int, Overlap] = {overlap.rank: overlap for overlap in incoming}
        on_request = mode == "latest" and side == "solver"
        sender = self._open_sender(TAGS[side], list(self._overlaps_out), mode, depth, on_request)
        asks = mode == "latest" and side == "trainer"
        receiver = Receiver(comm, self._side, TAGS[self._other], list(self._overlaps_in), on_request=asks)
        return [sender], [receiver]

    def _open_weight_stream(
        self, side: str, parts: Mapping[str, Mapping[int, PartFacts]], mode: str, depth: int | None
    ) -> None:
        """Open the stream of weights. Each solver rank receives weights from one training rank."""
        solvers, trainers = list(parts["solver"]), list(parts["trainer"])
        if side == "trainer":
            place = trainers.index(self._comm.rank)
            self._senders.append(
                self._open_sender(TAGS["weights"], solvers[place :: len(trainers)], mode, depth, False)
            )
        else:
            source = trainers[solvers.index(self._comm.rank) % len(trainers)]
            self._receivers.append(Receiver(self._comm, self._side, TAGS["weights"], [source], on_request=False))

    def _open_sender(self, tag: int, receivers: list[int], mode: str, depth: int | None, on_request: bool) -> Sender:
        def agree(is_ready: bool) -> bool:
            return all(self._side.all_gather_value(is_ready))

        limit = 0 if mode == "lockstep" else DEFAULT_DEPTH if depth is None else depth
        asks_own_side = mode == "latest" and not on_request
        return Sender(
            self._comm, tag, receivers, depth=limit, agree=agree if asks_own_side else None, on_request=on_request
        )

    def _without_ghosts(self, field: Any, name: str) -> np.ndarray:
        """Return `field` without its ghost cells; raise DataError if it does not have the shape of this rank's part."""
        array, part = self._grid.without_ghosts(to_native_byte_order_on_host(field, name)), self._part
        has_channels = "c" in part.layout and array.ndim == len(part.layout)
        wanted = part.compute_array_shape(array.shape[part.layout.index("c")] if has_channels else -1)
        if array.shape != wanted:
            raise DataError(
                f"{name} has shape {array.shape}, but this rank's part, in layout {part.layout!r}, has "
                f"{part.local_shape} cells: give the part that the grid describes, without a dim of samples"
            )
        return array

    def _join_pieces(self, i: int, messages: list[tuple[Overlap, Any, list[np.ndarray]]]) -> np.ndarray:
        """Return this rank's part of field `i` in the layout of this rank's grid, assembled from all messages."""
        first, layout = messages[0][2][i], messages[0][0].theirs.layout
        has_channels = first.ndim == len(layout)
        channels = first.shape[layout.index("c")] if has_channels and "c" in layout else -1
        own = self._part.layout if has_channels else self._part.layout.replace("c", "")
        whole = np.empty(self._part.compute_array_shape(channels), first.dtype)
        for overlap, _, pieces in messages:
            letters = overlap.theirs.layout if has_channels else overlap.theirs.layout.replace("c", "")
            where, axes = (
                self._part.make_slices_for_ranges(overlap.ranges, has_channels),
                [letters.index(a) for a in own],
            )
            moved = pieces[i].transpose(axes) if pieces[i].ndim == len(letters) else None
            if moved is None or moved.dtype != whole.dtype or moved.shape != whole[where].shape:
                raise DataError(
                    f"Bridge.receive: rank {messages[0][0].rank} has sent field {i} as {first.dtype} with {channels} "
                    f"channels, and rank {overlap.rank} in another form: send the same fields on all ranks"
                )
            whole[where] = moved
        return whole

    def _require_open(self, name: str) -> None:
        if self._is_closed:
            raise ConfigError(f"Bridge.{name}: this bridge is closed")


def _list_part_facts(grid: Grid) -> tuple[Any, ...]:
    return grid.layout, grid.shape, grid.offsets, grid.local_shape


def _explain_argument_error(solver: Any, trainer: Any, mode: Any, depth: Any) -> str:
    """Return an error message if this rank's arguments are invalid, or "" if they are valid."""
    if (solver is None) == (trainer is None):
        return "pass solver= on solver ranks and trainer= on training ranks, and only one of them on each rank"
    grid = solver if trainer is None else trainer
    if not isinstance(grid, Grid):
        return f"{grid!r} is not a grid: pass an fsdpx.Grid"
    if trainer is not None and any(any(sides) for sides in grid.ghosts):
        return "the training grid has ghost cells, which the bridge does not fill: make it without ghosts="
    if mode not in ("lockstep", "queue", "latest"):
        return f"mode={mode!r}: choose 'lockstep', 'queue' or 'latest'"
    if depth is not None and (mode != "queue" or type(depth) is not int or depth < 1):
        return f"depth={depth!r}, mode={mode!r}: depth is the number of snapshots in a queue, at least 1"
    return ""


def _require_consistent_arguments_of_ranks(everyone: list[Any], parts: Mapping[str, Mapping[int, PartFacts]]) -> None:
    """Raise ConfigError if any rank has invalid arguments, or if the arguments of different ranks contradict each
    other."""
    for rank, (error, mode, depth, *_) in enumerate(everyone):
        if error:
            raise ConfigError(f"Bridge: rank {rank}: {error}")
        if (mode, depth) != everyone[0][1:3]:
            first = f"mode={everyone[0][1]!r} and depth={everyone[0][2]}"
            raise ConfigError(f"Bridge: rank 0 has {first}, and rank {rank} mode={mode!r} and depth={depth}")
    for side, ranks in parts.items():
        if not ranks:
            raise ConfigError(f"Bridge: no rank passes {side}=: split the ranks, some for the solver, some to train")
    for side, ranks in parts.items():
        cells, shape = sum(prod(part.local_shape) for part in ranks.values()), next(iter(ranks.values())).shape
        if cells != prod(shape):
            raise ConfigError(
                f"Bridge: the ranks with {side}= have {cells} cells, and the field {prod(shape)}: all of them pass one "
                "grid, without ensemble members"
            )
    ours, theirs = (next(iter(parts[side].values())) for side in SIDES)
    if ours.shape_by_letter != theirs.shape_by_letter or ("c" in ours.layout) != ("c" in theirs.layout):
        raise ConfigError(
            f"Bridge: the solver's field has {ours.shape} cells in layout {ours.layout!r}, the trainer's {theirs.shape}"
            f" in layout {theirs.layout!r}: give both the same letters and sizes, in any order"
        )


def _require_ranks_sent_equal_fields(messages: list[tuple[Overlap, Any, list[np.ndarray]]]) -> None:
    """Raise DataError if ranks have sent different numbers of fields or different scalars for the same snapshot."""
    first, scalars, fields = messages[0]
    for overlap, others, arrays in messages[1:]:
        if len(arrays) != len(fields) or pack(others) != pack(scalars):
            raise DataError(
                f"Bridge.receive: rank {first.rank} has sent {len(fields)} fields with the scalars {scalars}, and rank "
                f"{overlap.rank} {len(arrays)} with {others}: send the same on all ranks of a side"
            )


def _register_end_announcement_at_exit(comm: Communicator, senders: list[Sender], receivers: list[Receiver]) -> Any:
    """Register an exit handler that tells the other side that this rank's script has ended without closing the bridge,
    and return the handler. If ranks run as threads, the handler is returned but not registered, because a rank that
    waits for a missing call then gets an error anyway."""

    def announce_end() -> None:
        for receiver in receivers:
            receiver.start_closing(is_ending=True)
        for sender in senders:
            sender.send_end()
        # until MPI_Finalize, messages may arrive in the buffers of these objects, so Python must not free them earlier
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((comm, senders, receivers)))

    if not isinstance(comm, LocalCommunicator):
        atexit.register(announce_end)
    return announce_end
