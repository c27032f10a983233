"""Units: what is computed, gathered and reduced together, and the pages that hold their parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from fsdpx.errors import ConfigError
from fsdpx.layout.pages import Page, product
from fsdpx.nn.layer import Layer, Spec, join
from fsdpx.nn.linear import Linear
from fsdpx.nn.sort import Node, Sorted, specs_of

__all__ = ["GROUP_BYTES", "Layout", "Unit", "lay_out"]

GROUP_BYTES = 1 << 20
"""Consecutive small layers are grouped up to this size; 1 MiB outweighs the latency of common networks."""

LEAST, NARROW = 4, 128
"""Layers of a line, at least; and their width, at most: products of larger ones take longer than Python."""


@dataclass(frozen=True)
class Unit:
    """Consecutive nodes that run as one action. Values are numbered as in `Sorted`."""

    index: int
    nodes: tuple[Node, ...]
    pages: tuple[int, ...]  # own pages first, then those of tied parameters
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def lines(self) -> dict[int, int]:
        """First node -> one past the last of lines: small square linear layers, each reading only the one before."""
        found, start = {}, 0
        for i in range(1, len(self.nodes) + 1):
            if i == len(self.nodes) or not self._follows(i):
                if i - start >= LEAST:
                    found[start] = i
                start = i
        return found

    def _follows(self, i: int) -> bool:
        before, node = self.nodes[i - 1], self.nodes[i]
        alone = node.inputs == (before.output,) and before.output not in self.outputs
        reads = sum(before.output in n.inputs for n in self.nodes)
        return alone and reads == 1 and _small(before.layer) == _small(node.layer) != 0

    @property
    def name(self) -> str:
        first, last = self.nodes[0].path, self.nodes[-1].path
        return first if first == last else f"{first}..{last}"


def _small(layer: Layer) -> int:
    """The width of a linear layer that can stand in a line, else 0."""
    if type(layer) is not Linear or not layer.bias or layer.in_features != layer.out_features:
        return 0
    return layer.in_features if layer.in_features <= NARROW else 0


@dataclass(frozen=True)
class Layout:
    """The model as data: units in execution order, their pages, and replicated non-trainable state."""

    units: tuple[Unit, ...]
    pages: tuple[Page, ...]
    specs: dict[str, Spec]  # canonical name -> spec, parameters and state
    ties: dict[str, str]  # alias -> canonical name
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]

    def canonical(self, name: str) -> str:
        return self.ties.get(name, name)

    @property
    def state(self) -> dict[str, Spec]:
        return {name: spec for name, spec in self.specs.items() if spec.state}

    @property
    def home(self) -> dict[str, tuple[int, int]]:
        """Parameter name -> (page, field within it)."""
        return {f.name: (page.index, i) for page in self.pages for i, f in enumerate(page.fields)}

    @property
    def size(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(page.size for page in self.pages)


def lay_out(model: Sorted, itemsize: int, group_bytes: int | None = None, frozen: Sequence[str] = ()) -> Layout:
    """Group the nodes of a sorted model into units of at least `group_bytes` of own parameters and lay out their pages.

    frozen: name patterns (fnmatch) of parameters that are not trained; they get pages of their own.
    """
    limit = GROUP_BYTES if group_bytes is None else group_bytes
    if limit < 0:
        raise ConfigError(f"group_bytes={group_bytes}: a number of bytes, 0 or more")
    specs = _specs(model, frozen)
    owned = _owned(model, specs)
    groups = _groups([sum(_size(specs[n]) for n in names) * itemsize for names in owned], limit)
    pages: list[Page] = []
    home: dict[str, int] = {}
    for group in groups:
        names = [name for i in group for name in owned[i]]
        for trainable in (True, False):
            chosen = [(n, specs[n].shape) for n in names if specs[n].trainable is trainable]
            if chosen:
                pages.append(Page.of(len(pages), chosen, trainable))
                home.update((n, pages[-1].index) for n, _ in chosen)
    last_use = _last_uses(model)
    units = tuple(_unit(k, group, model, home, last_use) for k, group in enumerate(groups))
    return Layout(units, tuple(pages), specs, dict(model.ties), model.inputs, model.outputs)


def _specs(model: Sorted, frozen: Sequence[str]) -> dict[str, Spec]:
    specs = specs_of(model)
    names = {name: [name, *(a for a, n in model.ties.items() if n == name)] for name in specs}
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for both in names.values() for name in both):
            raise ConfigError(
                f"frozen pattern {pattern!r} matches no parameter; there are {', '.join(list(specs)[:8])} ..."
            )
    return {
        name: replace(spec, trainable=False) if any(fnmatchcase(n, p) for p in frozen for n in names[name]) else spec
        for name, spec in specs.items()
    }


def _owned(model: Sorted, specs: dict[str, Spec]) -> list[list[str]]:
    """For each node the parameters that it is the first to use; state is no parameter."""
    seen: set[str] = set()
    owned = []
    for node in model.nodes:
        names = [model.ties.get(full, full) for full in (join(node.path, local) for local in node.layer.specs())]
        fresh = [n for n in dict.fromkeys(names) if n not in seen and not specs[n].state]
        seen.update(fresh)
        owned.append(fresh)
    return owned


def _groups(weights: list[int], limit: int) -> list[list[int]]:
    """Consecutive runs that reach `limit`; what is left at the end joins the last run if it is too small alone."""
    groups: list[list[int]] = []
    current: list[int] = []
    total = 0
    for i, weight in enumerate(weights):
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


def _size(spec: Spec) -> int:
    return product(spec.shape)


def _last_uses(model: Sorted) -> dict[int, int]:
    """Value -> position of the last node that reads it; model outputs are read after all nodes."""
    uses = {v: i for i, node in enumerate(model.nodes) for v in node.inputs}
    return uses | dict.fromkeys(model.outputs, len(model.nodes))


def _unit(index: int, group: list[int], model: Sorted, home: dict[str, int], last_use: dict[int, int]) -> Unit:
    nodes = [model.nodes[i] for i in group]
    inside = {node.output for node in nodes}
    inputs = dict.fromkeys(v for node in nodes for v in node.inputs if v not in inside)
    outputs = tuple(node.output for node in nodes if last_use[node.output] > group[-1])
    names = [model.ties.get(f, f) for node in nodes for f in (join(node.path, n) for n in node.layer.specs())]
    pages = dict.fromkeys(home[n] for n in names if n in home)
    return Unit(index, tuple(nodes), tuple(pages), tuple(inputs), outputs)
