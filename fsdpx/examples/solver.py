"""A solver and a trainer that run concurrently, on different ranks and with different partitions of the field.

mpiexec -n 4 python -m fsdpx.examples.solver --trainers 2

The solver advances the velocity of a fluid by Burgers' equation in two dimensions, in many small steps; each solver
rank holds rows of the field. The training ranks hold columns. They receive snapshots, learn from them how the field
changes in a large step, and send weights back. They also steer the solver: when their loss is low enough, the solver
takes large steps with the network, and small steps only to check the network and to produce snapshots."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.base.option_names import Strategy
from fsdpx.errors import ConfigError
from fsdpx.examples._cli import run_main

SIDE = 32  # number of cells along each dim of the field
# number of small steps per large step, length of a small step in time, viscosity
SMALL, STEP, VISCOSITY = 4, 0.0025, 0.02
LARGE = 5  # number of large steps per round
SCALE = 20.0  # the network's output is the change in a large step times this factor
GOOD = 3e-4  # the solver may use the network if its loss is below this value
# number of snapshots kept, snapshots per training step, and training steps per round
KNOWN, DRAWN, STEPS = 8, 2, 40
Array = np.ndarray
Part = tuple[tuple[int, int], ...]  # range (start, stop) of a rank's cells along each dim


def make_network() -> nn.Layer:
    """Build the network that maps the field to its change in one large step. Each output cell depends on 5 x 5 cells
    of the periodic field."""
    return nn.Sequential(nn.Conv2d(2, 48, 5, padding=2, padding_mode="circular"), nn.Tanh(), nn.Conv2d(48, 2, 1))


class PutWindow:
    """One-sided communication: an MPI window into which other ranks put arrays between
    two fences.

    Collective over `world`, an mpi4py communicator."""

    def __init__(self, world: Any, elements: int) -> None:
        from mpi4py import MPI

        self._world = world
        self._window = MPI.Win.Allocate(4 * elements, 4, comm=world)
        memory = cast("Any", self._window.tomemory())
        self.inbox = np.frombuffer(memory, np.float32)  # a view of the window's memory, into which other ranks write

    def put_and_fence(self, messages: Iterable[tuple[int, Any, Array]]) -> None:
        """Put arrays into the windows of other ranks, given as (rank, MPI datatype of
        the target elements, float32 array). Collective.

        Afterwards, `inbox` holds the data received from other ranks, until the next
        call."""
        everyone = self._world.Ibarrier()  # nonblocking, because waiting in a fence would keep a core busy
        while not everyone.Test():
            time.sleep(0.001)
        self._window.Fence()  # after this fence, all ranks have read the previous data
        for rank, where, array in messages:
            self._window.Put(array, rank, (0, 1, where))
        self._window.Fence()  # after this fence, all data have arrived

    def close(self) -> None:
        """Free the MPI window. Collective."""
        del self.inbox
        self._window.Free()


class SnapshotExchange:
    """Sends a field from solver ranks, which hold rows, to ranks with a different
    partition. Finds which cells each rank needs, and where they are in its part.

    Parameters
    ----------
    mine : this rank's part
    theirs : the parts of the ranks that receive snapshots, by rank
    channels : number of channels of a snapshot
    """

    def __init__(self, mine: Part, theirs: dict[int, Part], channels: int) -> None:
        from mpi4py import MPI

        self._pieces = []
        for rank, part in theirs.items():
            dims = list(zip(mine, part, strict=True))
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in dims]
            if all(start < stop for start, stop in both):
                at = list(zip(both, dims, strict=True))
                here = tuple(slice(i - a, j - a) for (i, j), ((a, _), _) in at)
                whole = [channels, *(stop - start for start, stop in part)]
                sizes = [channels, *(stop - start for start, stop in both)]
                begin = [0, *(i - c for (i, _), (_, (c, _)) in at)]
                where = MPI.FLOAT.Create_subarray(whole, sizes, begin).Commit()
                self._pieces.append((rank, where, here))

    def make_messages(self, field: Array) -> list[tuple[int, Any, Array]]:
        """Return the messages for `PutWindow.put_and_fence`: for each receiving rank,
        the cells of this rank's field that it needs."""
        cells = field.astype(np.float32)
        return [(r, at, cells[:, *here].copy()) for r, at, here in self._pieces]


