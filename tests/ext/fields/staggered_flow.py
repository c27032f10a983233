"""A flow on the faces of a grid: a model, and functions that train it."""

from __future__ import annotations

from typing import Any

import numpy as np
from grids import grid_at
from trainings import make_trainer

from fsdpx import nn
from fsdpx.core.comm import Communicator

NY, NX = 7, 9
rng = np.random.default_rng(0)
U, V, P = (rng.standard_normal(shape) for shape in ((NY, NX + 1), (NY + 1, NX), (NY, NX)))
U_NEXT, V_NEXT = rng.standard_normal(U.shape), rng.standard_normal(V.shape)
BOUNDS = np.cumsum([0.0, *rng.uniform(0.5, 1.5, NX)])


def flow_model() -> nn.Layer:
    """Make a model that maps velocities on faces and a pressure on cells to new velocities on faces. A convolution
    reads faces as well."""
    nodes = {
        "near": (nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate"), "u"),
        "uc": (nn.FacesToCells(1), "near"),
        "vc": (nn.FacesToCells(0), "v"),
        "div": (nn.FaceDivergence(2, (1.0, BOUNDS), along=(1, 0)), "u", "v"),
        "all": (nn.Concat(1), "uc", "vc", "p", "div"),
        "net": (nn.Conv2d(4, 3, 3, padding=1), "all"),
        "mid": (nn.Tanh(), "net"),
        "down": (nn.MaxPool2d(2, ceil_mode=True), "mid"),
        "up": (nn.Upsample(size=(NY, NX)), "down"),
        "out": (nn.Conv2d(3, 1, 1), "up"),
        "du": (nn.CellsToFaces(1, 1, BOUNDS), "out"),
        "dv": (nn.CellsToFaces(0, padding_mode=(0.5, "zeros")), "out"),
    }
    return nn.Graph(nodes, inputs=("u", "v", "p"), outputs=("du", "dv"))


LOSS = nn.MultiOutputLoss(nn.MSELoss(), nn.RelativeL2())


def trained(comm: Communicator, dims: tuple[int, int], cuts: Any, shared: bool = False) -> Any:
    """Return the losses of two steps, the parameters, and the gathered velocities of the next step."""
    return trained_on(grid_at(comm, dims, cuts, layout="yx"), shared)


def trained_on(grid: Any, shared: bool) -> Any:
    """As `trained`, on a grid of cells."""
    on_x, on_y = grid.faces("x", shared), grid.faces("y", shared)
    trainer = make_trainer(flow_model(), grid.with_inputs(on_x, on_y, grid), loss=LOSS)
    if shared:
        (y, x), (ny, nx) = grid.offsets, grid.local_shape
        given = U[y : y + ny, x : x + nx + 1], V[y : y + ny + 1, x : x + nx]
        target = U_NEXT[y : y + ny, x : x + nx + 1], V_NEXT[y : y + ny + 1, x : x + nx]
    else:
        given = on_x.take_local(U), on_y.take_local(V)
        target = on_x.take_local(U_NEXT), on_y.take_local(V_NEXT)
    inputs = *given, grid.take_local(P)
    losses = [trainer.step(inputs, target) for _ in range(2)]
    outputs = trainer.output_grid
    found = [out.all_gather(mine) for out, mine in zip(outputs, trainer.predict(inputs), strict=True)]
    assert [out.local_shape for out in outputs] == [on_x.local_shape, on_y.local_shape]
    assert [out.offsets for out in outputs] == [on_x.offsets, on_y.offsets]
    return losses, trainer.parameters(), found
