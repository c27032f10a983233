"""The layout of a model's parameters: units (layers whose parameters are gathered and whose gradients are reduced
together, like an FSDP unit), pages (flat buffers that hold the parameters of a unit), and pipeline stages (chosen by
the user, or balanced by cost)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.name_hints import require_pattern_matches
from fsdpx.core.program import find_values_without_gradient
from fsdpx.core.state.flat_parameters import Page
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import ParameterSpec, join_path
from fsdpx.nn.layer_list import LayerList, Node, parameter_specs

__all__ = [
    "GROUP_BYTES",
    "LayerCosts",
    "ModelLayout",
    "ModelSpread",
    "Stages",
    "Unit",
    "lay_out_model",
    "list_values_released_by_node",
    "parse_stages_option",
    "require_enough_layers",
    "split_into_balanced_runs",
    "split_into_stages",
]  # fmt: skip


GROUP_BYTES = 1 << 20
"""Consecutive small layers are grouped until they have this many bytes of parameters. This is large enough on common
networks, where the transfer time of 1 MiB exceeds the latency."""

ReductionRuleFunction = Callable[[Sequence[str]], tuple[int, bool]]
"""Function that takes the names of a parameter and returns a pair: the index of the rule for reducing its gradient, and
whether the reduced value of an element depends on the other elements in its page (flat parameter buffer). If the result
depends on other elements, a parameter that all tensor ranks hold in full must not share a page with sharded parameters.
Sharded parameters differ between tensor ranks, so the results for the full parameter would differ too."""
PageKind = tuple[bool, bool, str, int, bool]
"""Properties that all parameters in a page (flat parameter buffer) have in common (see `kind_of` in
`lay_out_model`)."""


@dataclass(frozen=True)
class ModelSpread:
    """How a model is distributed over the pipe and tensor axes. By default, each axis has one rank.

    Attributes
    ----------
    starts, home : the first node (layer call) of each stage, and the pipeline rank of each stage
    rank, width : this rank's index on the tensor axis, and the number of tensor ranks
    partial : names of the parameters for which each tensor rank computes only a partial sum of the gradient
    copies_all_ties : whether every layer with a tied parameter gets its own copy, even on the same rank; the order in
        which gradients are added then does not depend on how the model is split
    """

    starts: tuple[int, ...] = (0,)
    home: tuple[int, ...] = (0,)
    rank: int = 0
    width: int = 1
    partial: frozenset[str] = frozenset()
    copies_all_ties: bool = False

    def stage_of(self, node: int) -> int:
        return bisect_right(self.starts, node) - 1

    def rank_of(self, node: int) -> int:
        """Return the pipeline rank that runs node (layer call) number `node` of the model."""
        return self.home[self.stage_of(node)]

    def local_shape_of(self, spec: ParameterSpec) -> tuple[int, ...]:
        """Return the shape of the part of a parameter that this tensor rank holds."""
        return spec.local_shape(self.rank, self.width)


@dataclass(frozen=True)
class Unit:
    """Consecutive nodes (layer calls) that run together. Parameters are gathered and gradients are reduced once for all
    nodes of a unit.

    Attributes
    ----------
    inputs, outputs : IDs (integers) of activations, as in `LayerList`
    stage : index of the unit's pipeline stage
    trains : for each node, whether it has trainable parameters
    """

    index: int
    nodes: tuple[Node, ...]
    pages: tuple[int, ...]  # indices of the pages that hold the unit's parameters
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stage: int = 0
    trains: tuple[bool, ...] = ()

    @cached_property
    def released_values(self) -> list[list[int]]:
        """For each node (layer call) of the unit, the IDs (integers) of the activations that no later node of the unit
        uses. Outputs of the unit are excluded."""
        return list_values_released_by_node(self.nodes, self.outputs)

    @property
    def name(self) -> str:
        first, last = self.nodes[0].path, self.nodes[-1].path
        return first if first == last else f"{first}..{last}"


def list_values_released_by_node(nodes: Iterable[Node], needed: Container[int]) -> list[list[int]]:
    """For each node (layer call), return the IDs (integers) of the activations that no later node uses. These
    activations can be released after the node has run. IDs in `needed` are excluded."""
    last = {v: n for n, node in enumerate(nodes) for v in (*node.inputs, *node.outputs)}
    released: list[list[int]] = [[] for _ in range(max(last.values(), default=-1) + 1)]
    for v, n in last.items():
        if v not in needed:
            released[n].append(v)
    return released


@dataclass(frozen=True)
class ModelLayout:
    """Layout of a model's parameters: units (groups of layers) in execution order, and pages (flat buffers).

    Attributes
    ----------
    specs : spec of each full parameter, keyed by its canonical name
    ties : for each alias of a tied parameter, the name under which a page stores the parameter
    aliases : for each alias of a tied parameter, the canonical name of the parameter
    inputs, outputs : names of the model's inputs (`inputs`), and IDs of the activations that are its outputs
        (`outputs`)
    twins : groups of pages with copies of the same tied parameter; each group begins with the page of the first layer
        that uses the parameter
    """

    units: tuple[Unit, ...]
    pages: tuple[Page, ...]
    specs: dict[str, ParameterSpec]
    ties: dict[str, str]
    aliases: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]
    spread: ModelSpread
    twins: tuple[tuple[int, ...], ...] = ()

    def canonical_name(self, name: str) -> str:
        return self.aliases.get(name, name)

    def get_name_in_page(self, name: str) -> str:
        """Return the name under which pages (flat buffers) store the parameter `name`."""
        return self.ties.get(name, name)

    @property
    def names(self) -> dict[str, str]:
        """A dict that maps each name of a parameter (canonical name or alias) to its canonical name."""
        return {**{name: name for name in self.specs}, **self.aliases}

    def find_parameter_names_matching(self, pattern: str, argument: str) -> frozenset[str]:
        """Return the canonical names of the trainable parameters whose canonical name or alias matches `pattern`
        (fnmatch). If no parameter matches, raise ConfigError. The error message names `argument` as the argument that
        contains the pattern."""
        require_pattern_matches(argument, [pattern], self.names)
        names = {name for word, name in self.names.items() if fnmatchcase(word, pattern)}
        return frozenset(name for name in names if self.specs[name].trainable)

    def list_trainable_page_flags(self, frozen: Container[str] = ()) -> tuple[bool, ...]:
        """For each page (flat parameter buffer), return whether any of its parameters is trained. `frozen` holds the
        canonical names of the parameters that are currently frozen."""
        return tuple(p.trainable and any(f.source not in frozen for f in p.fields) for p in self.pages)

    def find_values_without_gradient(self, frozen: Container[str] = (), wanted: Container[int] = ()) -> frozenset[int]:
        """Return the IDs (integers) of the activations that need no gradients. `frozen` holds the canonical names of
        the parameters that are currently frozen, and `wanted` holds the IDs of the inputs for which the caller wants
        gradients."""
        trained = {name for name, spec in self.specs.items() if spec.trainable and name not in frozen}
        nodes = [node for unit in self.units for node in unit.nodes]
        named = zip(_list_node_parameters(nodes, self.aliases), nodes, strict=True)
        rows = ((names, node.inputs, node.outputs) for names, node in named)
        return find_values_without_gradient(rows, trained, (v for v in range(len(self.inputs)) if v not in wanted))

    @cached_property
    def statistic_specs(self) -> dict[str, ParameterSpec]:
        """The specs of all running statistics, keyed by canonical name."""
        return {name: spec for name, spec in self.specs.items() if spec.state}

    @cached_property
    def tied_copy_pages(self) -> frozenset[int]:
        """The indices of the pages (flat parameter buffers) that hold a copy of a tied parameter. For each copy, an
        earlier page holds the original."""
        return frozenset(p for group in self.twins for p in group[1:])

    @property
    def size(self) -> int:
        """The total number of elements of all full parameters. Tied parameters count once."""
        return sum(spec.size for spec in self.specs.values() if not spec.state)


def lay_out_model(
    model: LayerList,
    itemsize: int,
    group_bytes: int,
    frozen: Sequence[str],
    spread: ModelSpread,
    reduction_rule: ReductionRuleFunction,
) -> ModelLayout:
    """Group the layers of a model into units, and lay out their parameters in pages (flat buffers).

    Consecutive layers are added to a unit until it has `group_bytes` bytes of parameters, with `itemsize` bytes per
    element. Parameters whose names match a pattern (fnmatch) in `frozen` are not trained and get separate pages."""
    if group_bytes < 0:
        raise ConfigError(f"group_bytes={group_bytes}: a number of bytes, 0 or more")
    specs = _make_specs_with_frozen(model, frozen)
    ties, copies = _split_shared_and_copied_ties(model, spread)
    held = specs | {alias: specs[name] for alias, name in copies.items()}
    owned = _list_first_used_parameters_by_node(model, ties, held)
    sizes = [sum(_count_local_elements(held[n], spread) for n in names) * itemsize for names in owned]
    ends = [*spread.starts[1:], len(owned)]
    groups = [
        g
        for a, b in zip(spread.starts, ends, strict=True)
        for g in _group_nodes_by_minimum_weight(sizes[a:b], group_bytes, a)
    ]
    alone = {*copies, *copies.values(), *_find_ties_across_units(model, groups)}
    rules = {name: reduction_rule(names) for name, names in _group_names_by_parameter(model, specs).items()}

    def kind_of(name: str) -> PageKind:
        """Return the properties that all parameters in a page must have in common, as a tuple: whether the parameter is
        frozen, whether tensor ranks compute partial sums of its gradient, its name if it needs its own page, the index
        of its reduction rule, and whether it must be separate from sharded parameters.

        A tied parameter that several units (groups of layers) use gets its own page (flat buffer). The page is gathered
        for each of these units, and its full gradient is kept from the first unit to the last. If the page held other
        parameters too, their gradients would have to be kept just as long."""
        canonical_name, spec = copies.get(name, name), held[name]
        rule, together = rules.get(canonical_name, (0, False))
        apart = together and spread.width > 1 and spec.cut is None
        number = rule if spec.trainable else 0
        return not spec.trainable, canonical_name in spread.partial, name if name in alone else "", number, apart

    pages: list[Page] = []
    for group in groups:
        names = [name for i in group for name in owned[i]]
        for (still, partial, _, rule, _), chosen in _group_parameters_by_page_kind(names, kind_of):
            shapes = [(n, spread.local_shape_of(held[n])) for n in chosen]
            pages.append(Page.from_shapes(len(pages), shapes, not still, partial, copies, rule))
    home = {f.name: page.index for page in pages for f in page.fields}
    twins: dict[str, list[int]] = {}
    for alias, name in copies.items():
        twins.setdefault(name, [home[name]]).append(home[alias])
    last_use = _find_last_readers(model)
    trained = [any(specs[name].trainable for name in names) for names in _list_node_parameters(model.nodes, model.ties)]
    units = tuple(_make_unit(k, group, model, ties, home, last_use, spread, trained) for k, group in enumerate(groups))
    groups_of = tuple(tuple(sorted(group)) for group in twins.values())
    return ModelLayout(
        units, tuple(pages), specs, ties, dict(model.ties), model.inputs, model.outputs, spread, groups_of
    )


def _count_local_elements(spec: ParameterSpec, spread: ModelSpread) -> int:
    """Return the number of elements of a parameter that each tensor rank holds, rounded up so that it is the same on
    all tensor ranks."""
    return spec.size if spec.cut is None else -(-spec.size // spread.width)


def _split_shared_and_copied_ties(model: LayerList, spread: ModelSpread) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts that map aliases of tied parameters to canonical names: one for aliases that use the parameter's
    own page, and one for aliases that get a copy of the parameter."""
    user = {join_path(node.path, local): i for i, node in enumerate(model.nodes) for local in node.layer.specs()}
    shared: dict[str, str] = {}
    copies: dict[str, str] = {}
    for alias, name in model.ties.items():
        far = alias in user and spread.rank_of(user[alias]) != spread.rank_of(user[name])
        (copies if far or spread.copies_all_ties else shared)[alias] = name
    return shared, copies


