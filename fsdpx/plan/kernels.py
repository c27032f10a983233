"""How fast the kernels of a machine are, by kind: what was measured, and the rate that it gives for a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import exp, log, prod
from typing import Any

from fsdpx.shapes.work import Pass, Product

__all__ = ["LONG", "SHORT", "KernelRates", "point_of", "rates_wanted"]

SHORT, LONG = 1 << 18, 1 << 25
"""Bytes that a call reads and writes in and beyond the caches: at these a pass is measured."""
USUAL = "elements"
"""Array code, at whose rate passes go that were not measured."""


@dataclass(frozen=True)
class KernelRates:
    """What was measured of kernels on a machine, by format and name.

    Parameters
    ----------
    passes : bytes per second of calls that read and write `SHORT` and `LONG` bytes
    products : of kernels that consist of matrix products, rows of (channels given, channels made, places of the window,
        cells, FLOP per second): a full grid, between whose points rates are interpolated in logarithms
    """

    passes: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(default_factory=dict)

    def bytes_per_second(self, one: Pass, name: str) -> float | None:
        """Of a pass in a format. Formats that were not measured go as float32, kernels as the usual array code; None
        where nothing was measured."""
        known = self.passes.get(name, {})
        known = known if one.kernel in known or USUAL in known else self.passes.get("float32", {})
        rates = known.get(one.kernel, known.get(USUAL))
        if rates is None:
            return None
        share = (log(min(max(one.nbytes, SHORT), LONG)) - log(SHORT)) / (log(LONG) - log(SHORT))
        return exp((1 - share) * log(rates[0]) + share * log(rates[1]))

    def flops_per_second(self, one: Product, name: str) -> float | None:
        """Of a product in a kernel, in a format, with all that the kernel does beside it; None where it was not
        measured."""
        grid = self._grids.get((name, one.kernel))
        return None if grid is None else grid.at(point_of(one))

    def holds(self, kernel: str, name: str) -> bool:
        """Whether products of this kernel were measured in a format: its pass is then a part of them."""
        return (name, kernel) in self._grids

    @cached_property
    def _grids(self) -> Mapping[tuple[str, str], _Grid]:
        grids = ((name, *one) for name, kernels in self.products.items() for one in kernels.items())
        return {(name, kernel): _Grid.of(rows) for name, kernel, rows in grids}


def point_of(one: Product) -> tuple[int, int, int, int]:
    """Where a product lies in the grid of its kernel: channels that are given and made, the places of its window, and
    cells. In gradients of parameters the cells are summed."""
    channels, cells = (one.columns, one.inner) if "params" in one.kernel else (one.inner, one.columns)
    return channels, one.rows, one.places, cells


@dataclass(frozen=True)
class _Grid:
    """axes: the numbers of each. logs: the logarithm of the rate at each point."""

    axes: tuple[tuple[float, ...], ...]
    logs: Mapping[tuple[float, ...], float]

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> _Grid:
        logs = {tuple(row[:-1]): log(row[-1]) for row in rows}
        return cls(tuple(tuple(sorted(set(axis))) for axis in zip(*logs, strict=True)), logs)

    def at(self, point: Sequence[float]) -> float:
        """The rate at a point, between those around it; beyond the grid that of its edge."""
        weighed = [_around(axis, value) for axis, value in zip(self.axes, point, strict=True)]
        corners = product(*weighed)
        return exp(sum(prod(w for _, w in one) * self.logs[tuple(at for at, _ in one)] for one in corners))


def _around(axis: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The points of an axis around a value, each with its weight."""
    value = min(max(value, axis[0]), axis[-1])
    high = next(n for n, point in enumerate(axis) if point >= value)
    if axis[high] == value:
        return [(axis[high], 1.0)]
    low, top = axis[high - 1], axis[high]
    share = (log(value) - log(low)) / (log(top) - log(low))
    return [(low, 1.0 - share), (top, share)]


def rates_wanted(value: Any, formats: Iterable[str]) -> str:
    """What `[kernels]` of a machine file has to be; "" where it is that."""
    if not isinstance(value, dict) or not {"passes", "products"}.issuperset(value):
        return "tables passes and products by format are needed, as measure-machine writes them"
    for kind, length in (("passes", 2), ("products", 5)):
        for name, kernels in value.get(kind, {}).items() if isinstance(value.get(kind, {}), dict) else [("", None)]:
            if name not in formats or not isinstance(kernels, dict):
                return f"{kind} are tables by format: {', '.join(sorted(formats))}"
            for kernel, rows in kernels.items():
                each = [rows] if kind == "passes" else rows
                if not isinstance(each, list) or not each or not all(_positive(row, length) for row in each):
                    return f"{kind} of {kernel}: rows of {length} numbers above 0 are needed"
                if kind == "products" and len({tuple(row[:-1]) for row in each}) != prod(
                    len(set(axis)) for axis in list(zip(*each, strict=True))[:-1]
                ):
                    return f"{kind} of {kernel}: a full grid is needed, each point once"
    return ""


def _positive(row: Any, length: int) -> bool:
    numbers = isinstance(row, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in row)
    return numbers and len(row) == length and all(0 < n < float("inf") for n in row)
