"""Fields on a Cartesian communicator of MPI, at whatever number of ranks the tests are run with."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grids import bounds, even, numbered, part, place_of, random_cuts
from ranks import from_rank_0
from test_space import MODELS, trained
from trainings import make_trainer

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import ConfigError
from fsdpx.testing import assert_close

# what is tried are communicators of mpi4py, whatever backend counts the ranks
pytestmark = [pytest.mark.world, pytest.mark.mpi, pytest.mark.parametrize("world", ["mpi"], indirect=True)]


LOSS = nn.RelativeL2() + 0.1 * nn.SpectrumRMSE()


@pytest.mark.parametrize("name", ["unet", "unet3", "attention"])
def test_a_cartesian_communicator_trains_on_its_parts(world: Communicator, name: str) -> None:
    """Even parts, or uneven ones of which some are empty, on the grid that MPI makes of the ranks: with one rank more
    the other ones. `test_space.py` tries both on each number of thread ranks."""
    MPI = pytest.importorskip("mpi4py.MPI")
    shape, want = MODELS[name][1], from_rank_0(world, trained, name, LOSS)
    dims = MPI.Compute_dims(world.size, len(shape))
    cart = MPI.COMM_WORLD.Create_cart(dims, periods=[False] * len(shape))
    cuts = (even, random_cuts)[(list(MODELS).index(name) + world.size) % 2](shape, dims)
    cells = [b - a for a, b in bounds(cuts, cart.coords)]
    assert_close(trained(name, LOSS, fsdpx.Grid(cart, cells), strategy="fsdp", check=True), want, 1e-11)
    cart.Free()


def test_all_predictions_but_the_first_wait_for_neighbors_alone(world: Communicator) -> None:
    """The last rank makes its second one when rank 0 has made its own."""
    MPI = pytest.importorskip("mpi4py.MPI")
    if world.size < 3:
        pytest.skip("all ranks are neighbors")
    cart, comm = MPI.COMM_WORLD.Create_cart((world.size, 1)), MPI.COMM_WORLD
    trainer = nn.Conv2d(1, 1, 3, padding=1).as_distributed(domain=fsdpx.Grid(cart, (2, 5)), strategy="ddp")
    u, token = np.ones((2, 5, 1), np.float32), np.zeros(1)
    first = trainer.predict(u)
    if world.rank == world.size - 1:
        comm.Recv(token, 0)
    np.testing.assert_array_equal(trainer.predict(u), first)
    if world.rank == 0:
        comm.Send(token, world.size - 1)
    trainer.close()
    cart.Free()


def test_members_of_an_ensemble_have_communicators_of_their_own(world: Communicator) -> None:
    """As many members as ranks allow, with 1 or 2 ranks each, whose arrays bring ghost cells."""
    MPI = pytest.importorskip("mpi4py.MPI")
    width = 2 if world.size % 2 == 0 else 1
    member, at = divmod(world.rank, width)
    split = MPI.COMM_WORLD.Split(member, at)
    cart = split.Create_cart((width, 1), periods=[False, False])
    grid = fsdpx.Grid(cart, (6 // width, 5), ghosts=(1, 0))
    members = world.size // width
    x, y = (np.random.default_rng(rows).standard_normal((members, rows, 5, 1)) for rows in (8, 6))
    options = {"loss": nn.RelativeL2(), "optimizer": optim.AdamW(lr=1e-2)}
    first = nn.Conv2d(1, 3, 3, padding=1, padding_mode=("zeros", "circular"))
    net = nn.Sequential(first, nn.GELU(), nn.GroupNorm(1, 3), nn.Conv2d(3, 1, 1))
    trainer = make_trainer(net, grid, comm=MPI.COMM_WORLD, check=True, **options)
    sizes = trainer.data_group.size, trainer.domain_group.size, trainer.data_group.rank
    assert sizes == (members, width, member)
    rows = slice(6 // width * at, 6 // width * (at + 1) + 2), slice(6 // width * at, 6 // width * (at + 1))
    losses = [trainer.step(x[member, rows[0]], y[member, rows[1]]) for _ in range(2)]
    whole = fsdpx.Grid(make_single_rank_communicator(), (6, 5), dims=(1, 1), ghosts=(1, 0), periods=(False, True))
    straight = make_trainer(net, whole, **options)
    np.testing.assert_allclose(losses, [straight.step(x, y) for _ in range(2)], rtol=1e-11)
    assert_close(trainer.parameters(), straight.parameters(), 1e-8)
    trainer.close()
    cart.Free()
    split.Free()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_may_be_numbered_in_any_order(world: Communicator, first: int) -> None:
    """x first, and backwards: the same losses as in MPI's own order, on a communicator of another library."""
    MPI = pytest.importorskip("mpi4py.MPI")
    dims = tuple(MPI.Compute_dims(world.size, 2))
    petsc = SimpleNamespace(rank=world.rank, size=world.size, tompi4py=lambda: MPI.COMM_WORLD)
    cuts, u = random_cuts((9, 12), dims), np.random.default_rng(1).standard_normal((9, 12, 2))
    other: Any = np.arange(world.size).reshape(dims).T.ravel() if first == 0 else range(world.size)[::-1]
    found = []
    for order in (range(world.size), other):
        grid = numbered(petsc, dims, cuts, order)
        place = place_of(order[world.rank], dims)
        net = nn.Conv2d(2, 2, 3, padding=1, padding_mode=("reflect", "circular"))
        trainer = make_trainer(net, grid, loss=nn.RelativeL2(), optimizer=optim.AdamW(lr=1e-2))
        mine = part(u, cuts, place, 0)
        found.append([trainer.step(mine, mine) for _ in range(2)])
        np.testing.assert_allclose(grid.all_gather(mine), u)
        if mine.size:
            assert grid.offsets == tuple(a for a, _ in bounds(cuts, place))
        trainer.close()
        grid.close()
    np.testing.assert_allclose(*found, rtol=1e-13)