def _find_ties_across_units(model: LayerList, groups: Sequence[Sequence[int]]) -> set[str]:
    """Return the names of the tied parameters that more than one unit (group of layers) uses."""
    used = _list_node_parameters(model.nodes, model.ties)
    units = [{name for i in group for name in used[i]} for group in groups]
    return {name for name in model.ties.values() if sum(name in unit for unit in units) > 1}


def _group_parameters_by_page_kind(
    names: Iterable[str], kind: Callable[[str], PageKind]
) -> list[tuple[PageKind, list[str]]]:
    """Distribute the parameters of a unit (group of layers) over pages (flat buffers). Return a sorted list with one
    pair (common properties of its parameters, names of its parameters) for each page."""
    pages: dict[PageKind, list[str]] = {}
    for name in names:
        pages.setdefault(kind(name), []).append(name)
    return sorted(pages.items())


def _group_names_by_parameter(model: LayerList, specs: Iterable[str]) -> dict[str, list[str]]:
    """Return a dict that maps the canonical name of each parameter to a list of all its names: the canonical name and
    its aliases."""
    return {name: [name, *(a for a, n in model.ties.items() if n == name)] for name in specs}


def _make_specs_with_frozen(model: LayerList, frozen: Sequence[str]) -> dict[str, ParameterSpec]:
    specs = parameter_specs(model)
    names = _group_names_by_parameter(model, specs)
    require_pattern_matches("frozen", frozen, [name for both in names.values() for name in both])
    return {
        name: replace(spec, trainable=False) if any(fnmatchcase(n, p) for p in frozen for n in names[name]) else spec
        for name, spec in specs.items()
    }


