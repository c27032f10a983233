"""Where a model is cut into pipeline stages: by hand, or such that the largest cost of a stage is minimal."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from fsdpx.errors import ConfigError
from fsdpx.nn.embedding import Embedding, TokenEmbedding
from fsdpx.nn.sort import Node, Sorted
from fsdpx.words import demand_match

__all__ = ["Costs", "Stages", "balanced", "cut_stages", "deal"]

Costs = Mapping[str, float]
"""Pattern of layer paths (fnmatch; the first that matches wins) -> cost per sample, in any unit."""


Stages = Sequence[str | int] | Mapping[str, int]
"""The first layers of all stages, or their numbers of layers; or path pattern -> rank of the pipe."""


def deal(
    model: Sorted, stages: Stages | None, ranks: int
) -> tuple[Sequence[str | int] | None, int | tuple[int, ...] | None]:
    """The stages as a list, and their number, or the rank of each if a map says so. None where nothing is given.

    A layer that no pattern of a map matches is on the rank of the layer before it. A pipe of one rank has one stage,
    whatever is given."""
    if stages is None or (ranks == 1 and isinstance(stages, Mapping | list | tuple)):
        return None, None
    if isinstance(stages, Mapping):
        return _mapped(model.nodes, stages, ranks)
    if not isinstance(stages, list | tuple):
        raise ConfigError(
            f"stages={stages!r}: a list is needed, of the first layers of all stages or of their sizes, or a dict from "
            "layers to ranks of the pipe"
        )
    if len(stages) < ranks:
        raise ConfigError(
            f"stages={list(stages)}: {len(stages)} stages cannot be dealt out to {ranks} ranks of the pipe: each has "
            "at least one"
        )
    return stages, len(stages)


def _mapped(nodes: Sequence[Node], ranks_of: Mapping[str, int], ranks: int) -> tuple[list[str | int], tuple[int, ...]]:
    for pattern, rank in ranks_of.items():
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < ranks:
            raise ConfigError(f"stages: {pattern!r} is on {rank!r}, and the pipe has ranks 0 to {ranks - 1}")
        if not any(_is_of(node, pattern) for node in nodes):
            raise ConfigError(f"stages: the pattern {pattern!r} matches no layer; there are {_names(nodes)}")
    firsts: list[str | int] = []
    home: list[int] = []
    for node in nodes:
        rank = next((rank for pattern, rank in ranks_of.items() if _is_of(node, pattern)), home[-1] if home else -1)
        if rank < 0:
            raise ConfigError(f"stages: no pattern matches the first layer, {nodes[0].path!r}: say on which rank it is")
        if not home or rank != home[-1]:
            firsts.append(node.path)
            home.append(int(rank))
    if idle := [str(rank) for rank in range(ranks) if rank not in home]:
        raise ConfigError(f"stages: no layer is on rank {', '.join(idle)} of the pipe, which has {ranks} ranks")
    return firsts, tuple(home)


def _is_of(node: Node, pattern: str) -> bool:
    """Whether a pattern matches the layer, or one that it is part of."""
    return fnmatchcase(node.path, pattern) or fnmatchcase(node.path, f"{pattern}.*")


def cut_stages(
    model: Sorted,
    count: int,
    stages: Sequence[str | int] | None = None,
    costs: Costs | None = None,
    why: str = "",
) -> tuple[int, ...]:
    """The index of the first node of each of `count` stages. why: there are so many.

    stages: the path of the first layer of each stage, or the number of layers of each stage; None: automatic.
    costs: for the automatic cut; a layer that no pattern matches costs as much as it has elements of weight matrices.
    """
    nodes = model.nodes
    if count > len(nodes):
        layers = "1 layer" if len(nodes) == 1 else f"{len(nodes)} layers"
        raise ConfigError(
            f"{count} stages{why}, but the model has only {layers} to cut between ({_names(nodes)}): use fewer "
            + ("ranks in the pipe, or '1f1b', which has one stage on each" if why else "stages")
        )
    if stages is None:
        return balanced(_costs(nodes, costs), count)
    if len(stages) != count:
        raise ConfigError(f"stages={list(stages)}: {len(stages)} stages are named, the pipe has {count}")
    starts = _by_number(nodes, stages) if _numbers(stages) else _by_name(nodes, stages)
    if starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:], strict=False)):
        raise ConfigError(
            f"stages={list(stages)}: stages follow each other, and the first begins at {nodes[0].path!r}; "
            f"the layers are, in this order, {_names(nodes)}"
        )
    return starts


def balanced(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """Where each of `count` non-empty runs begins, such that the largest cost of a run is as small as possible.

    Bisection over that cost; runs are filled from the left (chains-on-chains partitioning, Pinar and Aykanat 2004)."""
    low, high = max(costs), max(sum(costs), max(costs))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(costs, middle, count)) <= count else (middle, high)
    starts = _filled(costs, high, count)
    while len(starts) < count:  # fewer runs were enough: the most expensive one is split
        ends = [*starts[1:], len(costs)]
        long = [i for i in range(len(starts)) if ends[i] - starts[i] > 1]
        i = max(long, key=lambda i: sum(costs[starts[i] : ends[i]]))
        starts.insert(i + 1, (starts[i] + ends[i] + 1) // 2)
    return tuple(starts)


def _filled(costs: Sequence[float], limit: float, count: int) -> list[int]:
    """Runs of at most `limit`, filled from the left."""
    starts, total = [0], 0.0
    for i, cost in enumerate(costs):
        if total + cost > limit * (1 + 1e-12) and i > starts[-1]:
            starts.append(i)
            total = 0.0
        total += cost
    return starts


def _numbers(stages: Sequence[str | int]) -> bool:
    """Whether stages are given by numbers of layers instead of names."""
    kinds = {type(stage) for stage in stages}
    if kinds not in ({int}, {str}):
        raise ConfigError(f"stages={list(stages)}: name the first layers of all stages, or give numbers of layers")
    return kinds == {int}


def _costs(nodes: Sequence[Node], costs: Costs | None) -> list[float]:
    if costs is not None:
        _check_costs(nodes, costs)
    return [_cost(node, costs or {}) for node in nodes]


def _check_costs(nodes: Sequence[Node], costs: Costs) -> None:
    if not isinstance(costs, Mapping):
        raise ConfigError(f"costs={costs!r}: a dict is needed, from patterns of layer paths to numbers")
    for pattern, cost in costs.items():
        if not isinstance(cost, int | float) or not 0 <= cost < float("inf"):
            raise ConfigError(f"costs: {pattern!r} is {cost!r}, a number of at least 0 is needed")
    demand_match("costs", costs, [node.path for node in nodes], "layer")


def _cost(node: Node, costs: Costs) -> float:
    for pattern, cost in costs.items():
        if fnmatchcase(node.path, pattern):
            return float(cost)
    if isinstance(node.layer, Embedding | TokenEmbedding):
        return 0.0
    return float(sum(spec.size for spec in node.layer.specs().values() if len(spec.shape) > 1))


def _by_number(nodes: Sequence[Node], counts: Sequence[Any]) -> tuple[int, ...]:
    if any(n < 1 for n in counts) or sum(counts) != len(nodes):
        raise ConfigError(
            f"stages={list(counts)}: each stage has at least one layer, all together {len(nodes)}: {_names(nodes)}"
        )
    return tuple(sum(counts[:i]) for i in range(len(counts)))


def _by_name(nodes: Sequence[Node], names: Sequence[Any]) -> tuple[int, ...]:
    paths = [node.path for node in nodes]
    unknown = [name for name in names if name not in paths]
    if unknown:
        raise ConfigError(f"stages: there is no layer {unknown[0]!r} to begin a stage with; there are {_names(nodes)}")
    return tuple(paths.index(name) for name in names)


def _names(nodes: Sequence[Node]) -> str:
    shown = [repr(node.path) for node in nodes[:12]]
    return ", ".join(shown + ([f"... {nodes[-1].path!r}"] if len(nodes) > 12 else []))