class Solver:
    """Solves Burgers' equation on a periodic field by explicit steps. Each rank of `comm`, an mpi4py communicator,
    holds some rows of the field."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self._largest = comm, MPI.MAX
        rows = np.array_split(np.arange(SIDE), comm.size)[comm.rank]
        y, x = np.meshgrid(2 * np.pi * rows / SIDE, 2 * np.pi * np.arange(SIDE) / SIDE, indexing="ij")
        # shape (2, rows, SIDE): velocity along x and y
        self.velocity = np.stack([0.4 + 0.5 * np.sin(x + y), 0.5 * np.cos(x - 2 * y)])
        self.exact = self.velocity.copy()  # the reference solution, always advanced in small steps
        self.small = 0  # number of small steps taken so far
        self.grid = fsdpx.Grid(comm, (len(rows), SIDE), dims=(comm.size, 1), layout="cyx")
        self.net = make_network().as_distributed(domain=self.grid)

    def advance_round(self, learned: bool) -> Array:
        """Advance the field by the large steps of one round. Return a snapshot of the first large step, (4, rows,
        SIDE): the field before the step, followed by the scaled change of the field."""
        for k in range(LARGE):
            before = self.velocity
            if learned and k > 0:
                self.velocity = before + np.asarray(self.net.predict(before)) / SCALE
            else:
                self.velocity, self.small = self._take_large_step(before), self.small + SMALL
            if k == 0:
                snapshot = np.concatenate([before, SCALE * (self.velocity - before)])
            self.exact = self._take_large_step(self.exact)
        return snapshot

    def load_weights(self, weights: Array) -> None:
        """Load the network's weights from one flat array, in the order of `flatten_values`."""
        values, at = {}, 0
        for name, array in self.net.parameters().items():
            values[name] = weights[at : at + array.size].reshape(array.shape)
            at += array.size
        self.net.load_parameters(values)

    def all_reduce_error(self) -> float:
        """Return the largest difference from the reference field over all solver ranks. Collective over `comm`."""
        return float(self.comm.allreduce(np.abs(self.velocity - self.exact).max(), self._largest))

    def _take_large_step(self, field: Array) -> Array:
        """Return the field after one large step, which is SMALL explicit steps of du/dt = viscosity laplace(u) - (u .
        grad) u with central differences."""
        for _ in range(SMALL):
            wide = self._add_halo_rows(field)
            above, below, left, right = wide[:, :-2], wide[:, 2:], np.roll(field, 1, 2), np.roll(field, -1, 2)
            carried = field[0] * (right - left) * (SIDE / 2) + field[1] * (below - above) * (SIDE / 2)
            spread = (above + below + left + right - 4 * field) * SIDE**2
            field = field + STEP * (VISCOSITY * spread - carried)
        return field

    def _add_halo_rows(self, field: Array) -> Array:
        """Return this rank's rows with one halo row above and one below, received from the neighboring ranks.
        Collective over `comm`."""
        before, after = (self.comm.rank - 1) % self.comm.size, (self.comm.rank + 1) % self.comm.size
        above, below = np.empty((2, 1, SIDE)), np.empty((2, 1, SIDE))
        self.comm.Sendrecv(field[:, -1:].copy(), after, recvbuf=above, source=before)
        self.comm.Sendrecv(field[:, :1].copy(), before, recvbuf=below, source=after)
        return np.concatenate([above, field, below], axis=1)


def flatten_values(values: dict[str, Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in values.values()])