def _list_node_parameters(nodes: Iterable[Node], aliases: Mapping[str, str]) -> list[list[str]]:
    """For each node (layer call), return the canonical names of its parameters."""
    names = ([join_path(node.path, local) for local in node.layer.specs()] for node in nodes)
    return [[aliases.get(name, name) for name in some] for some in names]


def _list_first_used_parameters_by_node(
    model: LayerList, ties: dict[str, str], specs: dict[str, ParameterSpec]
) -> list[list[str]]:
    """For each node (layer call), return the names of its parameters that no earlier node uses. Running statistics are
    excluded."""
    seen: set[str] = set()
    owned = []
    for node in model.nodes:
        names = [ties.get(full, full) for full in (join_path(node.path, local) for local in node.layer.specs())]
        fresh = [n for n in dict.fromkeys(names) if n not in seen and not specs[n].state]
        seen.update(fresh)
        owned.append(fresh)
    return owned


def _group_nodes_by_minimum_weight(weights: list[int], limit: int, start: int) -> list[list[int]]:
    """Group consecutive nodes (layer calls), numbered from `start`. A group is complete when its `weights` add up to at
    least `limit`. Leftover nodes are added to the last group."""
    groups: list[list[int]] = []
    current: list[int] = []
    total = 0
    for i, weight in enumerate(weights, start):
        current.append(i)
        total += weight
        if total >= max(limit, 1):
            groups.append(current)
            current, total = [], 0
    if current and groups and (total < limit or total == 0):
        groups[-1].extend(current)
    elif current:
        groups.append(current)
    return groups