def test_the_solver_may_free_its_communicator(world: Communicator) -> None:
    """A grid gathers, a trainer that is made later trains, and none of many grids keeps a communicator of MPI."""
    MPI = pytest.importorskip("mpi4py.MPI")
    cart = MPI.COMM_WORLD.Create_cart((world.size, 1), periods=[False, False])
    grid = fsdpx.Grid(cart, (2, 5))
    cart.Free()
    u = np.full((2, 5, 1), world.rank, np.float32)
    assert grid.all_gather(u)[::2, 0, 0].tolist() == list(range(world.size))
    net, options = nn.Conv2d(1, 1, 3, padding=1), {"optimizer": optim.SGD(lr=1e-3), "precision": None}
    trainer = make_trainer(net, grid, **options)
    loss = trainer.step(u, u)
    grid.close()
    grid.close()
    assert trainer.step(u, u) < loss
    assert trainer.predict(u).shape == u.shape
    with pytest.raises(ConfigError, match=r"^Grid\(.*\) is closed: "):
        grid.all_gather(u)
    with pytest.raises(ConfigError, match=r"^Grid\(.*\) is closed: "):
        make_trainer(net, grid, **options)
    trainer.close()
    if world.size != 2:  # a process takes seconds to use up all communicators, and whether it can depends on no number
        return
    comm, others = MPI.COMM_WORLD.Create_cart((1, world.size)), []
    try:
        with contextlib.suppress(MPI.Exception):  # MPICH has 2,048 of them, of which this process holds some
            for _ in range(2048):
                others.append(MPI.COMM_SELF.Dup())
        assert len(others) > 200
        for _ in range(100):
            others.pop().Free()
        for _ in range(200):
            fsdpx.Grid(comm, (2, 5))
    finally:
        for other in (comm, *others):
            other.Free()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (lambda r, n: (0, 3 * (n - 1 - r)), r"rank 0 is at \(0, 0\) of the Cartesian communicator, and at \(0, \d+"),
        (lambda r, n: (2 * r, 0), r"communicator has \(1, \d+\) ranks along y, x, and the parts at offsets= are on \("),
    ],
)
def test_a_cartesian_communicator_that_says_something_else_is_named(
    world: Communicator, offsets: Any, message: str
) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    if world.size == 1:
        pytest.skip("one rank has one place")
    cart = MPI.COMM_WORLD.Create_cart((1, world.size))
    with pytest.raises(ConfigError, match=message):
        fsdpx.Grid(cart, (2, 3), offsets=offsets(world.rank, world.size))
    with pytest.raises(ConfigError, match=r"the Cartesian communicator has \(1, \d+\) ranks$"):
        fsdpx.Grid(cart, (2, 3), dims=(world.size, 1))
    assert fsdpx.Grid(cart, (2, 3), offsets=(0, 3 * world.rank)).offsets == (0, 3 * world.rank)
    cart.Free()