def run_solver(comm: Any, world: Any, rounds: int) -> tuple[float, float]:
    """Run the solver. Return the largest difference from the reference field, and the
    fraction of small steps that the solver actually took."""
    solver, learned = Solver(comm), False
    weights = sum(spec.size for spec in make_network().specs().values())
    exchange = PutWindow(world, weights + 1)
    parts = world.allgather(get_part(solver.grid))
    trainers = dict(enumerate(parts[comm.size :], comm.size))
    snapshots = SnapshotExchange(parts[world.rank], trainers, 4)
    for _ in range(rounds):
        exchange.put_and_fence(snapshots.make_messages(solver.advance_round(learned)))
        solver.load_weights(exchange.inbox[:-1])
        learned = exchange.inbox[-1] < GOOD  # equal on all solver ranks, because they received the same loss
    exchange.close()
    return solver.all_reduce_error(), solver.small / (rounds * LARGE * SMALL)


def run_training(comm: Any, world: Any, rounds: int, strategy: Strategy) -> float:
    """Train on snapshots, and send weights to the solver each round. Return the last
    loss."""
    from mpi4py import MPI

    columns = len(np.array_split(np.arange(SIDE), comm.size)[comm.rank])
    grid = fsdpx.Grid(comm, (SIDE, columns), dims=(1, comm.size), layout="cyx")
    adam = optim.AdamW(lr=3e-3, weight_decay=0.0)
    trainer = make_network().as_distributed(loss=nn.MSELoss(), optimizer=adam, strategy=strategy, domain=grid)
    exchange = PutWindow(world, 4 * SIDE * columns)
    world.allgather(get_part(grid))
    draw = np.random.default_rng(0)  # all ranks use the same seed, so that they draw the same snapshots
    known, loss = list[Array](), np.inf
    for _ in range(rounds):
        weights = flatten_values(trainer.parameters())  # `parameters` returns full arrays on every training rank
        letter = np.append(weights, np.float32(loss))
        where = MPI.FLOAT.Create_contiguous(letter.size).Commit()
        # solver ranks to which this rank sends the weights
        mine = range(comm.rank, world.size - comm.size, comm.size)
        exchange.put_and_fence((rank, where, letter) for rank in mine)
        known = [*known, exchange.inbox.reshape(4, SIDE, columns).copy()][-KNOWN:]
        for _ in range(STEPS):
            batch = np.stack([known[k] for k in draw.integers(len(known), size=DRAWN)])
            loss = trainer.step(batch[:, :2], batch[:, 2:])
    exchange.close()
    trainer.close()
    return float(loss)


def get_part(grid: fsdpx.Grid) -> Part:
    return tuple((cuts[at], cuts[at + 1]) for cuts, at in zip(grid.parts.cuts, grid.coords, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.solver", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--trainers", type=int, default=1, help="how many of the ranks train")
    p.add_argument("--rounds", type=int, default=24, help="exchanges of snapshots and weights")
    p.add_argument("--strategy", default="fsdp")
    args = p.parse_args(argv)
    everyone = fsdpx.init()  # connects all ranks, so that an error on one of them ends the job
    if not 1 <= args.trainers < everyone.size:
        raise ConfigError(
            f"--trainers {args.trainers} of {everyone.size} ranks: start 2 ranks or more, by mpiexec -n 2"
        )
    from mpi4py import MPI

    world, solvers = MPI.COMM_WORLD, everyone.size - args.trainers
    trains = everyone.rank >= solvers
    part = world.Split(int(trains))
    found = run_training(part, world, args.rounds, args.strategy) if trains else run_solver(part, world, args.rounds)
    loss, (apart, share) = world.bcast(found, solvers), world.bcast(found, 0)
    if everyone.rank == 0:
        print(
            f"{solvers} ranks solve, {args.trainers} train: loss {loss:.1e}, {share:.0%} of the small steps, "
            f"largest difference {apart:.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
