"""Cost of a computation on shape-only arrays. It consists of matrix products, counted by shape, and of passes over
arrays, counted by their bytes. Both are recorded where shapes are computed, so layers need not declare their FLOPs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "INNER_KERNEL", "KernelPass", "ProductCount", "WorkCount", "counting_as_one_kernel", "counting_as_one_matmul",
    "counting_work", "iterate_once_counting_all", "record_copy", "record_flops", "record_product", "record_traffic",
    "record_work",
]  # fmt: skip

T = TypeVar("T")

INNER_KERNEL = "inside"
"""Placeholder for the name of a kernel while its work is being counted."""


class ProductCount(NamedTuple):
    """`stack` products (rows, inner) @ (inner, columns) of elements of `itemsize` bytes.

    `kernel`: name of the kernel that contains the product, whose operands or result need not be in memory; "" for a
    standalone product. `places`: number of products in a call of that kernel. `windows`: number of windows of a
    convolution that fit into a row of its result.
    """

    rows: int
    inner: int
    columns: int
    stack: int
    itemsize: int
    kernel: str = ""
    places: int = 1
    windows: float = 1.0

    @property
    def is_fused(self) -> bool:
        """Whether the product is part of a kernel."""
        return self.kernel != ""

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.stack * self.rows * self.inner * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of both operands and of the result."""
        r, i, c = self.rows, self.inner, self.columns
        return self.stack * self.itemsize * (r * i + i * c + r * c)


class KernelPass(NamedTuple):
    """One call of a kernel that reads and writes `nbytes` bytes, with elements of `itemsize` bytes.

    `kernel`: its name, or, for array code, the kind of NumPy operation: "elements", "functions" such as exp, "sums",
    "copy".
    """

    kernel: str
    itemsize: int
    nbytes: int


@dataclass
class WorkCount:
    """Counted work. `products`, `passes`: how often each occurred.

    `inner`: number of bytes that the steps inside a kernel would read and write if each step were a separate kernel, by
    kernel name. The bytes are counted in the dtype of the operands for kernels with products, and in float32 for other
    kernels.
    """

    products: Counter[ProductCount] = field(default_factory=Counter)
    passes: Counter[KernelPass] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        """Bytes of all passes."""
        return sum(one.nbytes * times for one, times in self.passes.items())

    @property
    def kernel_count(self) -> int:
        """Number of kernels called, not counting standalone products."""
        return self.passes.total()

    @property
    def flops(self) -> int:
        """FLOP of all products."""
        return sum(product.flops * times for product, times in self.products.items())

    def add_work(self, other: WorkCount) -> None:
        """Add other work to these counts."""
        self.products.update(other.products)
        self.passes.update(other.passes)
        self.inner.update(other.inner)

    def pop_counts(self) -> WorkCount:
        """Return the current counts, and reset them."""
        counted = WorkCount(self.products.copy(), self.passes.copy(), self.inner.copy())
        for counts in (self.products, self.passes, self.inner):
            counts.clear()
        return counted


class _CountingState(threading.local):
    """Counting state of a thread.

    `open`: the current count, or None. `silent`: nesting depth of blocks in which only products are counted, as parts
    of a kernel. `deaf`: nesting depth of blocks in which not even products are counted. `times`: factor on the products
    that are counted now.
    """

    def __init__(self) -> None:
        self.open: WorkCount | None = None
        self.silent = self.deaf = 0
        self.times = 1


_now = _CountingState()


@contextmanager
def counting_work() -> Iterator[WorkCount]:
    """Count what this thread computes on shapes inside the block. An enclosing block does not count this work."""
    before, _now.open = _now.open, WorkCount()
    try:
        yield _now.open
    finally:
        _now.open = before


def record_traffic(*arrays: Any, kernel: str = "elements") -> None:
    """Record one kernel that reads or writes each of these arrays once. Only shape-only arrays are counted."""
    work = _now.open
    if work is None or _now.deaf:
        return
    counted = [a for a in arrays if getattr(a, "holds_no_data", False)]
    nbytes = sum(a.nbytes for a in counted)
    if _now.silent:
        work.inner[""] += nbytes * _now.times
    else:
        work.passes[KernelPass(kernel, counted[0].itemsize if counted else 4, nbytes)] += 1


def record_copy(array: Any) -> None:
    """Record one kernel that reads this array and writes as many bytes."""
    record_traffic(array, array, kernel="copy")


def record_product(rows: int, inner: int, columns: int, stack: int, itemsize: int) -> None:
    """Record a matrix product."""
    work = _now.open
    if work is not None and not _now.deaf:
        work.products[
            ProductCount(rows, inner, columns, stack * _now.times, itemsize, INNER_KERNEL * (_now.silent > 0))
        ] += 1


def record_flops(flops: int, itemsize: int, kernel: str) -> None:
    """Record the FLOP of a kernel that is not a matrix product. Its bytes are recorded separately."""
    work = _now.open
    if work is not None and not _now.deaf:
        work.products[ProductCount(1, 1, 1, flops // 2 * _now.times, itemsize, kernel)] += 1


def iterate_once_counting_all(first: T, times: int) -> Iterator[T]:
    """Yield only the first item of a loop whose iterations do the same work on shape-only arrays. The matrix products
    of this iteration are counted `times` times."""
    before, _now.times = _now.times, _now.times * times
    try:
        if times:
            yield first
    finally:
        _now.times = before


@contextmanager
def counting_as_one_matmul(a: Any, b: Any) -> Iterator[None]:
    """Count the block as one product of two matrices, or of stacks of matrices, in their own dtype, whatever the block
    computes."""
    if _now.open is None or not getattr(a, "holds_no_data", False):
        yield
        return
    record_product(a.shape[-2], a.shape[-1], b.shape[-1], prod(a.shape[:-2]), a.itemsize)
    _now.deaf += 1
    _now.silent += 1
    try:
        yield
    finally:
        _now.deaf -= 1
        _now.silent -= 1


@contextmanager
def counting_as_one_kernel() -> Iterator[WorkCount]:
    """Count the block as one kernel. The caller counts the bytes that the kernel reads and writes."""
    with counting_work() as work:
        _now.silent += 1
        try:
            yield work
        finally:
            _now.silent -= 1


def record_work(work: WorkCount) -> None:
    """Add work that was counted earlier to the current count."""
    if _now.open is not None and not _now.deaf:
        if _now.silent:
            _now.open.products.update(work.products)
            _now.open.inner.update(work.inner)
        else:
            _now.open.add_work(work)
