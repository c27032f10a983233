"""What a computation on arrays without data would cost: its matrix products by shape, and its passes over arrays by
their bytes. Every product and every pass is noted where its shape is found, so no layer says its FLOPs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "INNER_KERNEL",
    "KernelPass",
    "ProductCount",
    "WorkCount",
    "count_as_one_kernel",
    "count_as_one_matmul",
    "count_one_round",
    "count_work",
    "record_copy",
    "record_flops",
    "record_product",
    "record_traffic",
    "repeat_work",
]  # fmt: skip

T = TypeVar("T")

INNER_KERNEL = "inside"
"""Stands for the name of a kernel while it is counted."""


class ProductCount(NamedTuple):
    """`stack` products (rows, inner) @ (inner, columns) of elements of `itemsize` bytes. kernel: the name of the kernel
    that it is a part of, whose operands or result need not lie in memory; "" for a product of its own. places: of how
    many products a call of that kernel consists. windows: how many windows of a convolution fit into a row of its
    results."""

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
        """Whether it is a part of a kernel."""
        return self.kernel != ""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.stack * self.rows * self.inner * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of both operands and the result."""
        r, i, c = self.rows, self.inner, self.columns
        return self.stack * self.itemsize * (r * i + i * c + r * c)


class KernelPass(NamedTuple):
    """One call of a kernel that reads and writes so many bytes, of elements of `itemsize` bytes. kernel: its name; of
    array code what NumPy does: "elements", "functions" such as exp, "sums", "copy"."""

    kernel: str
    itemsize: int
    nbytes: int


@dataclass
class WorkCount:
    """products, passes: how often each. inner: by name of a kernel, bytes that the steps inside of it would read and
    write if each were a kernel of its own, where these are between products in the format of their operands."""

    products: Counter[ProductCount] = field(default_factory=Counter)
    passes: Counter[KernelPass] = field(default_factory=Counter)
    inner: Counter[str] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        """Bytes of all passes."""
        return sum(one.nbytes * times for one, times in self.passes.items())

    @property
    def kernel_count(self) -> int:
        """Kernels that are called, beside products of their own."""
        return self.passes.total()

    @property
    def flops(self) -> int:
        """FLOP of all products."""
        return sum(product.flops * times for product, times in self.products.items())

    def add_work(self, other: WorkCount) -> None:
        """Count other work as well."""
        self.products.update(other.products)
        self.passes.update(other.passes)
        self.inner.update(other.inner)

    def take_counts(self) -> WorkCount:
        """What was counted so far; counting begins again."""
        counted = WorkCount(self.products.copy(), self.passes.copy(), self.inner.copy())
        for counts in (self.products, self.passes, self.inner):
            counts.clear()
        return counted


class _CountingState(threading.local):
    """The counts of a thread. open: what is counted into, or None. silent: levels in which only products count, as
    parts of a kernel; deaf: not even these. times: how often what is computed now is computed."""

    def __init__(self) -> None:
        self.open: WorkCount | None = None
        self.silent = self.deaf = 0
        self.times = 1


_now = _CountingState()


@contextmanager
def count_work() -> Iterator[WorkCount]:
    """Count what is computed on shapes inside the block, by this thread, in place of what counted before."""
    before, _now.open = _now.open, WorkCount()
    try:
        yield _now.open
    finally:
        _now.open = before


def record_traffic(*arrays: Any, kernel: str = "elements") -> None:
    """One kernel reads or writes these arrays once; what is no array without data counts nothing."""
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
    """One kernel reads this array and writes as many bytes."""
    record_traffic(array, array, kernel="copy")


def record_product(rows: int, inner: int, columns: int, stack: int, itemsize: int) -> None:
    """A matrix product is computed."""
    work = _now.open
    if work is not None and not _now.deaf:
        work.products[
            ProductCount(rows, inner, columns, stack * _now.times, itemsize, INNER_KERNEL * (_now.silent > 0))
        ] += 1


def record_flops(flops: int, itemsize: int, kernel: str) -> None:
    """A kernel that is no matrix product, and whose bytes are noted apart, computes so many FLOP."""
    work = _now.open
    if work is not None and not _now.deaf:
        work.products[ProductCount(1, 1, 1, flops // 2 * _now.times, itemsize, kernel)] += 1


def count_one_round(first: T, times: int) -> Iterator[T]:
    """The first round of a loop whose rounds do the same on arrays without data; its products count for all of them."""
    before, _now.times = _now.times, _now.times * times
    try:
        if times:
            yield first
    finally:
        _now.times = before


@contextmanager
def count_as_one_matmul(a: Any, b: Any) -> Iterator[None]:
    """Inside is one product of two matrices, or of stacks of them, in their own format, however it is written."""
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
def count_as_one_kernel() -> Iterator[WorkCount]:
    """Inside is one kernel. The caller counts what it reads and writes."""
    with count_work() as work:
        _now.silent += 1
        try:
            yield work
        finally:
            _now.silent -= 1


def repeat_work(work: WorkCount) -> None:
    """What was counted before is computed once more."""
    if _now.open is not None and not _now.deaf:
        if _now.silent:
            _now.open.products.update(work.products)
            _now.open.inner.update(work.inner)
        else:
            _now.open.add_work(work)
