"""Solver ranks and training ranks that are coupled by a bridge, and the fields that they exchange."""

import numpy as np

import fsdpx

MODES = ("lockstep", "queue", "latest")
SHAPE = (9, 7)
SOLVER_LAYOUT, TRAINER_LAYOUT = "yxc", "cxy"


def whole_field(number, channels=2):
    """Return snapshot `number` of the whole field, in the solver's layout."""
    return np.random.default_rng(number).standard_normal((*SHAPE, channels))


def cut(n, parts, seed):
    """Return the sizes of uneven parts, some of which may be empty."""
    ends = np.sort(np.random.default_rng(seed).integers(0, n + 1, parts - 1))
    return np.diff([0, *ends, n]).tolist()


def solver_grid(comm, seed=0):
    """Make the solver's grid with ghost cells: rows of the field or, with 4 ranks, parts along both dims."""
    dims = (2, 2) if comm.size == 4 else (comm.size, 1)
    at = np.unravel_index(comm.rank, dims)
    cells = [cut(n, d, seed)[i] for n, d, i in zip(SHAPE, dims, at, strict=True)]
    return fsdpx.Grid(comm, cells, dims=dims, layout=SOLVER_LAYOUT, ghosts=1)


def trainer_grid(comm, seed=1, layout=TRAINER_LAYOUT):
    """Make the trainer's grid: columns of the field, with another order of dims."""
    columns = cut(SHAPE[1], comm.size, seed)[comm.rank]
    return fsdpx.Grid(comm, (columns, SHAPE[0]), dims=(comm.size, 1), layout=layout)


def make_side(comm, solvers, seed=0, **more):
    """Make the bridge and this rank's grid, with the solver on the first ranks. Return the communicator of the side,
    too."""
    trains = comm.rank >= solvers
    part = comm.split(int(trains))
    grid = trainer_grid(part, seed + 1) if trains else solver_grid(part, seed)
    return fsdpx.Bridge(comm, **{"trainer" if trains else "solver": grid}, **more), grid, part


def couple(comm, solvers, solve, train, seed=0, **more):
    """Run `solve(bridge, grid, part)` on the first ranks and `train(bridge, grid, part)` on the others. `part` is the
    communicator of the side."""
    bridge, grid, part = make_side(comm, solvers, seed, **more)
    with bridge:
        return (train if comm.rank >= solvers else solve)(bridge, grid, part)


def with_ghosts(grid, whole):
    """Return this solver rank's part, with NaN in the ghost cells."""
    return np.pad(grid.take_local(whole), ((1, 1), (1, 1), (0, 0)), constant_values=np.nan)


def check_snapshot(grid, snapshot):
    """Check that all fields of a snapshot have the number in its scalars."""
    whole = whole_field(snapshot.scalars["step"])
    u, mean = snapshot.fields
    np.testing.assert_array_equal(u, grid.take_local(whole.transpose(2, 1, 0)))
    np.testing.assert_array_equal(mean, grid.take_local(whole.mean(2).T.astype(np.float32)))
    assert mean.dtype == np.float32


def send_step(bridge, grid, step):
    whole = whole_field(step)
    bridge.send(with_ghosts(grid, whole), grid.take_local(whole.mean(2).astype(np.float32)), step=step, name="u")


def run_solver(bridge, grid, wait, steps, load_weights):
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


def run_trainer(bridge, grid, wait, steps, make_weights):
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
