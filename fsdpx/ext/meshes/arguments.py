"""Checks the arguments that ranks pass to `Partition`. An error on one rank is raised on all ranks, so that no rank
waits forever for another."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fsdpx.core.comm.default_communicator import all_gather_plain_value
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.ext.meshes.graph_building import GraphArguments, raise_first_error
from fsdpx.ext.meshes.splitting import assign_parts

__all__ = [
    "agree_on_optional_arguments",
    "as_integer_array",
    "parse_count",
    "parse_graph",
    "parse_or_raise_on_all_ranks",
    "parse_owned_mask",
    "parse_replicated_graph_arguments",
    "require_same_graph_on_all_ranks",
    "to_array",
]  # fmt: skip

T = TypeVar("T")
UNKNOWN = (0, 0)
"""Shape of an array that a rank passes as [] because it has no nodes or edges. The number of columns is unknown."""


def parse_or_raise_on_all_ranks(comm: Any, parse: Callable[[], T]) -> T:
    """Return the result of `parse`, which checks this rank's arguments without communication. If it fails on any rank,
    raise ConfigError on all ranks, with the error from the first rank that failed. Collective."""
    found: list[T] = []
    failure: Exception | None = None
    try:
        found.append(parse())
    except Exception as error:  # any error must be sent to the other ranks, which would otherwise wait for this rank
        failure = error
    text = "" if failure is None else str(failure)
    if failure is not None and not isinstance(failure, FsdpxError):
        text = f"{type(failure).__name__}: {text}"
    try:
        raise_first_error(comm, text)
    except ConfigError as error:
        raise error from failure
    return found[0]


def parse_count(name: str, given: Any, of: str) -> int:
    """Return the count `given`, which must be a nonnegative integer. `of` names the counted items in error messages."""
    try:
        count = operator.index(given)
    except TypeError:
        count = -1
    if count < 0:
        raise ConfigError(f"{name}={given!r}: give the number of {of}")
    return count


def as_integer_array(name: str, given: Any, dims: int) -> np.ndarray:
    """Return `given` as an int64 array with `dims` dims. Its elements must be nonnegative integers. [] stands for an
    empty array."""
    array = to_array(name, given)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.shape == (0,):
        array = array.reshape((0,) * dims)
    if array.dtype.kind not in "iu" or array.ndim != dims:
        raise ConfigError(f"{name} must be whole numbers with {dims} dims, got {array.dtype} of shape {array.shape}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= np.iinfo(np.int64).max:
        wrong = array.min() if array.min() < 0 else array.max()
        raise ConfigError(f"{name} has {wrong}, and must be at least 0 and below 2**63")
    return array.astype(np.int64)


def parse_owned_mask(given: Any, count: int) -> np.ndarray | None:
    """Return the argument `owned_mask` as a bool array, or None if it is not given."""
    if given is None:
        return None
    mask = to_array("owned_mask", given)
    mask = mask.astype(bool) if mask.shape == (0,) else mask
    if mask.dtype != bool or mask.shape != (count,):
        raise ConfigError(f"owned_mask must be {count} bools, got {mask.dtype} of shape {mask.shape}")
    return mask


def parse_graph(
    numbers: np.ndarray, owned: np.ndarray | None, edges: Any, positions: Any, edge_features: Any,
    undirected: bool | None,
) -> GraphArguments:  # fmt: skip
    """Return this rank's arguments as `GraphArguments`. Raise ConfigError if they are inconsistent."""
    table = as_integer_array("edges", edges, 2)
    table = table.reshape(2, 0) if table.shape == UNKNOWN else table
    if table.shape[0] != 2:
        raise ConfigError(f"edges must be (2, edges), rows of senders and receivers, got {table.shape}: transpose it")
    if table.size and table.max() >= numbers.size:
        raise ConfigError(f"edges has row {table.max()}, but there are {numbers.size} rows of nodes")
    values, twice = np.unique(numbers, return_counts=True)
    if (twice > 1).any():
        raise ConfigError(f"node {values[twice > 1][0]} has two rows: give each node once")
    count = numbers.size if owned is None else int(owned.sum())
    places = _convert_features_to_array("positions", positions, {numbers.size, count})
    features = _convert_features_to_array("edge_features", edge_features, {table.shape[1]})
    if owned is None and places is not None and len(places) != numbers.size:
        raise ConfigError("positions must have all rows")
    if not isinstance(undirected, bool | np.bool_ | None):
        raise ConfigError(f"undirected={undirected!r}: True, False or None")
    if undirected and features is not None:
        raise ConfigError(
            "undirected=True takes no edge_features, which may differ between the two directions: pass both edges"
        )
    return GraphArguments(
        numbers, owned, table, places, features, undirected=None if undirected is None else bool(undirected)
    )


