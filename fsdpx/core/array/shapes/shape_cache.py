"""Cache of results on shape-only arrays. Results depend only on shapes and dtypes, so a function runs only once for
each combination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fsdpx.core.array.shapes.array import ShapeArray, Storage, call_without_metering_temporaries
from fsdpx.core.array.shapes.flop_counter import (
    INNER_KERNEL,
    KernelPass,
    ProductCount,
    WorkCount,
    add_counted_work,
    counting_as_one_kernel,
)

__all__ = ["build_value_from_template", "call_cached", "make_template_to_rebuild_value"]

MAX_RESULTS = 4096
"""Maximum number of cached calls. When it is reached, the whole cache is cleared."""

_results: dict[Any, Any] = {}


def call_cached(call: Callable[..., Any], xp: Any, *arguments: Any, **options: Any) -> Any:
    """Return `call(xp, ...)` and count its work. The result and the work are cached: `call` does not run again if an
    earlier call had equal arguments. Arrays count as equal if they have the same shape and dtype.

    Arguments that are frozen dataclasses, such as ranges of random numbers, are compared by value."""
    arrays: list[ShapeArray] = []
    try:
        key = (call, xp, _make_shape_key(arguments, arrays), _make_shape_key(tuple(options.items()), arrays))
        result = _results.get(key)
    except TypeError:  # raised for a mutable argument, which cannot be hashed
        return _run_and_count_as_one_kernel(call, arrays, xp, *arguments, **options)[0]
    if result is not None:
        plan, work = result
        add_counted_work(work)
        return build_value_from_template(plan, [a.root for a in arrays], arrays)
    cached, work = _run_and_count_as_one_kernel(call, arrays, xp, *arguments, **options)
    with suppress(TypeError):
        plan = make_template_to_rebuild_value(cached, [a.root for a in arrays], arrays)
        if len(_results) >= MAX_RESULTS:
            _results.clear()
        _results[key] = plan, work
    return cached


def _run_and_count_as_one_kernel(
    call: Callable[..., Any], arrays: list[ShapeArray], *arguments: Any, **options: Any
) -> tuple[Any, WorkCount]:
    """Run a call and count it as one kernel that reads the array arguments and writes the array results. Return the
    result and the counted work."""
    with counting_as_one_kernel() as work:
        result = call_without_metering_temporaries(call, *arguments, **options)
    itemsize = next((a.itemsize for a in arrays if a.dtype.kind in "fV"), 4)
    kernel, windows = get_kernel_algorithm_and_windows(call, *arguments[1:], **options)
    named = Counter[ProductCount]()
    for product, times in work.products.items():
        places = work.products.total()
        named[product._replace(itemsize=itemsize, kernel=kernel, places=places, windows=windows)] += times
    work.products = named
    # count the bytes of float32 elements for kernels without matrix products, because these kernels compute in float32
    inner = work.inner.total() * (min(itemsize, 4) if work.products else 4) // 4
    work.inner = Counter({getattr(call, "__name__", ""): inner})
    given = result if isinstance(result, tuple) else (result,)
    nbytes = sum(a.nbytes for a in (*arrays, *given) if isinstance(a, ShapeArray))
    work.passes = Counter({KernelPass(kernel, itemsize, nbytes): 1})
    add_counted_work(work)
    return result, work


def get_kernel_algorithm_and_windows(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, float]:
    """Return two values that determine the cost of a kernel: a text with the kernel's name and its algorithm for these
    arguments, and the value of `ProductCount.windows`."""
    name, choose_algorithm = getattr(call, "__name__", INNER_KERNEL), getattr(call, "choose_algorithm", None)
    if choose_algorithm is None:
        return name, 1.0
    algorithm, windows = choose_algorithm(*arguments, **options)
    return f"{name} {algorithm}".rstrip(), windows


def _make_shape_key(value: Any, arrays: list[ShapeArray]) -> Any:
    """Return a hashable key for `value`. In the key, each array is replaced with its shape, its dtype, and two indices
    in `arrays`. The first index is that of the first array that uses the same memory; the second index is that of the
    first array that is the same object. Append the arrays to `arrays`."""
    kind = type(value)
    if kind is ShapeArray:
        arrays.append(value)
        # the key records which arrays share memory, because the result may share their memory
        first = next(n for n, a in enumerate(arrays) if a.root is value.root)
        return value.shape, value.dtype, first, next(n for n, a in enumerate(arrays) if a is value)
    if isinstance(value, tuple):
        return kind, *[_make_shape_key(one, arrays) for one in value]
    if value is None or isinstance(value, int | float | str | np.dtype | type) or _is_frozen_dataclass(kind):
        return kind, value
    raise TypeError(f"{kind} may change")


def _is_frozen_dataclass(cls: type) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def make_template_to_rebuild_value(
    value: Any, roots: list[Storage], arrays: Sequence[ShapeArray] = (), constants: tuple[type, ...] = ()
) -> Any:
    """Return a description of `value` that `build_value_from_template` uses to build an equal value with new arrays.

    An array in `arrays` is described by its index. Any other array is described by its shape, its dtype, and the index
    in `roots` of the memory that it uses (its root). New roots are appended to `roots`. Numbers, text, and values of
    the types in `constants` are kept as they are. Raise TypeError for other values.
    """
    if isinstance(value, ShapeArray):
        same = next((n for n, a in enumerate(arrays) if a is value), None)
        if same is not None:
            return "argument", same
        place = next((n for n, root in enumerate(roots) if root is value.root), len(roots))
        if place == len(roots):
            roots.append(value.root)
        return ShapeArray, value.shape, value.dtype, place, value.root.nbytes
    if isinstance(value, tuple | list):
        return type(value), [make_template_to_rebuild_value(one, roots, arrays, constants) for one in value]
    if isinstance(value, dict):
        return (
            dict,
            list(value),
            [make_template_to_rebuild_value(one, roots, arrays, constants) for one in value.values()],
        )
    if value is None or isinstance(value, (int, float, str, *constants)):
        return None, value
    raise TypeError(f"{type(value)} is not known")


def build_value_from_template(plan: Any, roots: list[Storage], arrays: Sequence[ShapeArray] = ()) -> Any:
    """Build a value from a description returned by `make_template_to_rebuild_value`. `roots` lists the memory that the
    new arrays use. If it does not contain the memory of an array yet, this memory is created and appended."""
    kind, value, *more = plan
    if kind is ShapeArray:
        dtype, place, nbytes = more
        if place == len(roots):
            roots.append(Storage(nbytes))
        return ShapeArray(value, dtype, roots[place])
    if kind is None:
        return value
    if kind == "argument":
        return arrays[value]
    if kind is dict:
        return dict(zip(value, [build_value_from_template(one, roots, arrays) for one in more[0]], strict=True))
    parts = [build_value_from_template(one, roots, arrays) for one in value]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
