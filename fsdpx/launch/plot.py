"""`bench comm --plot`: the time and the bandwidth of each verb by size, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdpx.errors import LaunchError

__all__ = ["plot"]


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a report of `measure`, a row for each of its levels; the suffix says the format. Dashed: the
    same call of mpi4py. LaunchError for a suffix that matplotlib does not know."""
    from matplotlib.figure import Figure

    levels = report["levels"]
    figure = Figure(figsize=(11, 4.2 * len(levels)), layout="constrained")
    for level, (times, rates) in zip(levels, figure.subplots(len(levels), 2, squeeze=False), strict=True):
        where = f" of {level['host']}" if level["level"] == "inside a host" else ""
        times.set(title=f"{level['level']}{where}, {level['ranks']} ranks", ylabel="us", yscale="log")
        rates.set(title="bandwidth of links (bus)", ylabel="GB/s", yscale="log")
        for number, verb in enumerate(dict.fromkeys(row["verb"] for row in level["rows"] if row["bytes"])):
            rows = [row for row in level["rows"] if row["verb"] == verb]
            sizes, colour = [row["bytes"] for row in rows], f"C{number % 10}"
            line = {"color": colour, "marker": "o", "markersize": 3}
            times.plot(sizes, [1e6 * row["seconds"] for row in rows], label=verb, **line)
            rates.plot(sizes, [1e-9 * row["bus_bandwidth"] for row in rows], **line)
            if rows[0]["raw_seconds"] is not None:
                times.plot(sizes, [1e6 * row["raw_seconds"] for row in rows], "--", color=colour, linewidth=0.8)
        for axis in (times, rates):
            axis.set(xscale="log", xlabel="bytes of the full array")
            axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, handles=_one_of_each(figure))
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise LaunchError(f"--plot {path}: {error}") from None


def _one_of_each(figure: Any) -> list[Any]:
    """The lines of the legend: of each verb the first."""
    lines = [line for axis in figure.axes for line in axis.lines if not str(line.get_label()).startswith("_")]
    return list({line.get_label(): line for line in reversed(lines)}.values())[::-1]