def _find_last_readers(model: LayerList) -> dict[int, int]:
    """Return a dict that maps the ID (an integer) of each activation to the index of the last node (layer call) that
    reads it. For an output of the model, the index is the number of nodes, as if the output were read after the last
    node."""
    uses = {v: i for i, node in enumerate(model.nodes) for v in node.inputs}
    return uses | dict.fromkeys(model.outputs, len(model.nodes))


def _make_unit(
    index: int,
    group: list[int],
    model: LayerList,
    ties: dict[str, str],
    home: dict[str, int],
    last_use: dict[int, int],
    spread: ModelSpread,
    trained: Sequence[bool],
) -> Unit:
    nodes = [model.nodes[i] for i in group]
    inside = {v for node in nodes for v in node.outputs}
    inputs = dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside)
    outputs = tuple(v for node in nodes for v in node.outputs if last_use.get(v, -1) > group[-1])
    names = [ties.get(f, f) for node in nodes for f in (join_path(node.path, n) for n in node.layer.specs())]
    pages = dict.fromkeys(home[n] for n in names if n in home)
    trains = tuple(trained[i] for i in group)
    return Unit(index, tuple(nodes), tuple(pages), tuple(inputs), outputs, spread.stage_of(group[0]), trains)


LayerCosts = Mapping[str, float]
"""Maps patterns (fnmatch) for layer paths to the cost of a layer per sample, in arbitrary units. The first matching
pattern applies."""


Stages = Sequence[str | int] | Mapping[str, int]
"""The first layer of each stage, the number of layers in each stage, or a dict that maps path patterns to pipeline
ranks."""


