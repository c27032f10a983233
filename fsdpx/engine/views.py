"""Named views of flat buffers, made once: what layers see of pages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpx.layout.pages import Page
from fsdpx.layout.units import Layout
from fsdpx.nn.gradients import Entries, GradientEntry, Gradients
from fsdpx.nn.layer import Parameters, dotted

__all__ = ["Views"]


class Views:
    """Caches views by buffer: buffers are the same objects in every step, so the steady state makes no views.

    generation: of the arena's slab. frozen: parameters whose gradients layers do not see. own: by unit, the other
    parameters that no other unit uses."""

    def __init__(self, layout: Layout, generation: int, frozen: frozenset[str] = frozenset()) -> None:
        self.generation, self.frozen = generation, frozen
        self._still = frozenset(n for p in layout.pages for n in (f.name for f in p.fields if f.source in frozen))
        self._leaves: dict[int, tuple[Any, list[Any]]] = {}
        self._pages: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}
        self._entries: dict[tuple[int, int], tuple[Any, Entries]] = {}
        self._params: dict[tuple[int, ...], tuple[Any, list[Parameters]]] = {}
        self._grads: dict[tuple[int, ...], tuple[Any, list[Gradients]]] = {}
        self._names = [
            [[(local, layout.held(dotted(n.path, local))) for local in n.layer.specs()] for n in unit.nodes]
            for unit in layout.units
        ]

        users = Counter(full for unit in self._names for full in {full for node in unit for _, full in node})
        alone = {full for full, count in users.items() if count == 1} - self._still
        self.own = [{full for node in unit for _, full in node if full in alone} for unit in self._names]

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
            cached = self._pages[key] = (buffer, page.named(buffer))  # holding the buffer keeps its id taken
        return cached[1]

    def entries(self, page: Page, buffer: Any) -> Entries:
        """Parameter name -> gradient in `buffer`: for all that add into it, tied layers included, the same objects."""
        key = (page.index, id(buffer))
        cached = self._entries.get(key)
        if cached is None:
            made = Entries(self.page(page, buffer))
            cached = self._entries[key] = (buffer, made)
        return cached[1]

    def params(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[Parameters]:
        """Per node of a unit: local name -> array. pages: name -> array each, and the running statistics, if any."""
        key = (unit, *map(id, pages))
        cached = self._params.get(key)
        if cached is None:
            made = [Parameters(arrays) for arrays in self._per_node(unit, pages)]
            cached = self._params[key] = (tuple(pages), made)  # holding the pages keeps their ids taken
        return cached[1]

    def grads(self, unit: int, pages: Sequence[dict[str, GradientEntry]]) -> list[Gradients]:
        """Per node of a unit: local name -> gradient, trainable parameters only."""
        key = (unit, *map(id, pages))
        cached = self._grads.get(key)
        if cached is None:
            seen = [{name: e for name, e in page.items() if name not in self._still} for page in pages]
            made = [Gradients(entries) for entries in self._per_node(unit, seen)]
            cached = self._grads[key] = (tuple(pages), made)
        return cached[1]

    def _per_node(self, unit: int, pages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        known: dict[str, Any] = {}
        for views in pages:
            known.update(views)
        return [{local: known[full] for local, full in names if full in known} for names in self._names[unit]]
