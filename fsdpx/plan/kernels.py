"""How fast the kernels of a machine are, by kind: what was measured, and the rate that it gives for a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import exp, inf, log, prod
from typing import Any

from fsdpx.core.array.shapes.flop_counter import KernelPass, ProductCount

__all__ = ["LONG", "SHORT", "WEIGHTS", "KernelRates", "check_rates", "count_weight_bytes", "get_grid_point"]

SHORT, LONG = 1 << 18, 1 << 26
"""Bytes that a call reads and writes in and beyond the caches: at these a pass is measured."""
USUAL, COPY, CAST, WEIGHTS = "elements", "copy", "store", "weights of "
"""Array code, at whose rate passes go that were not measured; what moves, rounds or widens numbers; weights."""


@dataclass(frozen=True)
class KernelRates:
    """What was measured of kernels on a machine, by format and name.

    Parameters
    ----------
    passes : bytes per second of calls that read and write `SHORT` and `LONG` bytes; under the name of a kernel and
        `WEIGHTS` those of weights, which convolutions bring into another order
    products : of kernels that consist of matrix products, rows of (channels given, channels made, places of the window,
        windows in a row of results, FLOP per second), in the caches: a full grid, between whose points rates are
        interpolated in logarithms
    """

    passes: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(default_factory=dict)

    def bytes_per_second(self, one: KernelPass, name: str) -> float | None:
        """Of a pass in a format. Formats that were not measured go as float32, kernels as the usual array code; None
        where nothing was measured."""
        known = self.passes.get(name, {})
        known = known if one.kernel in known or USUAL in known else self.passes.get("float32", {})
        rates = known.get(one.kernel, known.get(USUAL))
        if rates is None:
            return None
        share = (log(min(max(one.nbytes, SHORT), LONG)) - log(SHORT)) / (log(LONG) - log(SHORT))
        return exp((1 - share) * log(rates[0]) + share * log(rates[1]))

    def flops_per_second(self, one: ProductCount, name: str) -> float | None:
        """Of a product in a kernel, in a format, with all that the kernel does beside it in the caches; None where it
        was not measured. Formats of 16 bits that were not measured are computed in float32."""
        grid = self._grids.get((name, one.kernel))
        if grid is None and one.itemsize == 2:
            grid = self._grids.get(("float32", one.kernel))
        return None if grid is None else grid.interpolate_at(get_grid_point(one))

    def seconds_of(self, one: ProductCount, name: str) -> float | None:
        """Of such a product, and of its weights, which count where they meet few cells."""
        rate, weights = self.flops_per_second(one, name), WEIGHTS + one.kernel
        if rate is None:
            return None
        known = next((rates[weights] for rates in self.passes.values() if weights in rates), (inf, inf))
        return one.flops / rate + count_weight_bytes(one) / known[0]

    def seconds_beside(self, one: KernelPass, name: str) -> float | None:
        """Of the pass of a kernel whose products were measured, in a format: what it takes longer to reach beyond the
        caches, and to widen and round 16 bits that are computed in float32. None for other kernels."""
        if (name, one.kernel) in self._grids:
            return self._beyond_caches(one.nbytes, name)
        if one.itemsize != 2 or ("float32", one.kernel) not in self._grids:
            return None
        cast = KernelPass(CAST, 2, one.nbytes + 2 * one.nbytes)
        rate = self.bytes_per_second(cast, name)
        return self._beyond_caches(2 * one.nbytes, "float32") + (0.0 if rate is None else cast.nbytes / rate)

    def _beyond_caches(self, nbytes: int, name: str) -> float:
        far, near = (self.bytes_per_second(KernelPass(COPY, 4, n), name) for n in (nbytes, SHORT))
        return 0.0 if far is None or near is None else max(nbytes / far - nbytes / near, 0.0)

    @cached_property
    def _grids(self) -> Mapping[tuple[str, str], _Grid]:
        grids = ((name, *one) for name, kernels in self.products.items() for one in kernels.items())
        return {(name, kernel): _Grid.from_rows(rows) for name, kernel, rows in grids}


def get_grid_point(one: ProductCount) -> tuple[int, int, int, float]:
    """Where a product lies in the grid of its kernel: channels that are given and made, the places of its window, and
    windows in a row. In gradients of parameters the cells are summed."""
    channels = one.columns if "params" in one.kernel else one.inner
    return channels, one.rows, one.places, one.windows


def count_weight_bytes(one: ProductCount) -> int:
    """Bytes of the weights of a product of a convolution, of float32."""
    return 4 * prod(get_grid_point(one)[:2])


@dataclass(frozen=True)
class _Grid:
    """axes: the numbers of each. logs: the logarithm of the rate at each point."""

    axes: tuple[tuple[float, ...], ...]
    logs: Mapping[tuple[float, ...], float]

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float]]) -> _Grid:
        logs = {tuple(row[:-1]): log(row[-1]) for row in rows}
        return cls(tuple(tuple(sorted(set(axis))) for axis in zip(*logs, strict=True)), logs)

    def interpolate_at(self, point: Sequence[float]) -> float:
        """The rate at a point, between those around it; beyond the grid that of its edge."""
        weighed = [_find_neighbors(axis, value) for axis, value in zip(self.axes, point, strict=True)]
        corners = product(*weighed)
        return exp(sum(prod(w for _, w in one) * self.logs[tuple(at for at, _ in one)] for one in corners))


def _find_neighbors(axis: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The points of an axis around a value, each with its weight."""
    value = min(max(value, axis[0]), axis[-1])
    high = next(n for n, point in enumerate(axis) if point >= value)
    if axis[high] == value:
        return [(axis[high], 1.0)]
    low, top = axis[high - 1], axis[high]
    share = (log(value) - log(low)) / (log(top) - log(low))
    return [(low, 1.0 - share), (top, share)]


def check_rates(value: Any, formats: Iterable[str]) -> str:
    """What `[kernels]` of a machine file has to be; "" where it is that."""
    if not isinstance(value, dict) or not {"passes", "products"}.issuperset(value):
        return "tables passes and products by format are needed, as measure-machine writes them"
    for kind, length in (("passes", 2), ("products", 5)):
        for name, kernels in value.get(kind, {}).items() if isinstance(value.get(kind, {}), dict) else [("", None)]:
            if name not in formats or not isinstance(kernels, dict):
                return f"{kind} are tables by format: {', '.join(sorted(formats))}"
            for kernel, rows in kernels.items():
                each = [rows] if kind == "passes" else rows
                if not isinstance(each, list) or not each or not all(_is_positive_row(row, length) for row in each):
                    return f"{kind} of {kernel}: rows of {length} numbers above 0 are needed"
                if kind == "products" and len({tuple(row[:-1]) for row in each}) != prod(
                    len(set(axis)) for axis in list(zip(*each, strict=True))[:-1]
                ):
                    return f"{kind} of {kernel}: a full grid is needed, each point once"
    return ""


def _is_positive_row(row: Any, length: int) -> bool:
    numbers = isinstance(row, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in row)
    return numbers and len(row) == length and all(0 < n < float("inf") for n in row)
