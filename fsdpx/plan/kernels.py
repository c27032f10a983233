"""Measured rates of compute kernels, for each kernel and number format. For a call whose size was not measured, the
rate is interpolated between measured rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import exp, inf, log, prod
from typing import Any

from fsdpx.core.array.shapes.flop_counter import KernelPass, ProductCount
from fsdpx.core.base.dataclass import dataclass, field

__all__ = [
    "LONG", "SHORT", "WEIGHTS", "KernelRates", "count_weight_bytes", "explain_invalid_kernel_rates",
    "locate_product_in_rate_table",
]  # fmt: skip

SHORT, LONG = 1 << 18, 1 << 26
"""Numbers of bytes that one call reads and writes. `SHORT` bytes fit into the caches, and `LONG` bytes do not. The
rates of memory-bound kernels are measured at these two sizes."""
USUAL, COPY, CAST, WEIGHTS = "elements", "copy", "store", "weights of "
"""Names of rates in `KernelRates.passes`. USUAL: plain array code, whose rate also applies to kernels that were not
measured. COPY: copies. CAST: conversions between formats. WEIGHTS: prefix of the rates at which convolutions reorder
their weights."""


@dataclass(frozen=True)
class KernelRates:
    """Measured rates of a machine's kernels, keyed by number format and kernel name.

    Parameters
    ----------
    passes : format -> kernel -> (rate of calls that read and write `SHORT` bytes, rate of calls that read and write
        `LONG` bytes), in bytes per second; the entry with the key `WEIGHTS` + kernel is the rate at which a convolution
        reorders its weights
    products : format -> kernel -> rows of (input channels, output channels, window size in cells, windows per row of
        results, FLOP per second), for each kernel that consists of matrix products. The rates were measured with data
        in the caches. The rows form a full grid, in which the logarithm of the rate is interpolated linearly in the
        logarithms of the other four numbers
    """

    passes: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(default_factory=dict)

    def get_bytes_per_second(self, kernel_pass: KernelPass, name: str) -> float | None:
        """Return the rate of a memory-bound kernel call, interpolated between the rates for `SHORT` and `LONG` bytes.

        For a format that was not measured, the rates of float32 are used. For a kernel that was not measured, the rate
        of plain array code is used.

        Parameters
        ----------
        kernel_pass : kernel, item size and bytes of the call
        name : format of the call, such as "float32"

        Returns
        -------
        float : bytes per second; None if no rate is known
        """
        known = self.passes.get(name, {})
        known = known if kernel_pass.kernel in known or USUAL in known else self.passes.get("float32", {})
        rates = known.get(kernel_pass.kernel, known.get(USUAL))
        if rates is None:
            return None
        share = (log(min(max(kernel_pass.nbytes, SHORT), LONG)) - log(SHORT)) / (log(LONG) - log(SHORT))
        return exp((1 - share) * log(rates[0]) + share * log(rates[1]))

    def get_flops_per_second(self, product: ProductCount, name: str) -> float | None:
        """Return the rate of a matrix product inside a kernel. The rate includes all other work that the kernel does
        in the caches.

        For a 16-bit format that was not measured, the rate of float32 is used, because products in 16-bit formats are
        computed in float32.

        Parameters
        ----------
        product : sizes of the product, and the kernel that contains it
        name : format of the product, such as "float32"

        Returns
        -------
        float : FLOP per second; None if the kernel was not measured
        """
        grid = self._rate_grids.get((name, product.kernel))
        if grid is None and product.itemsize == 2:
            grid = self._rate_grids.get(("float32", product.kernel))
        return None if grid is None else grid.interpolate_at(locate_product_in_rate_table(product))

    def compute_product_seconds(self, product: ProductCount, name: str) -> float | None:
        """Return the time that a matrix product inside a kernel takes. It includes the time for reordering the weights,
        which is noticeable if there are few cells.

        Parameters
        ----------
        product : sizes of the product, and the kernel that contains it
        name : format of the product, such as "float32"

        Returns
        -------
        float : seconds; None if the kernel was not measured
        """
        rate, weights = self.get_flops_per_second(product, name), WEIGHTS + product.kernel
        if rate is None:
            return None
        known = next((rates[weights] for rates in self.passes.values() if weights in rates), (inf, inf))
        return product.flops / rate + count_weight_bytes(product) / known[0]

    def compute_memory_seconds_beyond_products(self, kernel_pass: KernelPass, name: str) -> float | None:
        """Return the time that a kernel takes in addition to its matrix products. It is the sum of two times. The first
        is the time for accessing main memory, because the products were measured with data in the caches. The second is
        the time for casting 16-bit arrays, because their products are computed in float32.

        Parameters
        ----------
        kernel_pass : kernel, item size and bytes of the call
        name : format of the call, such as "float32"

        Returns
        -------
        float : seconds; None for kernels whose matrix products were not measured
        """
        if (name, kernel_pass.kernel) in self._rate_grids:
            return self._get_extra_copy_seconds(kernel_pass.nbytes, name)
        if kernel_pass.itemsize != 2 or ("float32", kernel_pass.kernel) not in self._rate_grids:
            return None
        cast = KernelPass(CAST, 2, kernel_pass.nbytes + 2 * kernel_pass.nbytes)
        rate = self.get_bytes_per_second(cast, name)
        cast_seconds = 0.0 if rate is None else cast.nbytes / rate
        return self._get_extra_copy_seconds(2 * kernel_pass.nbytes, "float32") + cast_seconds

    def _get_extra_copy_seconds(self, nbytes: int, name: str) -> float:
        """Return how many seconds longer a copy of `nbytes` bytes takes in main memory than it would in the caches."""
        far, near = (self.get_bytes_per_second(KernelPass(COPY, 4, n), name) for n in (nbytes, SHORT))
        return 0.0 if far is None or near is None else max(nbytes / far - nbytes / near, 0.0)

    @cached_property
    def _rate_grids(self) -> Mapping[tuple[str, str], _RateGrid]:
        grids = ((name, *one) for name, kernels in self.products.items() for one in kernels.items())
        return {(name, kernel): _RateGrid.from_rows(rows) for name, kernel, rows in grids}


def locate_product_in_rate_table(product: ProductCount) -> tuple[int, int, int, float]:
    """Return the position of a matrix product in the grid of measured sizes: (input channels, output channels, window
    size in cells, windows per row of results).

    Most products sum over the input channels, so the number of input channels is the length of the sum. Products that
    compute parameter gradients sum over cells; for these, it is the number of columns of the result."""
    channels = product.columns if "params" in product.kernel else product.inner
    return channels, product.rows, product.places, product.windows


def count_weight_bytes(product: ProductCount) -> int:
    """Return the size in bytes of the float32 weight in one matrix product of a convolution. The weight has the shape
    (output channels, input channels)."""
    return 4 * prod(locate_product_in_rate_table(product)[:2])


@dataclass(frozen=True)
class _RateGrid:
    """Rates measured on a full grid of sizes.

    Attributes
    ----------
    axes : for each axis, its coordinates in ascending order
    logs : logarithm of the rate at each point
    """

    axes: tuple[tuple[float, ...], ...]
    logs: Mapping[tuple[float, ...], float]

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float]]) -> _RateGrid:
        logs = {tuple(row[:-1]): log(row[-1]) for row in rows}
        return cls(tuple(tuple(sorted(set(axis))) for axis in zip(*logs, strict=True)), logs)

    def interpolate_at(self, point: Sequence[float]) -> float:
        """Return the rate at any point, interpolated between neighboring grid points. A point outside the grid gets
        the rate of the nearest point on the edge of the grid."""
        weighed = [
            _find_coordinates_and_weights_around(axis, value) for axis, value in zip(self.axes, point, strict=True)
        ]
        corners = product(*weighed)
        return exp(sum(prod(w for _, w in one) * self.logs[tuple(at for at, _ in one)] for one in corners))


def _find_coordinates_and_weights_around(axis: Sequence[float], value: float) -> list[tuple[float, float]]:
    """Return (coordinate, interpolation weight) for the two neighboring coordinates of an axis that enclose `value`.
    The weights are linear in log(`value`). If `value` is equal to a coordinate, or beyond the ends of the axis, only
    one pair is returned."""
    value = min(max(value, axis[0]), axis[-1])
    high = next(n for n, point in enumerate(axis) if point >= value)
    if axis[high] == value:
        return [(axis[high], 1.0)]
    low, top = axis[high - 1], axis[high]
    share = (log(value) - log(low)) / (log(top) - log(low))
    return [(low, 1.0 - share), (top, share)]


def explain_invalid_kernel_rates(value: Any, formats: Iterable[str]) -> str:
    """Return an error message if the [kernels] section of a machine file is invalid, else ""."""
    if not isinstance(value, dict) or not {"passes", "products"}.issuperset(value):
        return "tables passes and products by format are needed, as measure-machine writes them"
    for kind, length in (("passes", 2), ("products", 5)):
        for name, kernels in value.get(kind, {}).items() if isinstance(value.get(kind, {}), dict) else [("", None)]:
            if name not in formats or not isinstance(kernels, dict):
                return f"{kind} are tables by format: {', '.join(sorted(formats))}"
            for kernel, rows in kernels.items():
                each = [rows] if kind == "passes" else rows
                if (
                    not isinstance(each, list)
                    or not each
                    or not all(_is_list_of_positive_numbers(row, length) for row in each)
                ):
                    return f"{kind} of {kernel}: rows of {length} numbers above 0 are needed"
                if kind == "products" and len({tuple(row[:-1]) for row in each}) != prod(
                    len(set(axis)) for axis in list(zip(*each, strict=True))[:-1]
                ):
                    return f"{kind} of {kernel}: a full grid is needed, each point once"
    return ""


def _is_list_of_positive_numbers(row: Any, length: int) -> bool:
    """Return whether `row` is a list of `length` positive finite numbers."""
    numbers = isinstance(row, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in row)
    return numbers and len(row) == length and all(0 < n < float("inf") for n in row)
