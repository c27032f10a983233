"""A solver and a training side by side: one job, two communicators; samples go one way, weights come back.

mpiexec -n 4 python -m fsdpx.examples.solver --trainers 2

The solver moves the velocity of a fluid by Burgers' equation in two dimensions, in many small steps. The other ranks
learn from what it meets how a cell changes in a large one. They steer it: when their loss is low enough they tell the
solver to take large steps by the network, and small ones only to check it and to give them samples."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.errors import ConfigError
from fsdpx.examples.mistakes import status_of

SIDE = 32  # cells of the grid in each direction
HALO = 2  # cells around one that the network sees
SAMPLES = 96  # of each solver rank and round
SMALL, STEP, VISCOSITY = 4, 0.0025, 0.02  # small steps in a large one, seconds of one, of the fluid
LARGE = 5  # large steps of a round
SCALE = 20.0  # times the change in a large step: what the network gives
GOOD = 3e-4  # the loss below which the solver may use the network
SEEN = 2 * (2 * HALO + 1) ** 2
Array = np.ndarray


def network() -> nn.Layer:
    return nn.Chain(nn.Linear(SEEN, 48), nn.Tanh(), nn.Linear(48, 2))


class PutWindow:
    """A window of each rank that others put arrays into, between two fences. Collective over `world`, mpi4py's."""

    def __init__(self, world: Any, elements: int) -> None:
        from mpi4py import MPI

        self._world, self._type = world, MPI.FLOAT
        self._window = MPI.Win.Allocate(4 * elements, 4, comm=world)
        self.inbox = np.frombuffer(cast("Any", self._window.tomemory()), np.float32)  # no copy: others write here

    def round(self, letters: Sequence[tuple[int, int, Array]]) -> None:
        """Put each (rank, place, float32 array). Afterwards what others put lies in `inbox`, until the next round."""
        everyone = self._world.Ibarrier()  # a fence waits at full speed, on a core that others may need to get here
        while not everyone.Test():
            time.sleep(0.001)
        self._window.Fence()  # all have read what came last time
        for rank, at, array in letters:
            self._window.Put(array, rank, (at, array.size, self._type))
        self._window.Fence()  # all has arrived

    def close(self) -> None:
        del self.inbox
        self._window.Free()


