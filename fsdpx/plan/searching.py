"""search: which strategy, mesh, microbatches, schedule, recomputing and precision to ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from os import PathLike
from typing import Any

from fsdpx import nn
from fsdpx.core.base.config import PRESETS_BY_MEMORY, parse_byte_count
from fsdpx.core.base.messages import format_bytes
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.compression import CodecRules, make_codec
from fsdpx.core.program import SCHEDULES
from fsdpx.core.trainer.recipe import Recipe, TrainingChoices, adapt_foreign
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.ext.offload.choice import OffloadConfig
from fsdpx.nn.linearize import linearize, memoize, memoize_inside
from fsdpx.plan.lower_bound import compute_least_seconds
from fsdpx.plan.machine import Machine
from fsdpx.plan.max_depth import count_blocks, count_parameters, with_depth
from fsdpx.plan.peak import format_options
from fsdpx.plan.prediction import Prediction, disable_gc, predict_step
from fsdpx.plan.result import MAX_SHOWN, Candidate, Plan, divides_evenly
from fsdpx.plan.world_step import (
    Batch,
    WorldStep,
    check_positive_int,
    get_grid_dims,
    make_world_step,
    parse_batch,
    require_words,
)

__all__ = ["search"]

MAX_CANDIDATES = 400
"""Configurations that are predicted."""
MAX_REFINED = 3
"""Configurations, the quickest, of which other `group_bytes` and codecs are tried."""
GROUPS = 256 << 10, 4 << 20
"""Beside 1 MiB, bytes of a unit."""
OFFLOADED = ("optimizer",), ("optimizer", "parameters"), ("optimizer", "parameters", "activations")
LOOKS, DEEP = 6, 16
"""Depths of a model that are looked at, and how many times as deep it is made at most."""
FRUGAL = 4
"""Configurations with least memory, of which beside the quickest the largest batch, field and model are sought."""
OFFLOAD_FOLDER = "/local/disk"
"""Stands for the folder of what is offloaded."""
ANY = "any"
"""For `domain`: all grids."""
GRIDS = 4
"""Grids of so many ranks that are tried, those with the smallest faces."""
CLOSE = 1.3
"""Whatever takes at most so many times as long as the quickest is predicted."""
RECOMPUTE = None, "all"
NOT_SEARCHED = "sequence='ulysses' and 'ring', stages=, orders of the mesh, and recomputing of some units"
"""What plans leave to the user."""
PIPES = tuple(name for name, known in SCHEDULES.items() if known.steady is not None)
"""Schedules of pipes; without one the first means nothing."""


def search(
    model: nn.Layer,
    *,
    batch: tuple[Any, ...],
    ranks: int | None = None,
    hosts: int | None = None,
    machine: str | PathLike[str] | Machine,
    memory: int | str | None = None,
    codecs: Sequence[Any] = (),
    most: int = MAX_CANDIDATES,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """The quickest configurations that fit, by `predict`.

    First each strategy on each mesh, with the microbatches and recomputing that fit; where nothing does, those that
    need least with state on disk. Then all microbatches, schedules and recomputing of each, and of the first three
    other `group_bytes` and codecs. What its layers alone make slower than 1.3 times the quickest is not predicted.

    Parameters
    ----------
    model : the model
    batch : ((shape, dtype), (shape, dtype)) of inputs and targets of the whole global batch, see `predict`
    ranks, hosts : one of them: how many ranks, or how many hosts full of them
    machine : a name in `Machine.list_names()`, the path of a machine.toml, or a `Machine`
    memory : bytes that a rank may take, "16GiB"; by default what the machine says
    codecs : those that may be tried beside the plain one, which lose bits of gradients: `("bf16", "int8")`
    most : configurations that are predicted at most
    say : called with a line now and then
    options : those of `predict`, which are not searched then: `precision="bf16"`, `mesh=...`; `domain="any"` tries the
        grids over which a field of the batch can be cut

    Raises
    ------
    ConfigError : nothing fits, with the least that would; no mesh for these ranks; a layer that dry runs do not know
    """
    where = Machine.load(machine)
    require_words(options)
    if (ranks is None) == (hosts is None):
        raise ConfigError(f"ranks={ranks}, hosts={hosts}: say one of them")
    if ranks is None and where.ranks_per_host == inf:
        raise ConfigError(f"hosts={hosts}: machine {where.name!r} does not say how many ranks a host has; say ranks=")
    size = (
        check_positive_int("hosts", hosts) * int(where.ranks_per_host)
        if ranks is None
        else check_positive_int("ranks", ranks)
    )
    limit = where.compute.capacity if memory is None else parse_byte_count(memory, "memory")
    space, shapes = options.pop("domain", None), parse_batch(batch)
    most, codecs = check_positive_int("most", most), (codecs,) if isinstance(codecs, str) else codecs
    if space == ANY and len(shapes[0][0]) < 3:
        raise ConfigError(
            f"domain={space!r}: inputs of shape {shapes[0][0]} are no fields: samples, channels and cells"
        )
    if space != ANY:
        get_grid_dims(space)
    if not isinstance(codecs, Sequence):
        raise ConfigError(f"codecs={codecs!r}: a list of codecs is needed, such as ('bf16', 'int8')")
    Recipe(TrainingChoices(model)).with_options({"mesh": options.get("mesh")})  # checks it
    (options.get("mesh") or Mesh()).fill_from_strategy(
        options.get("strategy", "fsdp"), size
    )  # checks that ranks fill it
    for choice in (options.get("compression"), *codecs):
        CodecRules.from_choice(choice, partial(make_codec, reduce="float32", compute="float32"))  # checks it
    model, options["loss"] = adapt_foreign(model, options.get("loss"))
    question = shapes, size, where, None if limit is None else int(limit), most, options, space, tuple(codecs)
    return _Search(model, *question, say).search_and_report()


@dataclass
class _Search:
    model: nn.Layer
    batch: Batch
    ranks: int
    machine: Machine
    limit: int | None
    most: int
    fixed: dict[str, Any]
    space: Any
    codecs: tuple[Any, ...]
    say: Callable[[str], None] | None
    found: list[Candidate] = field(default_factory=list)
    large: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    seen: dict[str, bool] = field(default_factory=dict)

    @property
    def sample_count(self) -> int:
        return int(self.batch[0][0][0])

    @property
    def predicted_count(self) -> int:
        return sum(self.seen.values())

    def search_and_report(self) -> Plan:
        """Search, and say what was found."""
        with memoize_inside(), disable_gc():
            self.search_all()
            return self.make_plan()

    def search_all(self) -> None:
        """Fill `found` and `refused`."""
        formats = self._list_choices("precision", "bf16" if self.machine.compute.gpu else None)
        placed = [
            {"strategy": strategy, "mesh": mesh, "domain": space, "precision": precision}
            for strategy, mesh, space in self._iterate_placements()
            for precision in formats
        ]
        recomputes = self._list_choices("recompute", *RECOMPUTE)
        placed = [
            one for one in placed if any(self._try_microbatches(one | {"recompute": choice}) for choice in recomputes)
        ]
        if not self.found and "offload" not in self.fixed:
            self._try_offload()
        for options in sorted(
            (other for chosen in placed for other in self._iterate_variants(chosen)), key=self._estimate_least_seconds
        ):
            self.try_options(options, all_kinds=True)
        spread = [one for one in sorted(self.found, key=_sort_key) if one.prediction.mesh.width_of("data") > 1]
        for one in spread[:MAX_REFINED]:
            self._try_fine_options(one)

    def _iterate_variants(self, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """All of a placement: recomputing, microbatches and schedules."""
        pipe, rows = self._pipe_and_samples(chosen)
        for recompute in self._list_choices("recompute", *RECOMPUTE):
            for microbatches in self._list_choices("microbatches", *_list_doublings(min(pipe, rows), rows)):
                for schedule in self._list_choices("schedule", *PIPES[: None if pipe > 1 else 1]):
                    more = {} if schedule == PIPES[0] or "schedule" in self.fixed else {"schedule": schedule}
                    yield chosen | {"recompute": recompute, "microbatches": microbatches, **more}

    def _estimate_least_seconds(self, options: dict[str, Any]) -> float:
        """Seconds that a step takes at least; 0 where it cannot run."""

        def compute_least() -> float:
            with suppress(FsdpxError):
                return compute_least_seconds(self._make_step(self.batch, self.ranks, options), self.machine)
            return 0.0

        return memoize(("least", _options_key(options)), compute_least)

    def _try_offload(self) -> None:
        """What lies on disk, of those that need least memory."""
        for one in sorted(self.large, key=lambda one: one.prediction.memory)[:MAX_SHOWN]:
            for what in OFFLOADED:
                if self.try_options({**one.options, "offload": OffloadConfig(OFFLOAD_FOLDER, what)}) is not None:
                    break

    def _try_fine_options(self, one: Candidate) -> None:
        """Other sizes of units, and the codecs that are allowed."""
        if one.prediction.mesh.width_of("tensor") > 1 and "sequence" not in self.fixed:
            self.try_options({**one.options, "sequence": "parallel"})
        for choice in self._list_choices("compression", *self.codecs):
            self.try_options({**one.options, "compression": choice})
        for group_bytes in self._list_choices("group_bytes", *GROUPS):
            made = self.try_options({**one.options, "group_bytes": group_bytes})
            if made is not None and _sort_key(made) == _sort_key(one):  # its units are larger anyway
                self.found.remove(made)

    def _list_choices(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (self.fixed[name],) if name in self.fixed else values

    def _iterate_placements(self) -> Iterator[tuple[str, Mesh | None, Any]]:
        """Strategies, meshes and grids of fields, the simplest first."""
        if "mesh" in self.fixed:
            mesh = self.fixed["mesh"] or Mesh()
            for space in self._list_grids(self.ranks // ((mesh.pipe or 1) * (mesh.tensor or 1)), mesh.tensor or 1):
                for strategy in self._list_choices("strategy", *PRESETS_BY_MEMORY):
                    yield strategy, self.fixed["mesh"], space
            return
        host, strategies = (
            int(min(self.machine.ranks_per_host, self.ranks)),
            self._list_choices("strategy", *PRESETS_BY_MEMORY),
        )
        layers = len(linearize(self.model).nodes)  # a stage has one at least
        for tensor in _list_divisors(self.ranks, host):
            for pipe in _list_divisors(self.ranks // tensor, layers):
                data = self.ranks // tensor // pipe
                spaces = self._list_grids(data, tensor)
                if not spaces:
                    why = f"more data ranks than the {self.sample_count} samples of the batch"
                    self.refused[f"tensor={tensor}, pipe={pipe}, data={data}"] = why
                for strategy in strategies if data > 1 else strategies[:1]:
                    inner = host // tensor
                    yield from ((strategy, _make_mesh(data, strategy, pipe, tensor), space) for space in spaces)
                    if strategy == "fsdp" and pipe == 1 and 1 < inner < data and data % inner == 0:
                        mesh = Mesh(replica=data // inner, shard=inner, tensor=tensor)
                        yield from ((strategy, mesh, space) for space in spaces)

    def _list_grids(self, data: int, tensor: int) -> list[Any]:
        """The grids over which so many data ranks cut fields, of which each has a sample at least. None: no grid."""
        space = self.space
        if space is not None and space != ANY:
            return [space] if tensor == 1 and data % prod(get_grid_dims(space)) == 0 else []
        found: list[Any] = [None] if data <= self.sample_count else []
        if space is None or tensor > 1:
            return found
        cells = self.batch[0][0][2:]
        for ranks in _list_divisors(data, data):
            if ranks > 1 and data // ranks <= self.sample_count:
                grids = [dims for dims in _iterate_factorizations(ranks, len(cells)) if divides_evenly(dims, cells)]
                found += sorted(grids, key=lambda dims: _surface_ratio(dims, cells))[:GRIDS]
        return found

    def _try_microbatches(self, chosen: dict[str, Any]) -> bool:
        """Try few microbatches, then more until it fits. False where each number of them takes too much memory."""
        pipe, rows = self._pipe_and_samples(chosen)
        first = min(4 * pipe if pipe > 1 else 1, rows)
        for microbatches in self._list_choices("microbatches", *_list_doublings(first, rows)):
            before = len(self.large)
            self.try_options(chosen | {"microbatches": microbatches})
            if len(self.large) == before:
                return True  # it fits, is too slow, or cannot run
            if _memory_floor(self.large[-1].prediction) > (self.limit or 0):
                return False  # more microbatches would not help
        return False

    def _pipe_and_samples(self, chosen: dict[str, Any]) -> tuple[int, int]:
        """Ranks of the pipe, and samples of a data rank."""
        mesh, space = chosen["mesh"] or Mesh(), chosen["domain"]
        pipe = mesh.pipe or 1
        data = self.ranks // pipe // (mesh.tensor or 1) // prod(get_grid_dims(space))
        return pipe, -(-self.sample_count // data)

    def try_options(self, options: dict[str, Any], all_kinds: bool = False) -> Candidate | None:
        """The candidate, if it can run, fits, and may be shown. all_kinds: not only as the quickest of its own."""
        words, least = _options_key(options), self._estimate_least_seconds(options)
        if words in self.seen:
            return None
        self.seen[words] = False
        try:
            step = self._make_step(self.batch, self.ranks, options)
            if step.empty_microbatch_text:
                raise ConfigError(step.empty_microbatch_text)
            if least > self._most_seconds(None if all_kinds else _name_kind(step.mesh, options)):
                self.slow[words] = least
                return None
            if self.predicted_count >= self.most:
                raise ConfigError(f"most={self.most} others were predicted before it")
            made = predict_step(step, self.machine)
        except FsdpxError as error:
            self.refused[words] = str(error)
            return None
        self.seen[words] = True
        if self.say is not None and self.predicted_count % 20 == 0:
            self.say(f"{len(self.seen)} configurations, {self.predicted_count} predicted, {len(self.found)} fit")
        one = Candidate(_name_kind(made.mesh, options), _drop_none(options), made)
        if self.limit is not None and made.memory > self.limit:
            self.refused[words] = f"more memory than {format_bytes(self.limit)} of a rank"
            self.large.append(one)
            return None
        self.found.append(one)
        return one

    def _most_seconds(self, kind: str | None) -> float:
        """A configuration of this kind, or of any, that takes longer is not shown, or far from the quickest."""
        seconds = sorted(one.prediction.seconds for one in self.found)
        own = [one.prediction.seconds for one in self.found if kind in (None, one.summary)]
        return max(CLOSE * seconds[0], seconds[MAX_SHOWN - 1], min(own)) if own and len(seconds) >= MAX_SHOWN else inf

    def make_plan(self) -> Plan:
        """What was found; ConfigError if that is nothing."""
        if not self.found:
            raise ConfigError(self._explain_nothing_found())
        found = tuple(sorted(self.found, key=_sort_key))
        grids = "grids of fields, " * (self.space == ANY)
        disk = ", offload" * any("offload" in words for words in self.seen)
        codecs = "".join(f", codec {choice!r}" for choice in self.codecs)
        what = f"strategies, meshes, {grids}microbatches, recomputing, schedules and group_bytes{codecs}{disk}"
        fixed, left = _options_key(self.fixed), f"; not searched: {NOT_SEARCHED}"
        given = f", with {fixed}" * bool(fixed)
        rest = len(self.seen) - self.predicted_count - len(self.slow)
        counts = f"{self.predicted_count} predicted, {len(self.slow)} ruled out by a bound, {rest} cannot run"
        searched = f"{len(self.seen)} configurations: {what}{given}; {counts}{left}"
        loss = self.fixed["loss"] or (nn.CrossEntropyLoss() if "int" in str(self.batch[-1][1]) else nn.MSELoss())
        cells, best = self.batch[0][0][2:], found[0]
        about = self.machine, self.limit, self.sample_count, f"nn.{loss!r}", cells
        frugal = self._list_frugal_options(best)
        largest, longest, deepest = (
            self._find_largest_batch(frugal),
            self._find_longest_sample(frugal),
            self._find_deepest(frugal, best),
        )
        by = {"batch": largest[1], "size": longest[1], "depth": deepest[1]}
        limits = {name: format_options(options) for name, options in by.items() if options is not None}
        slow, refused, large = tuple(self.slow.items()), tuple(self.refused.items()), tuple(self.large)
        most, scaling = (deepest[0], limits), self._predict_scaling(best)
        return Plan(found, refused, searched, largest[0], *about, longest[0], scaling, slow, *most, large)

    def _list_frugal_options(self, best: Candidate) -> list[dict[str, Any]]:
        """Options of the quickest, and of those that need least memory: with as much recomputing and as many
        microbatches as there may be."""
        placed: dict[str, Candidate] = {}
        for one in sorted([*self.found, *self.large], key=lambda one: one.prediction.memory):
            placed.setdefault(
                _options_key({name: one.options.get(name) for name in ("strategy", "mesh", "domain")}), one
            )
        found = [dict(best.options)]
        least = [*placed.values()]
        for one in [*least[:FRUGAL], *[one for one in least[FRUGAL:] if one.summary == "fsdp"][:1]]:
            _, rows = self._pipe_and_samples({"mesh": None, "domain": None, **one.options})
            options = {**one.options, "recompute": self._list_choices("recompute", "all")[0]}
            found.append(_drop_none(options | {"microbatches": self._list_choices("microbatches", rows)[0]}))
        return found

    def _find_largest_batch(self, frugal: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Any] | None]:
        """Samples of the largest global batch, and the options at which it fits."""
        times, options = self._find_growth(frugal, 0, 1)
        return self.sample_count * (times or 1), options

    def _find_longest_sample(self, frugal: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        """Positions of the longest sequence, or cells of the largest field, and the options at which they fit."""
        shape = self.batch[0][0]
        first, last = (1, 2) if len(shape) == 2 and "int" in str(self.batch[0][1]) else (2, len(shape))
        times, options = self._find_growth(frugal, first, last) if last > first else (None, {})
        return ((), None) if times is None else (tuple(n * times for n in shape[first:last]), options)

    def _find_growth(
        self, frugal: Sequence[dict[str, Any]], first: int, last: int
    ) -> tuple[int | None, dict[str, Any]]:
        """How many times as large dims of the batch may be, by doubling, at most 64, and the options at which they fit.
        None where the model refuses."""
        times, by, refused = 1, frugal[0], False
        for options in frugal:
            while times < 64 and self.limit is not None:
                batch = [
                    ((*shape[:first], *(2 * times * n for n in shape[first:last]), *shape[last:]), dtype)
                    for shape, dtype in self.batch
                ]
                try:
                    memory = self._predict_step(batch, self.ranks, options).memory
                except FsdpxError:
                    refused = refused or options is frugal[0]
                    break
                if memory > self.limit:
                    break
                times, by = 2 * times, options
        return None if refused and times == 1 else times, by

    def _find_deepest(
        self, frugal: Sequence[dict[str, Any]], best: Candidate
    ) -> tuple[tuple[int, int], dict[str, Any] | None]:
        """Blocks and parameters of the deepest model that fits, and the options at which it does; (0, 0) where none are
        repeated."""
        now = count_blocks(self.model)
        if not now or self.limit is None:
            return (0, 0), None
        fits, by = self._find_deeper(frugal[0], now, best.prediction.memory), frugal[0]
        for options in frugal[1:]:
            if fits >= DEEP * now:
                break
            with suppress(FsdpxError):
                memory = self._predict_memory(options, fits + 1)
                if memory <= self.limit:
                    fits, by = self._find_deeper(options, fits + 1, memory), options
        return (fits, count_parameters(with_depth(self.model, fits))), by

    def _predict_memory(self, options: dict[str, Any], layers: int) -> int:
        """Bytes of a rank with so many blocks."""
        step = self._make_step(self.batch, self.ranks, options, with_depth(self.model, layers))
        return predict_step(step, self.machine).memory

    def _find_deeper(self, options: dict[str, Any], now: int, memory: int) -> int:
        """The most blocks that fit, of a model of which `now` do with so much memory.

        Memory grows evenly with depth but for stages of a pipe, so two depths say which one to look at next."""
        assert self.limit is not None
        most = DEEP * count_blocks(self.model)
        known, layers, fits = {now: memory}, min(2 * now, most), now
        while layers not in known and len(known) < LOOKS:
            try:
                known[layers] = self._predict_memory(options, layers)
            except FsdpxError:  # options that do not take so many
                break
            fits = max(n for n, memory in known.items() if memory <= self.limit)
            other = min((n for n in known if n > fits), default=max((n for n in known if n < fits), default=fits))
            each = (known[other] - known[fits]) / (other - fits) if other != fits else inf
            layers = min(fits + int((self.limit - known[fits]) / each), most) if each > 0 else most
        return fits

    def _predict_step(self, batch: Any, ranks: int, options: Mapping[str, Any]) -> Prediction:
        return predict_step(self._make_step(batch, ranks, options), self.machine)

    def _make_step(
        self, batch: Any, ranks: int, options: Mapping[str, Any], model: nn.Layer | None = None
    ) -> WorldStep:
        return make_world_step(model or self.model, batch, ranks, self.machine.compute.gpu, {**self.fixed, **options})

    def _predict_scaling(self, one: Candidate) -> tuple[Prediction, ...]:
        """The same on other numbers of ranks: its data axis is narrower and wider."""
        found, mesh = {self.ranks: one.prediction}, one.prediction.mesh
        beside = mesh.width_of("pipe") * mesh.width_of("tensor")
        for data in (mesh.width_of("data") * 2**n // 8 for n in range(7)):
            if data < 1 or data * beside in found:
                continue
            grown, other = ("replica", "shard") if mesh.width_of("replica") > 1 else ("shard", "replica")
            options = {**one.options, "mesh": replace(mesh, domain=(), **{grown: data // mesh.width_of(other)})}
            with suppress(FsdpxError, ValueError):
                if mesh.domain:
                    options["domain"] = self._equivalent_grid(mesh, data)
                elif data > self.sample_count:
                    break
                found[data * beside] = self._predict_step(self.batch, data * beside, options)
        return tuple(found[ranks] for ranks in sorted(found))

    def _equivalent_grid(self, mesh: Mesh, data: int) -> tuple[int, ...]:
        """A grid of as many members on other data ranks. ValueError where there is none."""
        members, cells = mesh.width_of("data") // prod(mesh.domain), self.batch[0][0][2:]
        grids = [dims for dims in _iterate_factorizations(data // members, len(cells)) if divides_evenly(dims, cells)]
        return min(grids, key=lambda dims: _surface_ratio(dims, cells))

    def _explain_nothing_found(self) -> str:
        if self.large:
            least = min(self.large, key=lambda one: one.prediction.memory)
            parts = sorted(least.prediction.worst_class.memory.items(), key=lambda item: -item[1])
            needs = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts)
            limit, held = self.limit or 0, format_bytes(least.prediction.memory)
            more = (one.mesh.size for one in self._predict_scaling(least) if one.memory <= limit)
            enough = next((f"{ranks} ranks of it would fit" for ranks in more), "take more ranks")
            return (
                f"nothing fits into {format_bytes(limit)} per rank: on {self.ranks} the least is {held} each, with "
                f"{least.python_text}; {enough}, or take a smaller model or batch, or offload=. It is the least of "
                f"{len(self.seen)} configurations: {needs}"
            )
        whys = list(dict.fromkeys(why.splitlines()[0] for why in self.refused.values()))
        return f"no configuration of {self.ranks} ranks can run: " + "; ".join(whys[:3])


def _drop_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _options_key(options: Mapping[str, Any]) -> str:
    return format_options(_drop_none(options))


def _sort_key(one: Candidate) -> tuple[float, int]:
    """For sorting: of those that take as long, the one with least memory first."""
    return one.prediction.seconds, one.prediction.memory


def _memory_floor(found: Prediction) -> int:
    """Bytes that more microbatches do not lower."""
    return min(one.nbytes - one.memory.get("activations", 0) for one in found.classes)


def _list_divisors(ranks: int, most: int) -> list[int]:
    """Divisors of a number of ranks."""
    return [width for width in range(1, min(ranks, most) + 1) if ranks % width == 0]


def _iterate_factorizations(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
    """All ways of ranks along so many dims."""
    if dims == 1:
        yield (ranks,)
        return
    for first in range(1, ranks + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _iterate_factorizations(ranks // first, dims - 1))


def _surface_ratio(dims: tuple[int, ...], cells: tuple[int, ...]) -> float:
    """What a part of a field has around it for each of its cells."""
    return sum(width / n for width, n in zip(dims, cells, strict=True) if width > 1)


def _list_doublings(first: int, most: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _make_mesh(data: int, strategy: str, pipe: int, tensor: int) -> Mesh | None:
    """None where the strategy alone says it."""
    if pipe == tensor == 1:
        return None
    return (
        Mesh(replica=data, shard=1, pipe=pipe, tensor=tensor) if strategy == "ddp" else Mesh(pipe=pipe, tensor=tensor)
    )


def _name_kind(mesh: Mesh, options: Mapping[str, Any]) -> str:
    name = options["strategy"] if mesh.width_of("data") > 1 else ""
    name = "hybrid" if name == "fsdp" and mesh.width_of("replica") > 1 else name
    means = [
        name,
        *(axis for axis in ("tensor", "pipe") if mesh.width_of(axis) > 1),
        "domain" * (prod(mesh.domain) > 1),
    ]
    means += [str(options.get("compression") or ""), "offload" * (options.get("offload") is not None)]
    return " + ".join(filter(None, means)) or "one rank"
