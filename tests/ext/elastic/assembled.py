"""Whole tensors from the parts that ranks hold, for tests: element by element, the slow and plain way."""

from collections.abc import Iterable

import numpy as np

from fsdpx.core.checkpoint.local_shards import LocalShard
from fsdpx.ext.elastic.reshard import describe_missing_elements, describe_shard
from fsdpx.nn.layer import ParameterSpec

Tensors = dict[str, np.ndarray]


def bits(array: np.ndarray) -> np.ndarray:
    """What is compared: NaN has many."""
    return np.ascontiguousarray(array).view(np.uint8)


def assembled(parts: Iterable[LocalShard]) -> Tensors:
    """Flat tensors by name; where several parts have an element, their bits agree."""
    found: Tensors = {}
    there: Tensors = {}
    for part in parts:
        size = part.spec.size
        whole = found.setdefault(part.name, np.zeros(size, part.array.dtype))
        known = there.setdefault(part.name, np.zeros(size, bool))
        index = elements(part)
        again = known[index]
        np.testing.assert_array_equal(bits(whole[index][again]), bits(np.asarray(part.array)[again]), part.name)
        whole[index], known[index] = part.array, True
    assert all(known.all() for known in there.values())
    return found


def elements(part: LocalShard) -> np.ndarray:
    """Of the whole tensor, in the order in which `part` has them."""
    runs = [run for block in part.iterate_blocks(1 << 30) for run in block.runs]
    return np.concatenate([np.arange(*run) for run in runs]) if runs else np.empty(0, int)


def missing(ranks: Iterable[Iterable[LocalShard]], wanted: dict[str, ParameterSpec]) -> list[str]:
    """What no rank has, in words."""
    return describe_missing_elements([[describe_shard(one) for one in parts] for parts in ranks], wanted)


def demand_equal(parts: Iterable[LocalShard], whole: Tensors) -> None:
    for part in parts:
        np.testing.assert_array_equal(bits(part.array), bits(whole[part.name][elements(part)]), part.name)
