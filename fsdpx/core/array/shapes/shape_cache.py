"""Results for arrays without data follow from shapes and formats, so a function is run once for each of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fsdpx.core.array.shapes.array import Root, ShapeArray, as_one
from fsdpx.core.array.shapes.flop_counter import INSIDE, Pass, Product, Work, fused, repeat

__all__ = ["known", "made_of", "plan_of"]

MOST = 4096
"""Calls that are remembered; when there are this many, all are forgotten."""

_results: dict[Any, Any] = {}


def known(call: Callable[..., Any], xp: Any, *arguments: Any, **options: Any) -> Any:
    """`as_one` of a function of a namespace, arrays, numbers and names; after a call with such arguments it is not run.

    Random numbers, windows and whatever else is a frozen dataclass are told apart by value."""
    arrays: list[ShapeArray] = []
    try:
        key = (call, xp, _key(arguments, arrays), _key(tuple(options.items()), arrays))
        result = _results.get(key)
    except TypeError:  # of something that can change
        return _worked(call, arrays, xp, *arguments, **options)[0]
    if result is not None:
        plan, work = result
        repeat(work)
        return made_of(plan, [a.root for a in arrays], arrays)
    found, work = _worked(call, arrays, xp, *arguments, **options)
    with suppress(TypeError):
        plan = plan_of(found, [a.root for a in arrays], arrays)
        if len(_results) >= MOST:
            _results.clear()
        _results[key] = plan, work
    return found


def _worked(call: Callable[..., Any], arrays: list[ShapeArray], *arguments: Any, **options: Any) -> tuple[Any, Work]:
    """One kernel: it reads the arrays that it is given and writes those that it gives."""
    with fused() as work:
        found = as_one(call, *arguments, **options)
    itemsize = next((a.itemsize for a in arrays if a.dtype.kind in "fV"), 4)
    kernel, windows = way_of(call, *arguments[1:], **options)
    named = Counter[Product]()
    for product, times in work.products.items():
        places = work.products.total()
        named[product._replace(itemsize=itemsize, kernel=kernel, places=places, windows=windows)] += times
    work.products = named
    inner = work.inner.total() * (min(itemsize, 4) if work.products else 4) // 4  # sums of other kernels are float32
    work.inner = Counter({getattr(call, "__name__", ""): inner})
    given = found if isinstance(found, tuple) else (found,)
    nbytes = sum(a.nbytes for a in (*arrays, *given) if isinstance(a, ShapeArray))
    work.passes = Counter({Pass(kernel, itemsize, nbytes): 1})
    repeat(work)
    return found, work


def way_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, float]:
    """The name of a kernel and of the way that it goes for such arguments, and `Product.windows`."""
    name, way = getattr(call, "__name__", INSIDE), getattr(call, "way", None)
    if way is None:
        return name, 1.0
    found, windows = way(*arguments, **options)
    return f"{name} {found}".rstrip(), windows


def _key(value: Any, arrays: list[ShapeArray]) -> Any:
    """What tells `value` from others; the arrays inside of it are added to `arrays`."""
    kind = type(value)
    if kind is ShapeArray:
        arrays.append(value)
        # arrays of one root share memory: what a result shares with them must be the same
        first = next(n for n, a in enumerate(arrays) if a.root is value.root)
        return value.shape, value.dtype, first, next(n for n, a in enumerate(arrays) if a is value)
    if isinstance(value, tuple):
        return kind, *[_key(one, arrays) for one in value]
    if value is None or isinstance(value, int | float | str | np.dtype | type) or _frozen(kind):
        return kind, value
    raise TypeError(f"{kind} may change")


def _frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def plan_of(
    value: Any, roots: list[Root], arrays: Sequence[ShapeArray] = (), constants: tuple[type, ...] = ()
) -> Any:
    """How to make such a value again: of an array its shape, dtype, number of the root and what the root takes, or
    which of `arrays` it is. A new root is added to `roots`. TypeError for what cannot be made again.

    constants: types of what stays as it is, beside numbers and text."""
    if isinstance(value, ShapeArray):
        same = next((n for n, a in enumerate(arrays) if a is value), None)
        if same is not None:
            return "argument", same
        place = next((n for n, root in enumerate(roots) if root is value.root), len(roots))
        if place == len(roots):
            roots.append(value.root)
        return ShapeArray, value.shape, value.dtype, place, value.root.nbytes
    if isinstance(value, tuple | list):
        return type(value), [plan_of(one, roots, arrays, constants) for one in value]
    if isinstance(value, dict):
        return dict, list(value), [plan_of(one, roots, arrays, constants) for one in value.values()]
    if value is None or isinstance(value, (int, float, str, *constants)):
        return None, value
    raise TypeError(f"{type(value)} is not known")


def made_of(plan: Any, roots: list[Root], arrays: Sequence[ShapeArray] = ()) -> Any:
    """The value of a plan, with new arrays on these roots and on new ones."""
    kind, value, *more = plan
    if kind is ShapeArray:
        dtype, place, nbytes = more
        if place == len(roots):
            roots.append(Root(nbytes))
        return ShapeArray(value, dtype, roots[place])
    if kind is None:
        return value
    if kind == "argument":
        return arrays[value]
    if kind is dict:
        return dict(zip(value, [made_of(one, roots, arrays) for one in more[0]], strict=True))
    parts = [made_of(one, roots, arrays) for one in value]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
