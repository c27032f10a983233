"""Draws the figures of the surrogate tutorial with Matplotlib (installed by the extra `plot`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fsdpx

Array = np.ndarray
THEMES: dict[str, dict[Any, Any]] = {
    theme: {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        "figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page, "font.size": 10,
    }
    for theme, page, ink in (("light", "#ffffff", "#24292f"), ("dark", "#131416", "#d7dce1"))
}  # fmt: skip
"""For each theme of the documentation pages, the Matplotlib settings that match the colors of the pages."""
HALO = 2  # number of halo cells drawn on each side of a part; two 3 x 3 convolutions need this many


def write_figures(folder: Path, grid: fsdpx.Grid, end_states: Sequence[Array], errors: Sequence[float]) -> None:
    """Write the figures surrogate-field, surrogate-parts and surrogate-error, each as -light.png and -dark.png.

    Parameters
    ----------
    folder : where to write; it is created if needed
    grid : how the field is split over ranks; the field has 2 dims, and the second dim is periodic
    end_states : last states of the solver and of the network, as full fields (rows, columns, 3)
    errors : error of the network's state after each step, relative to the size of the waves
    """
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    heights = [end[..., 0] for end in end_states]
    top = float(np.abs(heights[0]).max())
    options: dict[str, Any] = {"origin": "lower", "cmap": "RdBu_r", "vmin": -top, "vmax": top}
    for theme, look in THEMES.items():
        with rc_context(look):
            drawn = {
                "field": _draw_final_wave_heights_figure(heights, len(errors), options),
                "parts": _draw_parts_figure(grid, heights[0], options),
            }
            for name, figure in (drawn | {"error": _draw_error_curve(errors)}).items():
                figure.savefig(folder / f"surrogate-{name}-{theme}.png", dpi=150, metadata={"Software": None})


def _draw_final_wave_heights_figure(heights: Sequence[Array], steps: int, options: dict[str, Any]) -> Any:
    """Draw the last wave heights of the solver and of the network, and their difference."""
    from matplotlib.figure import Figure

    figure = Figure((9, 2.6), layout="constrained")
    names = f"solver, {steps} states", f"network, {steps} states", "difference"
    for place, name, height in zip(figure.subplots(1, 3), names, [*heights, heights[1] - heights[0]], strict=True):
        shown = place.imshow(height, **options)
        place.set_title(name)
    figure.colorbar(shown, ax=figure.axes, label="height of waves", fraction=0.05, shrink=0.8)
    return figure


def _draw_error_curve(errors: Sequence[float]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure((9, 3), layout="constrained")
    place = figure.subplots()
    place.plot(range(1, len(errors) + 1), errors, marker="o")
    place.set(xlabel="states that the network has stepped by itself", ylabel="error, of the waves", ylim=(0, None))
    place.set_xticks(range(0, len(errors) + 1, 5))
    place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    place.grid(visible=True, alpha=0.3)
    place.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_parts_figure(grid: fsdpx.Grid, height: Array, options: dict[str, Any]) -> Any:
    """Draw each rank's part of the field at its position, with its halo in pale colors. Parts have no halo beyond
    walls."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rows, columns = grid.parts.cuts
    sizes = [(np.diff(cuts) + 2 * HALO).tolist() for cuts in (rows, columns)]
    figure = Figure((9, 5), layout="constrained")
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
        place.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=rcParams["text.color"])
    return figure
