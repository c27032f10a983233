"""Count the cost of a computation on shape-only arrays: the FLOPs of matrix products, and the bytes that kernels read
and write. Both are counted where shapes are computed, so layers need not declare their cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeVar

from fsdpx.core.base.dataclass import dataclass, field

__all__ = [
    "INNER_KERNEL",
    "KernelPass",
    "ProductCount",
    "WorkCount",
    "add_counted_work",
    "counting_as_one_kernel",
    "counting_as_one_matmul",
    "counting_work",
    "iterate_first_and_count_all",
    "record_copy",
    "record_flops",
    "record_product",
    "record_traffic",
]  # fmt: skip

T = TypeVar("T")

INNER_KERNEL = "inside"
"""Placeholder for a kernel's name in the records of its matrix products until its work has been counted."""


class ProductCount(NamedTuple):
    """A stack of matrix products of the same shape: `stack` times (rows, inner) @ (inner, columns), with elements of
    `itemsize` bytes.

    Attributes
    ----------
    kernel : name of the kernel that computes the product, possibly without storing its operands or its result in
        memory; "" for a product outside kernels
    places : number of products in one call of that kernel
    windows : for a convolution, a number that affects its speed. If each window is a single cell, it is the total
        number of windows. If windows are larger, it is the length of an output row divided by the length of a window
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
        """Whether the product is computed inside a kernel."""
        return self.kernel != ""

    @property
    def flops(self) -> int:
        """Number of floating-point operations (multiplications and additions)."""
        return 2 * self.stack * self.rows * self.inner * self.columns

    @property
    def nbytes(self) -> int:
        """Size of both operands and the result in bytes."""
        r, i, c = self.rows, self.inner, self.columns
        return self.stack * self.itemsize * (r * i + i * c + r * c)


class KernelPass(NamedTuple):
    """One call of a kernel, which reads and writes `nbytes` bytes in total. Elements have `itemsize` bytes.

    `kernel` is the name of the kernel or, for plain array code, the kind of NumPy operation: "functions" (such as exp),
    "elements" (other elementwise operations), "sums" or "copy".
    """

    kernel: str
    itemsize: int
    nbytes: int


@dataclass
class WorkCount:
    """The work counted in a computation.

    Attributes
    ----------
    products : the number of times that each matrix product occurs
    passes : the number of times that each kernel call occurs
    inner : for each kernel name, the number of bytes that the steps inside the kernel would read and write if each step
        were a separate kernel. For kernels with matrix products, this number is computed for elements of the operands'
        dtype; for other kernels, it is computed for float32 elements
    """

    products: Counter[ProductCount] = field(default_factory=Counter)
    passes: Counter[KernelPass] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        """Number of bytes that all kernel calls read and write."""
        return sum(one.nbytes * times for one, times in self.passes.items())

    @property
    def kernel_count(self) -> int:
        """Number of kernel calls. Matrix products outside kernels are not counted."""
        return self.passes.total()

    @property
    def flops(self) -> int:
        """Number of floating-point operations of all products."""
        return sum(product.flops * times for product, times in self.products.items())

    def add_work(self, other: WorkCount) -> None:
        """Add the counts of `other` to these counts."""
        self.products.update(other.products)
        self.passes.update(other.passes)
        self.inner.update(other.inner)

    def pop_counts(self) -> WorkCount:
        """Return the current counts and reset them to zero."""
        counted = WorkCount(self.products.copy(), self.passes.copy(), self.inner.copy())
        for counts in (self.products, self.passes, self.inner):
            counts.clear()
        return counted


class _CountingState(threading.local):
    """What this thread is currently counting.

    Attributes
    ----------
    open : the count that work is added to; None if nothing is counted
    skip_passes : nesting depth of blocks in which only matrix products are counted, as parts of a kernel
    skip_all : nesting depth of blocks in which nothing is counted
    times : number of times that each matrix product is counted
    """

    def __init__(self) -> None:
        self.open: WorkCount | None = None
        self.skip_passes = self.skip_all = 0
        self.times = 1


_now = _CountingState()


@contextmanager
def counting_work() -> Iterator[WorkCount]:
    """Return a context manager that counts this thread's work on shape-only arrays inside it. Enclosing counters do not
    count this work."""
    before, _now.open = _now.open, WorkCount()
    try:
        yield _now.open
    finally:
        _now.open = before


def record_traffic(*arrays: Any, kernel: str = "elements") -> None:
    """Count one kernel call that reads or writes each of these arrays once. Arrays with data are not counted."""
    work = _now.open
    if work is None or _now.skip_all:
        return
    counted = [a for a in arrays if getattr(a, "holds_no_data", False)]
    nbytes = sum(a.nbytes for a in counted)
    if _now.skip_passes:
        work.inner[""] += nbytes * _now.times
    else:
        work.passes[KernelPass(kernel, counted[0].itemsize if counted else 4, nbytes)] += 1


def record_copy(array: Any) -> None:
    """Count one kernel call that reads this array and writes the same number of bytes."""
    record_traffic(array, array, kernel="copy")


def record_product(rows: int, inner: int, columns: int, stack: int, itemsize: int) -> None:
    """Count `stack` matrix products (rows, inner) @ (inner, columns) of elements of `itemsize` bytes."""
    work = _now.open
    if work is not None and not _now.skip_all:
        work.products[
            ProductCount(rows, inner, columns, stack * _now.times, itemsize, INNER_KERNEL * (_now.skip_passes > 0))
        ] += 1


def record_flops(flops: int, itemsize: int, kernel: str) -> None:
    """Count `flops` floating-point operations that a kernel performs outside of matrix products. The bytes that the
    kernel reads and writes are counted separately."""
    work = _now.open
    if work is not None and not _now.skip_all:
        work.products[ProductCount(1, 1, 1, flops // 2 * _now.times, itemsize, kernel)] += 1


def iterate_first_and_count_all(first: T, times: int) -> Iterator[T]:
    """Replace a loop of `times` iterations that all do the same work on shape-only arrays. Yield only `first`, and
    count the matrix products of this iteration `times` times."""
    before, _now.times = _now.times, _now.times * times
    try:
        if times:
            yield first
    finally:
        _now.times = before


@contextmanager
def counting_as_one_matmul(a: Any, b: Any) -> Iterator[None]:
    """Return a context manager that counts one product of the matrices (or stacks of matrices) a and b, and does not
    count any other work inside it."""
    if _now.open is None or not getattr(a, "holds_no_data", False):
        yield
        return
    record_product(a.shape[-2], a.shape[-1], b.shape[-1], prod(a.shape[:-2]), a.itemsize)
    _now.skip_all += 1
    _now.skip_passes += 1
    try:
        yield
    finally:
        _now.skip_all -= 1
        _now.skip_passes -= 1


@contextmanager
def counting_as_one_kernel() -> Iterator[WorkCount]:
    """Return a context manager that counts all work inside it as one kernel. The caller counts the bytes that the
    kernel reads and writes."""
    with counting_work() as work:
        _now.skip_passes += 1
        try:
            yield work
        finally:
            _now.skip_passes -= 1


def add_counted_work(work: WorkCount) -> None:
    """Add previously counted work to this thread's current count."""
    if _now.open is not None and not _now.skip_all:
        if _now.skip_passes:
            _now.open.products.update(work.products)
            _now.open.inner.update(work.inner)
        else:
            _now.open.add_work(work)
