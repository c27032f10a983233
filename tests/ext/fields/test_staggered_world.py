"""Staggered fields on a Cartesian MPI communicator, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from staggered_flow import NX, NY, trained, trained_on

import fsdpx
from fsdpx import spawn
from fsdpx.core.comm import Communicator
from fsdpx.testing import assert_close

pytestmark = [pytest.mark.world, pytest.mark.mpi, pytest.mark.parametrize("world", ["mpi"], indirect=True)]


@pytest.mark.parametrize("shared", [False, True])
def test_a_flow_on_faces_over_ranks_of_mpi(world: Communicator, shared: bool) -> None:
    MPI = pytest.importorskip("mpi4py.MPI")
    cart = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(world.size, 2), periods=(False, False))
    shape = [len(np.array_split(np.arange(n), d)[c]) for n, d, c in zip((NY, NX), cart.dims, cart.coords, strict=True)]
    grid = fsdpx.Grid(cart, shape, layout="yx")
    assert_close(trained_on(grid, shared), spawn(trained, 1, (1, 1), ((0, NY), (0, NX)))[0], 1e-12)
    cart.Free()
