"""`search` finds the options of `distribute` (strategy, mesh, microbatches, schedule, recomputation and precision) that
make a step as fast as possible while it fits into memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf, prod
from os import PathLike
from typing import Any

from fsdpx import nn
from fsdpx.core.base.config import PRESETS_BY_MEMORY, parse_byte_count
from fsdpx.core.base.dataclass import dataclass, field, replace
from fsdpx.core.base.messages import format_bytes, format_count
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.compression import CodecRules, make_gradient_codec
from fsdpx.core.program import SCHEDULES
from fsdpx.core.state.sample_layout import Domain
from fsdpx.core.trainer.recipe import Recipe, TrainingChoices, adapt_foreign_model_and_loss
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.ext.fields.grid import Grid
from fsdpx.ext.offload.choice import OffloadConfig
from fsdpx.nn.layer_list import linearize
from fsdpx.nn.shape_inference import get_or_memoize, memoizing
from fsdpx.plan.lower_bound import compute_lower_bound_seconds
from fsdpx.plan.machine import Machine
from fsdpx.plan.max_depth import copy_model_with_block_count, count_blocks, count_parameters
from fsdpx.plan.peak import format_options
from fsdpx.plan.prediction import Prediction, disabling_gc, predict_step_cost
from fsdpx.plan.result import MAX_SHOWN, Candidate, Plan, can_split_evenly
from fsdpx.plan.world_step import (
    Batch,
    WorldStep,
    get_batch_shapes_and_dtypes,
    get_ranks_per_domain_dim,
    make_world_step,
    require_no_arrays,
    require_no_node_mesh_layers,
    require_positive_int,
)

__all__ = ["search"]

MAX_CANDIDATES = 400
"""Default maximum number of configurations that are predicted."""
MAX_REFINED = 3
"""How many of the fastest configurations are also tried with other values of `group_bytes` and other codecs."""
GROUP_BYTES = 256 << 10, 4 << 20
"""Unit sizes in bytes that are tried in addition to the default of 1 MiB."""
OFFLOAD_CHOICES = ("optimizer",), ("optimizer", "parameters"), ("optimizer", "parameters", "activations")
MAX_DEPTHS_TRIED, MAX_DEPTH_FACTOR = 6, 16
"""Limits of the search for the deepest model: at most `MAX_DEPTHS_TRIED` depths are predicted, up to `MAX_DEPTH_FACTOR`
times the given depth."""
MAX_DOUBLINGS = 6
"""Limit of the search for the largest batch and sample: the search tries at most 2**6 times the given batch and sample
size."""
FRUGAL_COUNT = 4
"""Number of configurations that are tried, in addition to the fastest one, in the search for the largest batch, sample
and model. These configurations need the least memory."""
OFFLOAD_FOLDER = "/local/disk"
"""Placeholder for the folder of offloaded state."""
ANY_GRID = "any"
"""Value of `domain` that requests a search over all grids."""
GRIDS_PER_SIZE = 4
"""Maximum number of grids that are tried for each number of ranks. The grids with the smallest halos relative to the
shards are tried."""
CLOSE_FACTOR = 1.3
"""A configuration is predicted if the lower bound on its step time is at most this factor times the step time of the
fastest configuration."""
RECOMPUTE_CHOICES = None, "all"
PIPE_SCHEDULES = tuple(name for name, known in SCHEDULES.items() if known.steady is not None)
"""Pipeline schedules that are searched. Without pipeline parallelism, schedules have no effect, and only the first one
is tried."""
NOT_SEARCHED = (
    "sequence='ulysses' and 'ring', stages=, orders of the mesh, recomputing of some units, and the schedules "
    + ", ".join(name for name in SCHEDULES if name not in PIPE_SCHEDULES)
)
"""Text that names the choices that a search leaves to the user."""


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
    """Search for the fastest configurations that fit into memory, as predicted by `predict`.

    First, each strategy is tried on each mesh, with a number of microbatches and a recomputation option that make the
    step fit into memory. If nothing fits, the configurations that need the least memory are tried with offloaded state.
    Then each strategy and mesh that can fit is tried with every schedule, recomputation option and number of
    microbatches. The three fastest configurations are also tried with other `group_bytes` and codecs. A configuration
    is not predicted if a lower bound on its step time, which is computed from its layers, exceeds 1.3 times the fastest
    step time.

    Parameters
    ----------
    model : the model
    batch : ((shape, dtype), (shape, dtype)) of inputs and targets of the global batch, see `predict`
    ranks, hosts : either the number of ranks, or the number of hosts, which are then filled with ranks
    machine : a name in `Machine.list_names()`, the path of a machine.toml, or a `Machine`
    memory : bytes that a rank may use, such as "16GiB" (default: the machine's capacity)
    codecs : lossy gradient codecs to try in addition to no codec, such as `("bf16", "int8")`
    most : maximum number of configurations that are predicted
    say : function that is called with a line of text after each prediction, to report progress (default: none)
    options : options of `predict`, such as `precision="bf16"` or `mesh=...`, which are fixed instead of searched; with
        `domain="any"`, all grids that can split the fields of the batch are tried

    Returns
    -------
    Plan : the configurations that fit, the fastest first, with tables and a line of Python that uses the fastest one

    Raises
    ------
    ConfigError : if nothing fits (the message states how much memory would be enough), if there is no mesh for these
        ranks, or if dry runs do not support a layer
    """
    where = Machine.load(machine)
    require_no_arrays(options)
    if (ranks is None) == (hosts is None):
        raise ConfigError(f"ranks={ranks}, hosts={hosts}: say one of them")
    if ranks is None and where.ranks_per_host == inf:
        raise ConfigError(f"hosts={hosts}: machine {where.name!r} does not say how many ranks a host has; say ranks=")
    size = (
        require_positive_int("hosts", hosts) * int(where.ranks_per_host)
        if ranks is None
        else require_positive_int("ranks", ranks)
    )
    limit = where.compute.capacity if memory is None else parse_byte_count(memory, "memory")
    space, shapes = options.pop("domain", None), get_batch_shapes_and_dtypes(batch)
    most, codecs = require_positive_int("most", most), (codecs,) if isinstance(codecs, str) else codecs
    if space == ANY_GRID and len(shapes[0][0]) < 3:
        raise ConfigError(
            f"domain={space!r}: inputs of shape {shapes[0][0]} are no fields: samples, channels and cells"
        )
    if space == ANY_GRID:
        require_no_node_mesh_layers(model, space)
    else:
        get_ranks_per_domain_dim(space)
    if not isinstance(codecs, Sequence):
        raise ConfigError(f"codecs={codecs!r}: a list of codecs is needed, such as ('bf16', 'int8')")
    Recipe(TrainingChoices(model)).with_options({"mesh": options.get("mesh")})  # raises an error if `mesh` is invalid
    (options.get("mesh") or Mesh()).fill_from_strategy(
        options.get("strategy", "fsdp"), size
    )  # raises an error if the ranks cannot fill the mesh
    for choice in (options.get("compression"), *codecs):
        # raises an error for an unknown codec
        CodecRules.from_choice(choice, partial(make_gradient_codec, reduce="float32", compute="float32"))
    model, options["loss"] = adapt_foreign_model_and_loss(model, options.get("loss"), options.get("domain"))
    question = shapes, size, where, None if limit is None else int(limit), most, options, space, tuple(codecs)
    return _Search(model, *question, say).search_and_report()


@dataclass
class _Search:
    """State of one search: its arguments, and the configurations tried so far. Most attributes are the arguments of
    `search`.

    Attributes
    ----------
    limit : bytes that a rank may use
    fixed : options that the user has set, which are not searched
    space : the option `domain`
    found : configurations that fit
    large : configurations that were predicted but do not fit
    refused : options -> reason, for rejected configurations
    slow : options -> lower bound on the step time in seconds, for configurations that were ruled out
    seen : options -> whether the configuration was predicted
    """

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
        """Number of samples of the global batch."""
        return int(self.batch[0][0][0])

    @property
    def predicted_count(self) -> int:
        """Number of configurations that were predicted so far."""
        return sum(self.seen.values())

    def search_and_report(self) -> Plan:
        """Try all configurations, and return the plan."""
        with memoizing(), disabling_gc():
            self.search_all()
            return self.make_plan()

    def search_all(self) -> None:
        """Try all configurations, and record the results in `found`, `large`, `refused` and `slow`."""
        formats = self._list_values_to_try("precision", "bf16" if self.machine.compute.gpu else None)
        placed = [
            {"strategy": strategy, "mesh": mesh, "domain": space, "precision": precision}
            for strategy, mesh, space in self._iterate_strategies_meshes_and_grids()
            for precision in formats
        ]
        recomputes = self._list_values_to_try("recompute", *RECOMPUTE_CHOICES)
        placed = [
            one for one in placed if any(self._try_microbatches_to_fit({**one, "recompute": r}) for r in recomputes)
        ]
        if not self.found and "offload" not in self.fixed:
            self._retry_smallest_with_state_offloaded()
        for options in sorted(
            (other for chosen in placed for other in self._iterate_option_combinations(chosen)),
            key=self._compute_step_time_lower_bound,
        ):
            self.predict_and_record_configuration(options, all_kinds=True)
        spread = [one for one in sorted(self.found, key=_make_sort_key) if one.prediction.mesh.width_of("data") > 1]
        for one in spread[:MAX_REFINED]:
            self._try_candidate_variants(one)

    def _iterate_option_combinations(self, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield `chosen`, the options that set a strategy and mesh, combined with every choice of recomputation,
        microbatches and schedule."""
        pipe, rows = self._get_pipe_width_and_samples_per_rank(chosen)
        for recompute in self._list_values_to_try("recompute", *RECOMPUTE_CHOICES):
            for microbatches in self._list_values_to_try(
                "microbatches", *_list_doubled_values_up_to(min(pipe, rows), rows)
            ):
                for schedule in self._list_values_to_try("schedule", *PIPE_SCHEDULES[: None if pipe > 1 else 1]):
                    more = {} if schedule == PIPE_SCHEDULES[0] or "schedule" in self.fixed else {"schedule": schedule}
                    yield chosen | {"recompute": recompute, "microbatches": microbatches, **more}

    def _compute_step_time_lower_bound(self, options: dict[str, Any]) -> float:
        """Return a lower bound on the step time of a configuration in seconds, or 0 if the configuration cannot run."""

        def compute_least() -> float:
            with suppress(FsdpxError):
                return compute_lower_bound_seconds(self._make_world_step(self.batch, self.ranks, options), self.machine)
            return 0.0

        return get_or_memoize(("least", _make_options_key(options)), compute_least)

    def _retry_smallest_with_state_offloaded(self) -> None:
        """Retry the configurations that need the least memory, with state offloaded to disk. For each configuration,
        more kinds of state are offloaded until it fits."""
        for one in sorted(self.large, key=lambda one: one.prediction.memory)[:MAX_SHOWN]:
            for what in OFFLOAD_CHOICES:
                offloaded = {**one.options, "offload": OffloadConfig(OFFLOAD_FOLDER, what)}
                if self.predict_and_record_configuration(offloaded) is not None:
                    break

    def _try_candidate_variants(self, candidate: Candidate) -> None:
        """Try variants of a good configuration: with sequence parallelism, with each allowed codec, and with other
        values of `group_bytes`."""
        if candidate.prediction.mesh.width_of("tensor") > 1 and "sequence" not in self.fixed:
            self.predict_and_record_configuration({**candidate.options, "sequence": "parallel"})
        for choice in self._list_values_to_try("compression", *self.codecs):
            self.predict_and_record_configuration({**candidate.options, "compression": choice})
        for group_bytes in self._list_values_to_try("group_bytes", *GROUP_BYTES):
            made = self.predict_and_record_configuration({**candidate.options, "group_bytes": group_bytes})
            if made is not None and _make_sort_key(made) == _make_sort_key(candidate):
                # `made` duplicates `candidate`: every unit already exceeds group_bytes, so the units and the prediction
                # are the same
                self.found.remove(made)

    def _list_values_to_try(self, name: str, *values: Any) -> tuple[Any, ...]:
        """Return the values of an option to try: only the user's value if the user has set it, else `values`."""
        return (self.fixed[name],) if name in self.fixed else values

    def _iterate_strategies_meshes_and_grids(self) -> Iterator[tuple[str, Mesh | None, Any]]:
        """Yield all combinations of strategy, mesh and grid that use all ranks, the simplest first. The grid says how
        ranks split a field, and is None if fields are not split."""
        if "mesh" in self.fixed:
            mesh = self.fixed["mesh"] or Mesh()
            for space in self._list_field_grids(
                self.ranks // ((mesh.pipe or 1) * (mesh.tensor or 1)), mesh.tensor or 1
            ):
                for strategy in self._list_values_to_try("strategy", *PRESETS_BY_MEMORY):
                    yield strategy, self.fixed["mesh"], space
            return
        host = int(min(self.machine.ranks_per_host, self.ranks))
        strategies = self._list_values_to_try("strategy", *PRESETS_BY_MEMORY)
        # maximum number of pipeline stages, since each stage needs at least one layer
        layers = len(linearize(self.model).nodes)
        for tensor in _list_divisors(self.ranks, host):
            for pipe in _list_divisors(self.ranks // tensor, layers):
                data = self.ranks // tensor // pipe
                spaces = self._list_field_grids(data, tensor)
                if not spaces:
                    why = f"more data ranks than the {self.sample_count} samples of the batch"
                    self.refused[f"tensor={tensor}, pipe={pipe}, data={data}"] = why
                for strategy in strategies if data > 1 else strategies[:1]:
                    inner = host // tensor
                    mesh = _make_mesh_unless_implied(data, strategy, pipe, tensor)
                    yield from ((strategy, mesh, space) for space in spaces)
                    if strategy == "fsdp" and pipe == 1 and 1 < inner < data and data % inner == 0:
                        mesh = Mesh(replica=data // inner, shard=inner, tensor=tensor)
                        yield from ((strategy, mesh, space) for space in spaces)

    @property
    def _has_fixed_parts(self) -> bool:
        """Whether samples are split by a `Partition`, which the search never changes."""
        return isinstance(self.space, Domain) and not isinstance(self.space, Grid)

    def _list_field_grids(self, data: int, tensor: int) -> list[Any]:
        """Return the grids that can split fields over `data` data ranks. Each group of ranks that share a field must
        get at least one sample. In the result, None stands for fields that are not split."""
        space = self.space
        if space is not None and space != ANY_GRID:
            return [space] if tensor == 1 and data % prod(get_ranks_per_domain_dim(space)) == 0 else []
        found: list[Any] = [None] if data <= self.sample_count else []
        if space is None or tensor > 1:
            return found
        cells = self.batch[0][0][2:]
        for ranks in _list_divisors(data, data):
            if ranks > 1 and data // ranks <= self.sample_count:
                grids = [dims for dims in _iterate_factorizations(ranks, len(cells)) if can_split_evenly(dims, cells)]
                found += sorted(grids, key=lambda dims: _compute_halo_to_cell_ratio(dims, cells))[:GRIDS_PER_SIZE]
        return found

    def _try_microbatches_to_fit(self, chosen: dict[str, Any]) -> bool:
        """Try the strategy and mesh in `chosen` with few microbatches first, and then with more and more until the step
        fits. Return False if the step needs too much memory with any number of microbatches."""
        pipe, rows = self._get_pipe_width_and_samples_per_rank(chosen)
        first = min(4 * pipe if pipe > 1 else 1, rows)
        for microbatches in self._list_values_to_try("microbatches", *_list_doubled_values_up_to(first, rows)):
            before = len(self.large)
            self.predict_and_record_configuration(chosen | {"microbatches": microbatches})
            if len(self.large) == before:
                return True  # the step fits, is too slow, or cannot run, so more microbatches would not help
            if _get_bytes_without_activations(self.large[-1].prediction) > (self.limit or 0):
                return False  # more microbatches would lower only activation memory, which is not enough
        return False

    def _get_pipe_width_and_samples_per_rank(self, chosen: dict[str, Any]) -> tuple[int, int]:
        """Return the width of the pipeline axis, and the number of samples per data rank (rounded up)."""
        mesh, space = chosen["mesh"] or Mesh(), chosen["domain"]
        pipe = mesh.pipe or 1
        data = self.ranks // pipe // (mesh.tensor or 1) // prod(get_ranks_per_domain_dim(space))
        return pipe, -(-self.sample_count // data)

    def predict_and_record_configuration(self, options: dict[str, Any], all_kinds: bool = False) -> Candidate | None:
        """Predict a configuration, record the result, and return it. Return None if the configuration was tried before,
        cannot run, does not fit, or is too slow to be shown.

        By default, a configuration that may be the fastest of its kind of parallelism is predicted even if other kinds
        are faster. With `all_kinds`, it is predicted only if it may rank among the fastest configurations overall."""
        words, least = _make_options_key(options), self._compute_step_time_lower_bound(options)
        if words in self.seen:
            return None
        self.seen[words] = False
        try:
            step = self._make_world_step(self.batch, self.ranks, options)
            if step.empty_microbatch_warning:
                raise ConfigError(step.empty_microbatch_warning)
            if least > self._compute_step_time_limit_to_show(
                None if all_kinds else _name_parallelism_of_configuration(step.mesh, options)
            ):
                self.slow[words] = least
                return None
            if self.predicted_count >= self.most:
                raise ConfigError(f"most={self.most} others were predicted before it")
            made = predict_step_cost(step, self.machine)
        except FsdpxError as error:
            self.refused[words] = str(error)
            return None
        self.seen[words] = True
        if self.say is not None:
            self.say(f"{format_count(self.predicted_count, 'configuration')} predicted, {len(self.found)} fit")
        one = Candidate(_name_parallelism_of_configuration(made.mesh, options), _drop_none(options), made)
        if self.limit is not None and made.memory > self.limit:
            self.refused[words] = f"more memory than {format_bytes(self.limit)} of a rank"
            self.large.append(one)
            return None
        self.found.append(one)
        return one

    def _compute_step_time_limit_to_show(self, kind: str | None) -> float:
        """Return the step time in seconds above which a configuration is too slow to be shown. If `kind` is given, the
        result is at least the time of the fastest configuration of this kind of parallelism."""
        seconds = sorted(one.prediction.seconds for one in self.found)
        own = [one.prediction.seconds for one in self.found if kind in (None, one.summary)]
        return (
            max(CLOSE_FACTOR * seconds[0], seconds[MAX_SHOWN - 1], min(own))
            if own and len(seconds) >= MAX_SHOWN
            else inf
        )

    def make_plan(self) -> Plan:
        """Return the plan with all configurations found, and predictions for other batch sizes, depths and numbers of
        ranks. Raise ConfigError if nothing fits."""
        if not self.found:
            raise ConfigError(self._explain_nothing_found())
        found = tuple(sorted(self.found, key=_make_sort_key))
        grids = "grids of fields, " * (self.space == ANY_GRID)
        disk = ", offload" * any("offload" in words for words in self.seen)
        codecs = "".join(f", codec {choice!r}" for choice in self.codecs)
        what = f"strategies, meshes, {grids}microbatches, recomputing, schedules and group_bytes{codecs}{disk}"
        fixed, left = _make_options_key(self.fixed), f"; not searched: {NOT_SEARCHED}"
        given = f", with {fixed}" * bool(fixed)
        rest = len(self.seen) - self.predicted_count - len(self.slow)
        counts = f"{self.predicted_count} predicted, {len(self.slow)} ruled out by a bound, {rest} cannot run"
        searched = f"{len(self.seen)} configurations: {what}{given}; {counts}{left}"
        loss = self.fixed["loss"] or (nn.CrossEntropyLoss() if "int" in str(self.batch[-1][1]) else nn.MSELoss())
        cells, best = self.batch[0][0][2:], found[0]
        about = self.machine, self.limit, self.sample_count, f"nn.{loss!r}", cells
        frugal = self._list_option_sets_for_size_search(best)
        largest, longest = self._find_largest_batch(frugal), self._find_largest_sample_shape_that_fits(frugal)
        deepest = self._find_deepest_model(frugal, best)
        by = {"batch": largest[1], "size": longest[1], "depth": deepest[1]}
        limits = {name: format_options(options) for name, options in by.items() if options is not None}
        slow, refused, large = tuple(self.slow.items()), tuple(self.refused.items()), tuple(self.large)
        most, scaling = (deepest[0], limits), self._predict_other_rank_counts(best)
        return Plan(found, refused, searched, largest[0], *about, longest[0], scaling, slow, *most, large)

    def _list_option_sets_for_size_search(self, best: Candidate) -> list[dict[str, Any]]:
        """Return a list of options to use in the search for the largest batch, sample size or depth that fits: first
        the options of the fastest configuration, then options that need the least memory.

        The options that need the least memory recompute all activations, and use as many microbatches as samples."""
        placed: dict[str, Candidate] = {}
        for one in sorted([*self.found, *self.large], key=lambda one: one.prediction.memory):
            placed.setdefault(
                _make_options_key({name: one.options.get(name) for name in ("strategy", "mesh", "domain")}), one
            )
        found = [dict(best.options)]
        least = [*placed.values()]
        for one in [*least[:FRUGAL_COUNT], *[one for one in least[FRUGAL_COUNT:] if one.summary == "fsdp"][:1]]:
            _, rows = self._get_pipe_width_and_samples_per_rank({"mesh": None, "domain": None, **one.options})
            options = {**one.options, "recompute": self._list_values_to_try("recompute", "all")[0]}
            found.append(_drop_none(options | {"microbatches": self._list_values_to_try("microbatches", rows)[0]}))
        return found

    def _find_largest_batch(self, frugal: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Any] | None]:
        """Return the number of samples of the largest global batch that fits, and the options that make it fit."""
        times, options = self._find_largest_growth_factor_of_dims(frugal, 0, 1)
        return self.sample_count * (times or 1), options

    def _find_largest_sample_shape_that_fits(
        self, frugal: Sequence[dict[str, Any]]
    ) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        """Return the size of the longest sequence that fits (in tokens) or of the largest field that fits (in cells
        along each dim), and the options that make it fit.

        Return () and None if the model accepts only the size of the given batch."""
        shape = self.batch[0][0]
        if self._has_fixed_parts:
            return (), None
        first, last = (1, 2) if len(shape) == 2 and "int" in str(self.batch[0][1]) else (2, len(shape))
        times, options = self._find_largest_growth_factor_of_dims(frugal, first, last) if last > first else (None, {})
        return ((), None) if times is None else (tuple(n * times for n in shape[first:last]), options)

    def _find_largest_growth_factor_of_dims(
        self, frugal: Sequence[dict[str, Any]], first: int, last: int
    ) -> tuple[int | None, dict[str, Any]]:
        """Return the largest factor by which dims [first, last) of the batch can grow so that a step still fits in
        memory, and the options with which it fits. The factor is a power of 2, at most 2**MAX_DOUBLINGS.

        The factor is None if the model rejects larger dims."""
        if self.limit is None:
            return 1, frugal[0]
        doublings, by, refused, limit = 0, frugal[0], False, float(self.limit)
        for options in frugal:
            if doublings == MAX_DOUBLINGS:
                break
            predict_bytes = partial(self._predict_bytes_with_doubled_batch_dims, options, first, last)
            needed = predict_bytes(doublings + 1)
            refused = refused or (needed == inf and options is frugal[0])
            if needed <= limit:
                fits = bisect_right(range(MAX_DOUBLINGS + 1), limit, doublings + 2, key=predict_bytes)
                doublings, by = fits - 1, options
        return None if refused and not doublings else 2**doublings, by

    def _predict_bytes_with_doubled_batch_dims(
        self, options: dict[str, Any], first: int, last: int, doublings: int
    ) -> float:
        """Return the number of bytes of memory that a rank needs if dims [first, last) of the batch are doubled
        `doublings` times. Return infinity if the model rejects this batch."""
        batch = [
            ((*shape[:first], *(n << doublings for n in shape[first:last]), *shape[last:]), dtype)
            for shape, dtype in self.batch
        ]
        with suppress(FsdpxError):
            return self._predict_step(batch, self.ranks, options).memory
        return inf

    def _find_deepest_model(
        self, frugal: Sequence[dict[str, Any]], best: Candidate
    ) -> tuple[tuple[int, int], dict[str, Any] | None]:
        """Return (blocks, parameters) of the deepest model that fits, and the options that make it fit. Return (0,
        0) and None if the model has no repeated block, or if there is no memory limit."""
        now = count_blocks(self.model)
        if not now or self.limit is None:
            return (0, 0), None
        fits, by = self._find_max_blocks(frugal[0], now, best.prediction.memory), frugal[0]
        for options in frugal[1:]:
            if fits >= MAX_DEPTH_FACTOR * now:
                break
            with suppress(FsdpxError):
                memory = self._predict_bytes_at_depth(options, fits + 1)
                if memory <= self.limit:
                    fits, by = self._find_max_blocks(options, fits + 1, memory), options
        return (fits, count_parameters(copy_model_with_block_count(self.model, fits))), by

    def _predict_bytes_at_depth(self, options: dict[str, Any], layers: int) -> int:
        """Return the number of bytes of memory that a rank needs if the model has `layers` blocks."""
        step = self._make_world_step(self.batch, self.ranks, options, copy_model_with_block_count(self.model, layers))
        return predict_step_cost(step, self.machine).memory

    def _find_max_blocks(self, options: dict[str, Any], blocks: int, memory: int) -> int:
        """Return the largest number of blocks that fits. The model is known to fit with `blocks` blocks, which need
        `memory` bytes.

        Memory grows linearly with the number of blocks, apart from effects of pipeline stages. Therefore, the next
        number of blocks to try is computed from the memory for two known numbers of blocks."""
        assert self.limit is not None
        most = MAX_DEPTH_FACTOR * count_blocks(self.model)
        known, layers, fits = {blocks: memory}, min(2 * blocks, most), blocks
        while layers not in known and len(known) < MAX_DEPTHS_TRIED:
            try:
                known[layers] = self._predict_bytes_at_depth(options, layers)
            except FsdpxError:  # options such as a list of stages are valid for only one number of blocks
                break
            fits = max(n for n, memory in known.items() if memory <= self.limit)
            other = min((n for n in known if n > fits), default=max((n for n in known if n < fits), default=fits))
            each = (known[other] - known[fits]) / (other - fits) if other != fits else inf
            layers = min(fits + int((self.limit - known[fits]) / each), most) if each > 0 else most
        return fits

    def _predict_step(self, batch: Any, ranks: int, options: Mapping[str, Any]) -> Prediction:
        return predict_step_cost(self._make_world_step(batch, ranks, options), self.machine)

    def _make_world_step(
        self, batch: Any, ranks: int, options: Mapping[str, Any], model: nn.Layer | None = None
    ) -> WorldStep:
        question, gpu = (model or self.model, batch, ranks), self.machine.compute.gpu
        make = partial(make_world_step, *question, gpu, {**self.fixed, **options})
        return get_or_memoize(("step", *question, _make_options_key(options)), make)

    def _predict_other_rank_counts(self, candidate: Candidate) -> tuple[Prediction, ...]:
        """Predict a configuration for other numbers of ranks, fewest ranks first. Only the width of the data axis
        changes."""
        found, mesh = {self.ranks: candidate.prediction}, candidate.prediction.mesh
        beside = mesh.width_of("pipe") * mesh.width_of("tensor")
        for data in (mesh.width_of("data") * 2**n // 8 for n in range(7)):
            if data < 1 or data * beside in found:
                continue
            grown, other = ("replica", "shard") if mesh.width_of("replica") > 1 else ("shard", "replica")
            options = {**candidate.options, "mesh": replace(mesh, domain=(), **{grown: data // mesh.width_of(other)})}
            with suppress(FsdpxError, ValueError):
                if mesh.domain and not self._has_fixed_parts:
                    options["domain"] = self._choose_field_grid_for_data_ranks(mesh, data)
                elif data // prod(mesh.domain) > self.sample_count:
                    break
                found[data * beside] = self._predict_step(self.batch, data * beside, options)
        return tuple(found[ranks] for ranks in sorted(found))

    def _choose_field_grid_for_data_ranks(self, mesh: Mesh, data: int) -> tuple[int, ...]:
        """Choose how many ranks share a field along each dim, for a job with `data` data ranks. The ranks that share a
        field form a grid, and several such grids process different samples in parallel. The number of grids stays the
        same as in `mesh`. Raise ValueError if no grid is possible."""
        members, cells = mesh.width_of("data") // prod(mesh.domain), self.batch[0][0][2:]
        grids = [dims for dims in _iterate_factorizations(data // members, len(cells)) if can_split_evenly(dims, cells)]
        return min(grids, key=lambda dims: _compute_halo_to_cell_ratio(dims, cells))

    def _explain_nothing_found(self) -> str:
        """Return the error message for a search in which no configuration fits or can run."""
        if self.large:
            least = min(self.large, key=lambda one: one.prediction.memory)
            parts = sorted(least.prediction.worst_class.memory.items(), key=lambda item: -item[1])
            needs = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts)
            limit, held = self.limit or 0, format_bytes(least.prediction.memory)
            more = (one.mesh.size for one in self._predict_other_rank_counts(least) if one.memory <= limit)
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


def _make_options_key(options: Mapping[str, Any]) -> str:
    """Return a string that identifies the options, for use as a dict key. Options that are None are left out."""
    return format_options(_drop_none(options))


def _make_sort_key(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key that orders configurations by step time, then by memory."""
    return candidate.prediction.seconds, candidate.prediction.memory


def _get_bytes_without_activations(found: Prediction) -> int:
    """Return the number of bytes that a rank needs, excluding activations. Using more microbatches would not lower this
    number."""
    return min(one.nbytes - one.memory.get("activations", 0) for one in found.classes)


def _list_divisors(ranks: int, limit: int) -> list[int]:
    """Return the divisors of `ranks` that are at most `limit`, in ascending order."""
    return [width for width in range(1, min(ranks, limit) + 1) if ranks % width == 0]


def _iterate_factorizations(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `dims` factors whose product is `ranks`."""
    if dims == 1:
        yield (ranks,)
        return
    for first in range(1, ranks + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _iterate_factorizations(ranks // first, dims - 1))


def _compute_halo_to_cell_ratio(dims: tuple[int, ...], cells: tuple[int, ...]) -> float:
    """Return a number proportional to the ratio of halo cells to own cells in one rank's shard of a field. The number
    indicates how much the rank communicates. Dims that are not split are ignored."""
    return sum(width / n for width, n in zip(dims, cells, strict=True) if width > 1)


def _list_doubled_values_up_to(first: int, limit: int) -> list[int]:
    """Return [first, 2 * first, 4 * first, ...] up to `limit`."""
    found = [first]
    while found[-1] * 2 <= limit:
        found.append(found[-1] * 2)
    return found


def _make_mesh_unless_implied(data: int, strategy: str, pipe: int, tensor: int) -> Mesh | None:
    """Return the mesh with these axis widths. Return None if the strategy alone implies this mesh."""
    if pipe == tensor == 1:
        return None
    return (
        Mesh(replica=data, shard=1, pipe=pipe, tensor=tensor) if strategy == "ddp" else Mesh(pipe=pipe, tensor=tensor)
    )


def _name_parallelism_of_configuration(mesh: Mesh, options: Mapping[str, Any]) -> str:
    """Return text that names the kinds of parallelism that a configuration combines, such as "fsdp + tensor"."""
    name = options["strategy"] if mesh.width_of("data") > 1 else ""
    name = "hybrid" if name == "fsdp" and mesh.width_of("replica") > 1 else name
    means = [
        name,
        *(axis for axis in ("tensor", "pipe") if mesh.width_of(axis) > 1),
        "domain" * (prod(mesh.domain) > 1),
    ]
    means += [str(options.get("compression") or ""), "offload" * (options.get("offload") is not None)]
    return " + ".join(filter(None, means)) or "one rank"
