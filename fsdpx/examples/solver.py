"""A solver and a training side by side: one job, two communicators; samples go one way, weights come back.

mpiexec -n 4 python -m fsdpx.examples.solver --trainers 2

The solver moves a field u by diffusion and a reaction that is costly to evaluate. The other ranks learn the reaction
from what the solver meets, and after a few rounds the solver takes the network instead: the costly term is evaluated
for samples only."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

import fsdpx
from fsdpx import nn, optim
from fsdpx.errors import ConfigError
from fsdpx.examples.mistakes import status_of

CELLS = 60  # of each solver rank
SAMPLES = 12  # of each solver rank and round
DIFFUSION, STEP = 0.2, 0.02
Array = np.ndarray


def reaction(u: Array) -> Array:
    """The costly term, (cells,) to the same; here a stand-in for chemistry or for scales below the grid."""
    return 2 * (1 - u) * np.exp(-0.3 / (u + 0.2))


def network() -> nn.Layer:
    return nn.Chain(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))


class Exchange:
    """A window of each rank that others put arrays into, between two fences. Collective over `world`, mpi4py's."""

    def __init__(self, world: Any, elements: int) -> None:
        from mpi4py import MPI

        self._type = MPI.FLOAT
        self._window = MPI.Win.Allocate(4 * elements, 4, comm=world)
        self.inbox = np.frombuffer(cast("Any", self._window.tomemory()), np.float32)  # no copy: others write here

    def round(self, letters: Sequence[tuple[int, int, Array]]) -> None:
        """Put each (rank, place, float32 array). Afterwards what others put lies in `inbox`, until the next round."""
        self._window.Fence()  # all have read what came last time
        for rank, at, array in letters:
            self._window.Put(array, rank, (at, array.size, self._type))
        self._window.Fence()  # all has arrived

    def close(self) -> None:
        del self.inbox
        self._window.Free()


class Solver:
    """Explicit steps on a ring of cells. comm: the communicator of the ranks that solve, mpi4py's."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self._largest = comm, MPI.MAX
        place = (np.arange(CELLS) + CELLS * comm.rank) / (CELLS * comm.size)
        self.u = 0.5 + 0.5 * np.sin(2 * np.pi * place)
        self.exact = self.u.copy()  # always with the costly term, to compare
        self.net = network().as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=MPI.COMM_SELF)
        self._random = np.random.default_rng(comm.rank)

    def advance(self, steps: int, learned: bool) -> None:
        for _ in range(steps):
            source = self.net.predict(self.u[:, None])[:, 0] if learned else reaction(self.u)
            self.u = self.u + STEP * (self._diffusion(self.u) + source)
            self.exact = self.exact + STEP * (self._diffusion(self.exact) + reaction(self.exact))

    def samples(self) -> Array:
        """(u, reaction) near some of the cells, (SAMPLES, 2) float32."""
        u = self._random.choice(self.u, SAMPLES) + self._random.normal(0, 0.1, SAMPLES)
        return np.stack([u, reaction(u)], axis=1).astype(np.float32)

    def take(self, weights: Array) -> None:
        """Use the network with these weights, as `flat` put them."""
        values, at = {}, 0
        for name, array in self.net.parameters().items():
            values[name] = weights[at : at + array.size].reshape(array.shape)
            at += array.size
        self.net.load_weights(values)

    def apart(self) -> float:
        """The largest difference from the exact field, on every rank that solves."""
        return float(self.comm.allreduce(np.abs(self.u - self.exact).max(), self._largest))

    def _diffusion(self, u: Array) -> Array:
        """The neighbours' cells come by messages, as in any solver."""
        left, right = (self.comm.rank - 1) % self.comm.size, (self.comm.rank + 1) % self.comm.size
        before, after = np.empty(1), np.empty(1)
        self.comm.Sendrecv(u[-1:].copy(), right, recvbuf=before, source=left)
        self.comm.Sendrecv(u[:1].copy(), left, recvbuf=after, source=right)
        wide = np.concatenate([before, u, after])
        return DIFFUSION * (wide[:-2] - 2 * u + wide[2:])


def flat(values: dict[str, Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in values.values()])


def solve(comm: Any, world: Any, exchange: Exchange, rounds: int) -> float:
    """What the ranks that solve do; returns how far the field is from the exact one."""
    solver, trainers = Solver(comm), range(comm.size, world.size)
    for k in range(rounds):
        solver.advance(5, learned=k >= rounds // 2)
        parts = np.array_split(solver.samples(), len(trainers))
        exchange.round([(rank, comm.rank * part.size, part) for rank, part in zip(trainers, parts, strict=True)])
        solver.take(exchange.inbox)
    return solver.apart()


def learn(comm: Any, world: Any, exchange: Exchange, rounds: int, strategy: str) -> float:
    """What the ranks that train do; returns the last loss."""
    trainer = network().as_distributed(
        loss=nn.MSE(), optimizer=optim.AdamW(lr=1e-2, weight_decay=0.0), strategy=strategy, comm=comm
    )
    solvers, loss = world.size - comm.size, 0.0
    for _ in range(rounds):
        weights = flat(trainer.parameters())  # whole, on every rank that trains
        exchange.round([(rank, 0, weights) for rank in range(solvers) if rank % comm.size == comm.rank])
        pairs = exchange.inbox.reshape(-1, 2)  # the window itself: nothing is copied
        for _ in range(40):
            loss = trainer.step(pairs[:, :1], pairs[:, 1:])
    trainer.close()
    return loss


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m fsdpx.examples.solver", description=__doc__.splitlines()[0])
    p.add_argument("--trainers", type=int, default=1, help="how many of the ranks train")
    p.add_argument("--rounds", type=int, default=20, help="exchanges of samples and weights")
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
    size = sum(spec.size for spec in network().specs().values())
    exchange = Exchange(world, 2 * rows * solvers if trains else size)
    found = (
        learn(part, world, exchange, args.rounds, args.strategy)
        if trains
        else solve(part, world, exchange, args.rounds)
    )
    loss, apart = world.bcast(found, solvers), world.bcast(found, 0)
    exchange.close()
    if everyone.rank == 0:
        print(f"{solvers} ranks solve, {args.trainers} train: loss {loss:.1e}, largest difference {apart:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
