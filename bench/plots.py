"""Plain plots of results, as small PNG files; without Matplotlib a line says that there are none."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["bars", "curves"]

OURS, OTHERS = "#1f5fa8", "#b8b8b8"

Bar = tuple[str, float, bool]  # label, value, ours


def bars(path: Path, title: str, panels: Mapping[str, Sequence[Bar]]) -> None:
    """Horizontal bars, one panel per entry; ours are blue."""
    plt = _pyplot(path)
    if plt is None or not panels:
        return
    height = max(len(panel) for panel in panels.values())
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 0.8 + 0.24 * height), squeeze=False)
    for axis, (label, panel) in zip(axes[0], panels.items(), strict=True):
        drawn = axis.barh(range(len(panel)), [b[1] for b in panel], color=[OURS if b[2] else OTHERS for b in panel])
        axis.bar_label(drawn, [f"{b[1]:,.{0 if b[1] >= 100 else 1}f}" for b in panel], fontsize=7, padding=2)
        axis.set_yticks(range(len(panel)), [b[0] for b in panel], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(label, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(x=0.15)
    _save(figure, plt, path, title)


def curves(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    x: str,
    y: str,
    log: str = "xy",
) -> None:
    """Lines by name, one panel per entry; log: which axes are logarithmic."""
    plt = _pyplot(path)
    if plt is None or not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False)
    looks = plt.cycler(linestyle=["-", "--", ":"]) * plt.rcParams["axes.prop_cycle"]  # none comes twice
    for axis, (label, named) in zip(axes[0], panels.items(), strict=True):
        axis.set_prop_cycle(looks)
        for name, points in named.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
        axis.set_xscale("log" if "x" in log else "linear")
        axis.set_yscale("log" if "y" in log else "linear")
        axis.set_title(label, fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y, fontsize=8)
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    _save(figure, plt, path, title)


def _pyplot(path: Path) -> Any:
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: Matplotlib is not installed (pip install 'fsdpx[plot]')", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, plt: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