def parse_stages_option(
    model: LayerList, stages: Stages | None, ranks: int
) -> tuple[Sequence[str | int] | None, int | tuple[int, ...] | None]:
    """Parse the option `stages`. For a list, return the list and the number of stages. For a mapping, return a list of
    the first layer of each stage, and the pipeline rank of each stage. If the option is not set, return (None, None).

    If a layer matches no pattern in the mapping, it is placed on the same rank as the preceding layer. If there is only
    one pipeline rank, a list or mapping is ignored."""
    if stages is None or (ranks == 1 and isinstance(stages, Mapping | list | tuple)):
        return None, None
    if isinstance(stages, Mapping):
        return _parse_layer_to_rank_mapping(model.nodes, stages, ranks)
    if not isinstance(stages, list | tuple):
        raise ConfigError(
            f"stages={stages!r}: a list is needed, of the first layers of all stages or of their sizes, or a dict from "
            "layers to ranks of the pipe"
        )
    if len(stages) < ranks:
        raise ConfigError(
            f"stages={list(stages)}: {len(stages)} stages cannot be distributed over {ranks} ranks of the pipe: each "
            "has at least one"
        )
    return stages, len(stages)


def _parse_layer_to_rank_mapping(
    nodes: Sequence[Node], ranks_of: Mapping[str, int], ranks: int
) -> tuple[list[str | int], tuple[int, ...]]:
    for pattern, rank in ranks_of.items():
        if not isinstance(pattern, str):
            raise ConfigError(
                f"stages: {pattern!r} is no pattern of layer paths: write {str(pattern)!r}; there are "
                f"{_format_nodes(nodes)}"
            )
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < ranks:
            raise ConfigError(f"stages: {pattern!r} is on {rank!r}, and the pipe has ranks 0 to {ranks - 1}")
        if not any(_is_in_layer(node, pattern) for node in nodes):
            raise ConfigError(f"stages: the pattern {pattern!r} matches no layer; there are {_format_nodes(nodes)}")
    firsts: list[str | int] = []
    home: list[int] = []
    for node in nodes:
        rank = next(
            (rank for pattern, rank in ranks_of.items() if _is_in_layer(node, pattern)),
            home[-1] if home else -1,
        )
        if rank < 0:
            raise ConfigError(f"stages: no pattern matches the first layer, {nodes[0].path!r}: say on which rank it is")
        if not home or rank != home[-1]:
            firsts.append(node.path)
            home.append(int(rank))
    if idle := [str(rank) for rank in range(ranks) if rank not in home]:
        raise ConfigError(f"stages: no layer is on rank {', '.join(idle)} of the pipe, which has {ranks} ranks")
    return firsts, tuple(home)


def _is_in_layer(node: Node, pattern: str) -> bool:
    """Return whether a pattern matches the path of the layer that a node calls, or the path of an enclosing layer."""
    return fnmatchcase(node.path, pattern) or fnmatchcase(node.path, f"{pattern}.*")


def split_into_stages(
    model: LayerList,
    count: int,
    stages: Sequence[str | int] | None,
    costs: LayerCosts | None,
    why: str,
) -> tuple[int, ...]:
    """Split a model into `count` pipeline stages, and return the index of the first node (layer call) of each stage.
    Error messages give `why` as the reason for this number of stages.

    `stages` holds the path of the first layer of each stage, or the number of layers in each stage. If it is None,
    stages are chosen so that their costs are balanced. `costs` maps path patterns to costs of layers. The cost of a
    layer that matches no pattern is the number of elements in its weight matrices."""
    nodes = model.nodes
    require_enough_layers(model, count, why)
    if stages is None:
        if costs is not None:
            _require_valid_costs(nodes, costs)
        return split_into_balanced_runs([_estimate_layer_call_cost(node, costs or {}) for node in nodes], count)
    if len(stages) != count:
        raise ConfigError(f"stages={list(stages)}: {len(stages)} stages are named, the pipe has {count}")
    find_starts = _find_stage_starts_from_counts if _are_layer_counts(stages) else _find_stage_starts_from_names
    starts = find_starts(nodes, stages)
    if starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:], strict=False)):
        raise ConfigError(
            f"stages={list(stages)}: stages follow each other, and the first begins at {nodes[0].path!r}; "
            f"the layers are, in this order, {_format_nodes(nodes)}"
        )
    return starts