class Solver:
    """Explicit steps on a periodic grid; each rank has some of its rows. comm: of the ranks that solve, mpi4py's."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self._largest = comm, MPI.MAX
        rows = np.array_split(np.arange(SIDE), comm.size)[comm.rank]
        y, x = np.meshgrid(2 * np.pi * rows / SIDE, 2 * np.pi * np.arange(SIDE) / SIDE, indexing="ij")
        self.velocity = np.stack([0.4 + 0.5 * np.sin(x + y), 0.5 * np.cos(x - 2 * y)])  # (2, rows, SIDE)
        self.exact = self.velocity.copy()  # always in small steps, to compare
        self.small = 0  # how many small steps the field has cost
        self.net = network().as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=MPI.COMM_SELF)
        self._random = np.random.default_rng(comm.rank)

    def advance(self, learned: bool) -> Array:
        """The large steps of a round; (what cells saw, how they changed) of some, (SAMPLES, SEEN + 2) float32."""
        for k in range(LARGE):
            before = self.velocity
            if learned and k > 0:
                change = np.asarray(self.net.predict(self._around(before))).T.reshape(before.shape) / SCALE
                self.velocity = before + change
            else:
                self.velocity, self.small = self._large(before), self.small + SMALL
            if k == 0:
                seen, changed = self._around(before), SCALE * (self.velocity - before).reshape(2, -1).T
            self.exact = self._large(self.exact)
        cells = self._random.choice(len(seen), SAMPLES)
        return np.concatenate([seen[cells], changed[cells]], axis=1).astype(np.float32)

    def take(self, weights: Array) -> None:
        """Use the network with these weights, as `flat` put them."""
        values, at = {}, 0
        for name, array in self.net.parameters().items():
            values[name] = weights[at : at + array.size].reshape(array.shape)
            at += array.size
        self.net.load_weights(values)

    def apart(self) -> float:
        """The largest difference from the exact field, on every rank that solves."""
        return float(self.comm.allreduce(np.abs(self.velocity - self.exact).max(), self._largest))

    def _large(self, field: Array) -> Array:
        """SMALL steps of du/dt = viscosity laplace(u) - (u . grad) u, by central differences."""
        for _ in range(SMALL):
            wide = self._wide(field, 1)
            above, below, left, right = wide[:, :-2], wide[:, 2:], np.roll(field, 1, 2), np.roll(field, -1, 2)
            carried = field[0] * (right - left) * (SIDE / 2) + field[1] * (below - above) * (SIDE / 2)
            spread = (above + below + left + right - 4 * field) * SIDE**2
            field = field + STEP * (VISCOSITY * spread - carried)
        return field

    def _around(self, field: Array) -> Array:
        """What each cell sees, (cells, SEEN)."""
        wide = np.pad(self._wide(field, HALO), ((0, 0), (0, 0), (HALO, HALO)), mode="wrap")
        seen = np.lib.stride_tricks.sliding_window_view(wide, (2 * HALO + 1, 2 * HALO + 1), (1, 2))
        return seen.transpose(1, 2, 0, 3, 4).reshape(-1, SEEN).astype(np.float32)

    def _wide(self, field: Array, rows: int) -> Array:
        """The field with rows of the neighbours around it, which come by messages as in any solver."""
        before, after = (self.comm.rank - 1) % self.comm.size, (self.comm.rank + 1) % self.comm.size
        above, below = np.empty((2, rows, SIDE)), np.empty((2, rows, SIDE))
        self.comm.Sendrecv(field[:, -rows:].copy(), after, recvbuf=above, source=before)
        self.comm.Sendrecv(field[:, :rows].copy(), before, recvbuf=below, source=after)
        return np.concatenate([above, field, below], axis=1)


def flat(values: dict[str, Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in values.values()])


def solve(comm: Any, world: Any, exchange: PutWindow, rounds: int) -> tuple[float, float]:
    """What the ranks that solve do: how far the field is from the exact one, and the share of small steps it cost."""
    solver, trainers = Solver(comm), range(comm.size, world.size)
    learned = False
    for _ in range(rounds):
        parts = np.array_split(solver.advance(learned), len(trainers))
        exchange.round([(rank, comm.rank * part.size, part) for rank, part in zip(trainers, parts, strict=True)])
        solver.take(exchange.inbox[:-1])
        learned = exchange.inbox[-1] < GOOD  # the trainers steer: all solvers got the same number
    return solver.apart(), solver.small / (rounds * LARGE * SMALL)


def learn(comm: Any, world: Any, exchange: PutWindow, rounds: int, strategy: str) -> float:
    """What the ranks that train do; returns the last loss."""
    trainer = network().as_distributed(
        loss=nn.MSE(), optimizer=optim.AdamW(lr=3e-3, weight_decay=0.0), strategy=strategy, comm=comm
    )
    solvers, loss, known = world.size - comm.size, np.inf, np.empty((0, SEEN + 2), np.float32)
    for _ in range(rounds):
        letter = np.append(flat(trainer.parameters()), np.float32(loss))  # whole, on every rank that trains
        exchange.round([(rank, 0, letter) for rank in range(solvers) if rank % comm.size == comm.rank])
        known = np.concatenate([known, exchange.inbox.reshape(-1, SEEN + 2)])[-8 * SAMPLES * solvers :]
        for _ in range(60):
            loss = trainer.step(known[:, :SEEN], known[:, SEEN:])
    trainer.close()
    return float(loss)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m fsdpx.examples.solver", description=__doc__.splitlines()[0])
    p.add_argument("--trainers", type=int, default=1, help="how many of the ranks train")
    p.add_argument("--rounds", type=int, default=24, help="exchanges of samples and weights")
    p.add_argument("--strategy", default="fsdp")
    args = p.parse_args(argv)
    everyone = fsdpx.init()  # on all ranks: an error on one of them, solver or trainer, ends the job
    if not 1 <= args.trainers < everyone.size:
        raise ConfigError(
            f"--trainers {args.trainers} of {everyone.size} ranks: start 2 ranks or more, by mpiexec -n 2"
        )
    from mpi4py import MPI

    world, solvers = MPI.COMM_WORLD, everyone.size - args.trainers
    trains = everyone.rank >= solvers
    part = world.Split(int(trains))
    rows = len(np.array_split(np.empty(SAMPLES), args.trainers)[part.rank]) if trains else 0
    size = sum(spec.size for spec in network().specs().values()) + 1
    exchange = PutWindow(world, (SEEN + 2) * rows * solvers if trains else size)
    found = (
        learn(part, world, exchange, args.rounds, args.strategy)
        if trains
        else solve(part, world, exchange, args.rounds)
    )
    loss, (apart, share) = world.bcast(found, solvers), world.bcast(found, 0)
    exchange.close()
    if everyone.rank == 0:
        print(
            f"{solvers} ranks solve, {args.trainers} train: loss {loss:.1e}, {share:.0%} of the small steps, "
            f"largest difference {apart:.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
