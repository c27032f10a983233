"""Solver ranks and training ranks that are coupled by a bridge, and the fields that they exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fsdpx
from fsdpx.core.comm import Communicator

SHAPE = (9, 7)
SOLVER_LAYOUT, TRAINER_LAYOUT = "yxc", "cxy"


def whole_field(number: int, channels: int = 2) -> np.ndarray:
    """Return snapshot `number` of the whole field, in the solver's layout."""
    return np.random.default_rng(number).standard_normal((*SHAPE, channels))


def cut(n: int, parts: int, seed: int) -> list[int]:
    """Return the sizes of uneven parts, some of which may be empty."""
    ends = np.sort(np.random.default_rng(seed).integers(0, n + 1, parts - 1))
    return np.diff([0, *ends, n]).tolist()


def solver_grid(comm: Any, seed: int = 0) -> fsdpx.Grid:
    """Make the solver's grid with ghost cells: rows of the field or, with 4 ranks, parts along both dims."""
    dims = (2, 2) if comm.size == 4 else (comm.size, 1)
    at = np.unravel_index(comm.rank, dims)
    cells = [cut(n, d, seed)[i] for n, d, i in zip(SHAPE, dims, at, strict=True)]
    return fsdpx.Grid(comm, cells, dims=dims, layout=SOLVER_LAYOUT, ghosts=1)


def trainer_grid(comm: Any, seed: int = 1, layout: str = TRAINER_LAYOUT) -> fsdpx.Grid:
    """Make the trainer's grid: columns of the field, with another order of dims."""
    columns = cut(SHAPE[1], comm.size, seed)[comm.rank]
    return fsdpx.Grid(comm, (columns, SHAPE[0]), dims=(comm.size, 1), layout=layout)


def make_side(comm: Communicator, solvers: int, seed: int = 0, **more: Any) -> tuple[fsdpx.Bridge, fsdpx.Grid, Any]:
    """Make the bridge and this rank's grid, with the solver on the first ranks. Return the communicator of the side,
    too."""
    trains = comm.rank >= solvers
    part = comm.split(int(trains))
    grid = trainer_grid(part, seed + 1) if trains else solver_grid(part, seed)
    return fsdpx.Bridge(comm, **{"trainer" if trains else "solver": grid}, **more), grid, part


def couple(
    comm: Communicator, solvers: int, solve: Callable[..., Any], train: Callable[..., Any], seed: int = 0, **more: Any
) -> Any:
    """Run `solve(bridge, grid, part)` on the first ranks and `train(bridge, grid, part)` on the others. `part` is the
    communicator of the side."""
    bridge, grid, part = make_side(comm, solvers, seed, **more)
    with bridge:
        return (train if comm.rank >= solvers else solve)(bridge, grid, part)


def with_ghosts(grid: fsdpx.Grid, whole: np.ndarray) -> np.ndarray:
    """Return this solver rank's part, with NaN in the ghost cells."""
    return np.pad(grid.take_local(whole), ((1, 1), (1, 1), (0, 0)), constant_values=np.nan)


def check_snapshot(grid: fsdpx.Grid, snapshot: Any) -> None:
    """Check that all fields of a snapshot have the number in its scalars."""
    whole = whole_field(snapshot.scalars["step"])
    u, mean = snapshot.fields
    np.testing.assert_array_equal(u, grid.take_local(whole.transpose(2, 1, 0)))
    np.testing.assert_array_equal(mean, grid.take_local(whole.mean(2).T.astype(np.float32)))
    assert mean.dtype == np.float32


def send_step(bridge: fsdpx.Bridge, grid: fsdpx.Grid, step: int) -> None:
    whole = whole_field(step)
    bridge.send(with_ghosts(grid, whole), grid.take_local(whole.mean(2).astype(np.float32)), step=step, name="u")


def run_solver(
    bridge: fsdpx.Bridge, grid: fsdpx.Grid, wait: bool, steps: int, load_weights: Callable[[Any], None]
) -> list[int]:
    """Send fields for so many steps or, without waiting, until the trainer has closed. Check the answers, load all
    weights, and return to which snapshots there were answers."""
    answered, step = [], 0
    while step < steps if wait else not bridge.agree_on_whether_other_side_closed():
        send_step(bridge, grid, step)
        answer, weights = bridge.receive(wait), bridge.receive_weights(wait)
        if answer is not None:
            answered.append(answer.scalars["about"])
            np.testing.assert_array_equal(answer.fields[0], grid.take_local(whole_field(answered[-1]) * 3))
        if weights is not None:
            load_weights(weights)
        step += 1
    while not wait and (weights := bridge.receive_weights()) is not None:
        load_weights(weights)
    return answered


def run_trainer(
    bridge: fsdpx.Bridge, grid: fsdpx.Grid, wait: bool, steps: int, make_weights: Callable[[int], Any]
) -> list[int]:
    """Check and answer all snapshots or, without waiting, so many; send back weights for each. Return
    their numbers."""
    numbers = []
    for snapshot in bridge:
        check_snapshot(grid, snapshot)
        assert snapshot.number == snapshot.scalars["step"]
        numbers.append(snapshot.number)
        bridge.send(snapshot.fields[0] * 3, about=snapshot.number)
        bridge.send_weights(make_weights(snapshot.number))
        if not wait and len(numbers) == steps:
            break
    return numbers