def require_enough_layers(model: LayerList, count: int, why: str) -> None:
    """Raise ConfigError if the model has fewer than `count` layers, where `count` is the number of pipeline stages. The
    error message gives `why` as the reason for this number of stages."""
    nodes = model.nodes
    if count > len(nodes):
        layers = "1 layer" if len(nodes) == 1 else f"{len(nodes)} layers"
        raise ConfigError(
            f"{count} stages{why}, but the model has only {layers} to cut between ({_format_nodes(nodes)}): use fewer "
            + ("ranks in the pipe, or '1f1b', which has one stage on each" if why else "stages")
        )


def split_into_balanced_runs(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """Split a sequence of costs into `count` non-empty runs of consecutive entries, so that the cost of the most
    expensive run is minimal. Return the start index of each run.

    The method bisects over the maximum cost of a run, and fills runs from the left up to this cost (chains-on-chains
    partitioning, Pinar and Aykanat 2004)."""
    low, high = max(costs), max(sum(costs), max(costs))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_find_run_starts_within_cost_limit(costs, middle)) <= count else (middle, high)
    starts = _find_run_starts_within_cost_limit(costs, high)
    while len(starts) < count:  # while there are too few runs, split the most expensive one
        ends = [*starts[1:], len(costs)]
        long = [i for i in range(len(starts)) if ends[i] - starts[i] > 1]
        i = max(long, key=lambda i: sum(costs[starts[i] : ends[i]]))
        starts.insert(i + 1, (starts[i] + ends[i] + 1) // 2)
    return tuple(starts)


def _find_run_starts_within_cost_limit(costs: Sequence[float], limit: float) -> list[int]:
    """Split a sequence of costs into runs of consecutive entries. From left to right, make each run as long as possible
    without exceeding a total cost of `limit`. Return the start index of each run."""
    starts, total = [0], 0.0
    for i, cost in enumerate(costs):
        if total + cost > limit * (1 + 1e-12) and i > starts[-1]:
            starts.append(i)
            total = 0.0
        total += cost
    return starts


def _are_layer_counts(stages: Sequence[str | int]) -> bool:
    """Return whether `stages` holds layer counts rather than layer paths. Raise ConfigError if it holds both."""
    kinds = {type(stage) for stage in stages}
    if kinds not in ({int}, {str}):
        raise ConfigError(f"stages={list(stages)}: name the first layers of all stages, or give numbers of layers")
    return kinds == {int}


def _require_valid_costs(nodes: Sequence[Node], costs: LayerCosts) -> None:
    if not isinstance(costs, Mapping):
        raise ConfigError(f"costs={costs!r}: a dict is needed, from patterns of layer paths to numbers")
    for pattern, cost in costs.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"costs: {pattern!r} is no pattern of layer paths: write {str(pattern)!r}")
        if not isinstance(cost, int | float) or not 0 <= cost < float("inf"):
            raise ConfigError(f"costs: {pattern!r} is {cost!r}, a number of at least 0 is needed")
    require_pattern_matches("costs", costs, [node.path for node in nodes], "layer")


def _estimate_layer_call_cost(node: Node, costs: LayerCosts) -> float:
    for pattern, cost in costs.items():
        if fnmatchcase(node.path, pattern):
            return float(cost)
    if node.layer.looks_up:
        return 0.0
    return float(sum(spec.size for spec in node.layer.specs().values() if len(spec.shape) > 1))


def _find_stage_starts_from_counts(nodes: Sequence[Node], counts: Sequence[Any]) -> tuple[int, ...]:
    if any(n < 1 for n in counts) or sum(counts) != len(nodes):
        raise ConfigError(
            f"stages={list(counts)}: each stage has at least one layer, all together {len(nodes)}: "
            f"{_format_nodes(nodes)}"
        )
    return tuple(sum(counts[:i]) for i in range(len(counts)))


def _find_stage_starts_from_names(nodes: Sequence[Node], names: Sequence[Any]) -> tuple[int, ...]:
    paths = [node.path for node in nodes]
    unknown = [name for name in names if name not in paths]
    if unknown:
        raise ConfigError(
            f"stages: there is no layer {unknown[0]!r} to begin a stage with; there are {_format_nodes(nodes)}"
        )
    return tuple(paths.index(name) for name in names)


def _format_nodes(nodes: Sequence[Node]) -> str:
    shown = [repr(node.path) for node in nodes[:12]]
    return ", ".join(shown + ([f"... {nodes[-1].path!r}"] if len(nodes) > 12 else []))
