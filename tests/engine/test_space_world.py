"""Fields on a Cartesian communicator of MPI, at whatever number of ranks the tests are run with."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from test_space import MODELS, even, part, random_cuts, trained, wanted

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.comm import Communicator
from fsdpx.testing import demand_close

pytestmark = [pytest.mark.world, pytest.mark.mpi]


@lru_cache
def alone(name: str) -> Any:
    return spawn(lambda comm: trained(comm, name, None, nn.RelativeL2()), 1)[0]


@pytest.mark.parametrize("name", ["windows", "unet", "unet3"])
def test_a_cartesian_communicator_trains_on_its_parts(world: Communicator, name: str) -> None:
    """Even parts, and uneven ones of which some are empty, on the grid that MPI makes of the ranks."""
    MPI = pytest.importorskip("mpi4py.MPI")
    make, shape, _ = MODELS[name]
    losses, parameters, predicted = alone(name)
    dims = MPI.Compute_dims(world.size, len(shape))
    cart = MPI.COMM_WORLD.Create_cart(dims, periods=[True] * len(shape))
    fields = np.random.default_rng(1).standard_normal((3, 2, *shape, 2))
    for cuts in (even(shape, dims), random_cuts(shape, dims)):
        place = cart.Get_coords(cart.rank)
        grid = fsdpx.Grid(cart, [c[p + 1] - c[p] for c, p in zip(cuts, place, strict=True)])
        options: dict[str, Any] = {"loss": nn.RelativeL2(), "optimizer": optim.AdamW(lr=1e-2), "precision": "float64"}
        trainer = make().as_distributed(space=grid, strategy="fsdp", check=True, **options)
        outputs = trainer.inspect.placement.field.outputs
        target = part(wanted(outputs.shape), outputs.cuts, place, 1)
        got = [trainer.step(part(x, cuts, place, 1), target) for x in fields]
        np.testing.assert_allclose(got, losses, rtol=1e-11, err_msg=f"{dims} {cuts}")
        demand_close(trainer.parameters(), parameters, 1e-8)
        mine = trainer.predict(part(fields[0], cuts, place, 1))
        demand_close({"prediction": mine}, {"prediction": part(predicted, outputs.cuts, place, 1)}, 1e-8)
        trainer.close()
    cart.Free()
