"""Fields in a file, read by the ranks of a Cartesian communicator of MPI, at whatever number of ranks there are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.data import DataLoader, FieldDataset
from fsdpx.errors import DataError

# what is tried are communicators of mpi4py, whatever backend counts the ranks
pytestmark = [pytest.mark.world, pytest.mark.mpi, pytest.mark.parametrize("world", ["mpi"], indirect=True)]


def trained(dataset: FieldDataset, **more: Any) -> list[float]:
    """Losses of two epochs."""
    net = nn.Conv2d(2, 2, 3, padding=1)
    with net.as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), **more) as trainer:
        return trainer.fit(DataLoader(dataset, 3, comm=trainer.data_group), epochs=2, progress=False).losses


def whole_samples(folder: Path) -> FieldDataset:
    return FieldDataset(folder / "u.npy", dims="tyxc")


def test_ranks_of_mpi_train_on_their_parts_of_a_file(world: Communicator, tmp_path: Path) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    whole = np.random.default_rng(0).standard_normal((9, 12, 10, 2)).astype(np.float32)
    folder = Path(world.all_gather_value(str(tmp_path))[0])
    if world.rank == 0:
        np.save(folder / "u.npy", whole)
    world.barrier()
    cart = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(world.size, 2), periods=(False, False))
    shape = [len(np.array_split(np.arange(n), d)[c]) for n, d, c in zip((12, 10), cart.dims, cart.coords, strict=True)]
    grid = fsdpx.Grid(cart, shape)
    dataset = FieldDataset(folder / "u.npy", grid, dims="tyxc")
    x, y = dataset[3]
    np.testing.assert_array_equal(x, grid.take_local(whole[3]))
    np.testing.assert_array_equal(y, grid.take_local(whole[4]))
    losses = trained(dataset, domain=grid)
    assert losses == pytest.approx(spawn(lambda comm: trained(whole_samples(folder), comm=comm), 1)[0], rel=1e-5)
    with pytest.raises(DataError, match=r"rank 0: FieldDataset: .*other\.npy: No such file"):
        FieldDataset(folder / "other.npy", grid, dims="tyxc")
    cart.Free()
