"""The pictures of the tutorial on a solver and its surrogate, by Matplotlib (`pip install 'fsdpx[plot]'`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fsdpx

Array = np.ndarray
HALO = 2  # cells around a part that are drawn: what two convolutions of 3 x 3 reach


def draw(folder: Path, grid: fsdpx.Grid, ends: Sequence[Array], errors: Sequence[float]) -> None:
    """Write surrogate-field.png, surrogate-parts.png and surrogate-error.png.

    Parameters
    ----------
    folder : there or not
    grid : how the field is cut, of 2 dims, of which the second is periodic
    ends : the last states of the solver and of the network, whole, (rows, columns, 3)
    errors : of the network's state after each step, relative to the waves
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"origin": "lower", "cmap": "RdBu_r", "vmin": -1.0, "vmax": 1.0}
    heights = [end[..., 0] for end in ends]
    options |= {"vmax": (top := float(np.abs(heights[0]).max())), "vmin": -top}
    figure = Figure((9, 2.6), dpi=100, layout="constrained")
    names = "solver", "network", "difference"
    for place, name, height in zip(figure.subplots(1, 3), names, [*heights, heights[1] - heights[0]], strict=True):
        shown = place.imshow(height, **options)
        place.set_title(f"{name}, {len(errors)} states" if name != "difference" else name)
    figure.colorbar(shown, ax=figure.axes, label="height of waves")
    figure.savefig(folder / "surrogate-field.png", metadata={"Software": None})
    _parts(grid, heights[0], options).savefig(folder / "surrogate-parts.png", metadata={"Software": None})
    figure = Figure((6, 3), dpi=100, layout="constrained")
    place = figure.subplots()
    place.plot(range(1, len(errors) + 1), errors, marker="o")
    place.set(xlabel="states that the network has stepped by itself", ylabel="relative error", ylim=(0, None))
    place.set_xticks(range(0, len(errors) + 1, 5))
    place.grid(visible=True, alpha=0.3)
    figure.savefig(folder / "surrogate-error.png", metadata={"Software": None})


def _parts(grid: fsdpx.Grid, height: Array, options: dict[str, Any]) -> Any:
    """Each part in its place, with its halo in pale colours; beyond walls there is none."""
    from matplotlib.figure import Figure

    rows, columns = grid.parts.cuts
    sizes = [(np.diff(cuts) + 2 * HALO).tolist() for cuts in (rows, columns)]
    figure = Figure((9, 5), dpi=100, layout="constrained")
    high, wide = grid.dims
    places = figure.subplots(high, wide, squeeze=False, height_ratios=sizes[0][::-1], width_ratios=sizes[1])
    whole = np.pad(np.pad(height, ((HALO, HALO), (0, 0)), constant_values=np.nan), ((0, 0), (HALO, HALO)), mode="wrap")
    for p, q in np.ndindex(high, wide):
        place = places[high - 1 - p, q]
        (top, bottom), (left, right) = rows[p : p + 2], columns[q : q + 2]
        extent = (left - HALO, right + HALO, top - HALO, bottom + HALO)
        seen = whole[top : bottom + 2 * HALO, left : right + 2 * HALO]
        place.imshow(seen, extent=extent, alpha=0.45, **options)
        place.imshow(height[top:bottom, left:right], extent=(left, right, top, bottom), **options)
        place.set(xlim=extent[:2], ylim=extent[2:], title=f"rank {p * wide + q}")
        place.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="black")
    return figure
