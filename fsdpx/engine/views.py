"""Named views of flat buffers, made once: what layers see of pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.layout.pages import Page
from fsdpx.layout.units import Layout
from fsdpx.nn.layer import join

__all__ = ["Views"]


class Views:
    """Caches views by buffer: buffers are the same objects in every step, so the steady state makes no views."""

    def __init__(self, layout: Layout, state: Mapping[str, Any], generation: int) -> None:
        self.generation = generation  # of the arena's slab
        self._leaves: dict[int, tuple[Any, list[Any]]] = {}
        self._state = dict(state)
        self._pages: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._nodes: dict[tuple[int, ...], tuple[Any, list[dict[str, Any]]]] = {}
        self._names = [
            [[(local, layout.canonical(join(n.path, local))) for local in n.layer.specs()] for n in unit.nodes]
            for unit in layout.units
        ]

    def leaves(self, buffer: Any, size: int) -> list[Any]:
        """A buffer cut into pieces of `size` elements."""
        cached = self._leaves.get(id(buffer))
        if cached is None:
            made = [buffer[i : i + size] for i in range(0, max(buffer.size, 1), max(size, 1))]
            cached = self._leaves[id(buffer)] = (buffer, made)
        return cached[1]

    def page(self, page: Page, buffer: Any) -> dict[str, Any]:
        """Parameter name -> view of its elements of `buffer`, in its shape."""
        key = (page.index, id(buffer))  # pages of one size can have one buffer in turn
        cached = self._pages.get(key)
        if cached is None:
            made = {f.name: buffer[f.offset : f.offset + f.size].reshape(f.shape) for f in page.fields}
            cached = self._pages[key] = (buffer, made)  # holding the buffer keeps its id taken
        return cached[1]

    def params(self, unit: int, pages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Per node of a unit: local name -> array, non-trainable state included."""
        return self._per_node(unit, pages, self._state)

    def grads(self, unit: int, pages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Per node of a unit: local name -> gradient, trainable parameters only."""
        return self._per_node(unit, pages, {})

    def _per_node(self, unit: int, pages: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> list[dict[str, Any]]:
        key = (unit, bool(more), *map(id, pages))
        cached = self._nodes.get(key)
        if cached is None:
            known: dict[str, Any] = dict(more)
            for views in pages:
                known.update(views)
            made = [{local: known[full] for local, full in names if full in known} for names in self._names[unit]]
            cached = self._nodes[key] = (tuple(pages), made)
        return cached[1]