def parse_replicated_graph_arguments(
    ranks: int, nodes: Any, edges: Any, parts: Any, method: str, positions: Any, edge_features: Any,
    undirected: bool | None,
) -> tuple[GraphArguments, np.ndarray]:  # fmt: skip
    """Parse the arguments for a graph that every rank has in full. Return them as `GraphArguments`, and the rank that
    owns each node."""
    count = parse_count("nodes", nodes, "nodes of the whole graph")
    numbers = np.arange(count)
    given = parse_graph(numbers, numbers >= 0, edges, positions, edge_features, undirected)
    if parts is None:
        return given, assign_parts(method, ranks, count, given.edges, given.positions)
    chosen = as_integer_array("parts", parts, 1)
    if chosen.size != count or (count and chosen.max() >= ranks):
        raise ConfigError(f"parts must be {count} numbers of ranks, from 0 to {ranks - 1}")
    return given, chosen


def agree_on_optional_arguments(comm: Any, given: GraphArguments) -> GraphArguments:
    """Check that all ranks pass the same optional arguments, with the same numbers of columns. If they do not, raise
    ConfigError on all ranks. Return this rank's arguments; its empty arrays get as many columns as the arrays of the
    other ranks. Collective."""
    widths = {
        name: None if a is None else a.shape[1] if a.shape != UNKNOWN else -1
        for name, a in (("positions", given.positions), ("edge_features", given.edge_features))
    }
    facts = {"owned_mask": given.owned is not None, "undirected": given.undirected, **widths}
    everyone = all_gather_plain_value(comm, list(facts.values()))
    for name, *values in zip(facts, *everyone, strict=True):
        known = [(rank, value) for rank, value in enumerate(values) if value is None or value >= 0]
        for rank, value in known:
            if value != known[0][1]:
                raise ConfigError(f"Partition: {name}: rank {known[0][0]} has {known[0][1]}, and rank {rank} {value}")
        if facts[name] == -1 and known:
            empty: Any = {name: np.zeros((0, known[0][1]))}
            given = given._replace(**empty)
    return given


def require_same_graph_on_all_ranks(comm: Any, given: GraphArguments, parts: np.ndarray) -> None:
    """Raise ConfigError on all ranks unless every rank passes the same graph and the same `parts`. Collective."""
    arrays = {"edges": given.edges, "parts": parts, "positions": given.positions, "edge_features": given.edge_features}
    sums = {name: 0 if a is None else zlib.crc32(np.ascontiguousarray(a).tobytes()) for name, a in arrays.items()}
    everyone = all_gather_plain_value(comm, list(sums.values()))
    for rank, others in enumerate(everyone):
        for name, ours, theirs in zip(sums, everyone[0], others, strict=True):
            if ours != theirs:
                raise ConfigError(
                    f"Partition.from_replicated_graph: rank {rank} passes other {name} than rank 0: pass the same graph"
                )


def _convert_features_to_array(name: str, given: Any, rows: set[int]) -> np.ndarray | None:
    """Return `given` as a float64 array, or None if it is None. The number of its rows must be in `rows`."""
    if given is None:
        return None
    array = to_array(name, given)
    if array.shape == (0,) and 0 in rows:
        array = array.reshape(UNKNOWN)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[0] not in rows:
        wanted = " or ".join(map(str, sorted(rows)))
        raise ConfigError(f"{name} must be ({wanted}, n) numbers, got {array.dtype} of shape {array.shape}")
    array = np.ascontiguousarray(array, np.float64)
    if wrong := np.argwhere(~np.isfinite(array)).tolist():
        raise ConfigError(f"{name} has {array[tuple(wrong[0])]} in row {wrong[0][0]}: give finite numbers")
    return array


def to_array(name: str, given: Any) -> np.ndarray:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:  # raised if rows differ in length
        raise ConfigError(f"{name} must be an array: {error}") from error
