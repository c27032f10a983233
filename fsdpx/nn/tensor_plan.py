"""Tensor parallelism: replace the layers and the loss of a model with versions that are sharded over the tensor
axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fsdpx.core.base.name_hints import require_pattern_matches
from fsdpx.errors import ConfigError
from fsdpx.nn.container import ChildCall, Container, list_input_names, make_unused_name
from fsdpx.nn.embedding import VocabParallelCrossEntropyLoss
from fsdpx.nn.layer import Layer, collect_specs, iterate_layers, join_path
from fsdpx.nn.losses import CrossEntropyLoss, Loss, TensorParallelModel
from fsdpx.nn.sequence import AllGatherFeatures, ShardedBatchLoss, ShardedSequenceLoss, SplitSequence, WithInputOutput
from fsdpx.nn.shard_specs import (
    ColumnParallel,
    Kind,
    LayerDefault,
    Mark,
    Replicated,
    ShardedBatch,
    ShardedFeatures,
    ShardedSequence,
    ShardingContext,
)
from fsdpx.nn.tied_parameters import get_canonical_name

__all__ = ["SEQUENCES", "Redistribution", "ShardingWalk", "match_marks_to_layer_paths", "parallelize"]


class Redistribution(NamedTuple):
    """A layer that changes the sharding of a value before another layer reads it.

    Attributes
    ----------
    name : prefix of the name of the inserted step
    layer : the layer that changes the sharding
    kind : sharding of the layer's result
    """

    name: str
    layer: Layer
    kind: Kind


RedistributionFunction = Callable[[Layer, Sequence[Kind]], Sequence[Redistribution | None]]
"""Function that takes a layer and the sharding of its inputs. For each input, it returns the redistribution that the
input needs, or None."""


class ShardingWalk:
    """Traverses a model, replaces each layer with its sharded version, and tracks how each value is sharded.

    Attributes
    ----------
    partial : names of the parameters that have only a partial gradient on each rank
    ties : dict that maps aliases to canonical names, for the tied parameters of the full model
    redistribution_functions : functions that choose which layers to insert before a step to change the sharding of its
        inputs; they are called in order
    """

    def __init__(
        self,
        width: int,
        sequence: str | None,
        marks: Mapping[str, Mark],
        redistribution_functions: Sequence[RedistributionFunction] = (),
    ) -> None:
        self.width, self.sequence, self.marks, self.redistribution_functions = (
            width,
            sequence,
            marks,
            redistribution_functions,
        )
        self.cut: ShardedSequence | ShardedBatch = ShardedBatch() if sequence == "samples" else ShardedSequence()
        self.partial: set[str] = set()
        self.ties: dict[str, str] = {}

    def shard_layer(self, layer: Layer, path: str, kinds: Sequence[Kind]) -> tuple[Layer, list[Kind]]:
        """Given the shardings `kinds` of the inputs, return the sharded version of `layer` and the sharding of each of
        its results."""
        mark = self.marks.get(path)
        if not isinstance(layer, Container):
            context = ShardingContext(path, kinds, self.width, mark, self.sequence, self.redistribution_functions)
            portion = layer.shard_over_ranks(context)
            self.partial.update(join_path(path, name) for name in portion.partial)
            return portion.layer, list(portion.kinds or (portion.kind,) * layer.n_outputs)
        if mark is not None:
            raise ConfigError(
                f"tensor_plan: {path!r} is a {type(layer).__name__}, which cannot be a {type(mark).__name__}: name "
                "the Linear layers inside, or give it nn.sharding.LayerDefault"
            )
        return self.shard_container(layer, path, kinds)

    def shard_container(self, layer: Container, path: str, kinds: Sequence[Kind]) -> tuple[Container, list[Kind]]:
        """Return the container with sharded steps, and the sharding of each of its results.

        A `SplitSequence` is inserted before steps that must read only this rank's shard of the sequence or of the
        samples."""
        values = dict(zip(layer.inputs, kinds, strict=True))
        entered: dict[str, str] = {}
        steps: list[ChildCall] = []
        for step in layer.steps:
            below = join_path(path, step.name)
            sources = []
            for input_index, source in enumerate(step.sources):
                if self.needs_split(values[source], step.layer, below, input_index):
                    if source not in entered:
                        entered[source] = make_unused_name(layer, f"enter_{source.replace('.', '_')}")
                        steps.append(ChildCall(entered[source], self.make_split_layer(), (source,), (entered[source],)))
                        values[entered[source]] = self.cut
                    source = entered[source]
                sources.append(source)
            sources = self._insert_redistributions(layer, step.layer, sources, steps, values)
            new, given = self.shard_layer(step.layer, below, [values[source] for source in sources])
            values.update(zip(step.gives, given, strict=True))
            steps.append(ChildCall(step.name, new, tuple(sources), step.gives))
        self._record_and_require_equal_ties(layer, path, steps)
        return layer.with_steps(steps), [values[name] for name in layer.outputs]

    def _insert_redistributions(
        self, layer: Container, reader: Layer, sources: list[str], steps: list[ChildCall], values: dict[str, Kind]
    ) -> list[str]:
        """Append to `steps` the layers that change the sharding of `sources` to what `reader` needs. Return the names
        of the values that `reader` must read instead of `sources`."""
        for move in self.redistribution_functions:
            moved_layers = []
            for source, moved in zip(sources, move(reader, [values[source] for source in sources]), strict=True):
                if moved is not None:
                    name = make_unused_name(layer, f"{moved.name}_{len(steps)}_{source.replace('.', '_')}")
                    steps.append(ChildCall(name, moved.layer, (source,), (name,)))
                    values[name] = moved.kind
                    source = name
                moved_layers.append(source)
            sources = moved_layers
        return sources

    def make_split_layer(self) -> SplitSequence:
        """Return a layer that shards a replicated value: along the samples if `self.cut` is a `ShardedBatch`, else
        along the sequence."""
        return SplitSequence(0 if isinstance(self.cut, ShardedBatch) else 1)

    def needs_split(self, kind: Kind, layer: Layer, path: str, input_index: int) -> bool:
        """Return whether a value with the sharding `kind` must be split over the ranks before `layer` reads it."""
        if self.sequence is None or not isinstance(kind, Replicated):
            return False
        return isinstance(self.cut, ShardedBatch) or not self._needs_full_sequence(layer, path, input_index)

    def _needs_full_sequence(self, layer: Layer, path: str, input_index: int) -> bool:
        """Return whether a layer needs the full sequence of an input (`Layer.needs_full_input`). A container needs the
        full sequence if at least one of the steps that read the input needs it."""
        if not isinstance(layer, Container):
            return layer.needs_full_input(input_index, self.marks.get(path))
        name = layer.inputs[input_index]
        readers = [(s, i) for s in layer.steps for i, source in enumerate(s.sources) if source == name]
        return any(self._needs_full_sequence(s.layer, join_path(path, s.name), i) for s, i in readers)

    def _record_and_require_equal_ties(self, layer: Container, path: str, steps: Sequence[ChildCall]) -> None:
        """Add the ties of a container (alias -> canonical name) to `self.ties`. Raise ConfigError if two tied
        parameters are sharded differently."""
        specs = collect_specs((step.name, step.layer) for step in steps)
        for alias, name in layer.ties.items():
            self.ties[join_path(path, alias)] = join_path(path, name)
            if specs[alias].cut != specs[name].cut:
                raise ConfigError(
                    f"{join_path(path, alias)!r} is tied to {join_path(path, name)!r}, but one is sharded as "
                    f"{specs[alias].cut} and the other as {specs[name].cut} (None: not sharded): shard both layers "
                    "in the same way"
                )


SEQUENCES = (None, "parallel", "ulysses", "ring", "samples")
FULL_PARAMETER_SEQUENCES = ("ulysses", "ring", "samples")
"""The values of the option `sequence` for which no parameters are sharded over the tensor axis, except those of MoE
experts."""


def parallelize(
    model: Layer, loss: Loss, width: int, plan: Mapping[str, Any] | None = None, sequence: str | None = None
) -> TensorParallelModel:
    """Return `model` and `loss`, sharded for a tensor axis. Parameters keep their names, full shapes and initial
    values.

    Nothing is communicated, and the result is the same on every rank. Raise ConfigError, with the path of the layer, if
    a layer cannot be sharded.

    Parameters
    ----------
    model : any layer; attention, MLPs, MoE, GPT, Llama, Bert and ViT have built-in plans (`Layer.plan`)
    loss : the loss; it must have `acts_on = "position"` if the model's output is sharded along dim 1 by `sequence`
    width : number of ranks on the tensor axis
    plan : dict that maps name patterns (fnmatch) to `ColumnParallel`, `RowParallel`, `VocabParallel` or `LayerDefault`;
        if None, the layers' built-in plans
    sequence : None, "parallel", "ulysses", "ring" or "samples", see below

    With "parallel", activations between sharded layers are sharded along dim 1 (Korthikanti et al. 2022); with None,
    every rank has them in full. With "ulysses" (Jacobs et al. 2023) and "ring" (Liu et al. 2023), all activations are
    sharded along dim 1, and no parameters are sharded except the experts of MoE layers. With "samples", all activations
    are sharded along dim 0, and only experts are sharded: for all other layers, the ranks are data-parallel
    (Rajbhandari et al. 2022).
    """
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"a tensor axis of width {width!r}: it must be a whole number >= 1")
    if sequence not in SEQUENCES:
        raise ConfigError(f"sequence={sequence!r}: choose one of {', '.join(map(repr, SEQUENCES))}")
    if sequence in FULL_PARAMETER_SEQUENCES and plan is not None:
        raise ConfigError(f"sequence={sequence!r} leaves parameters whole but for experts: it takes no tensor_plan")
    walk = ShardingWalk(
        width, sequence, {} if sequence in FULL_PARAMETER_SEQUENCES else match_marks_to_layer_paths(model, plan)
    )
    planned = _shard_model_and_loss(walk, model, loss, [Replicated()] * len(list_input_names(model)))
    if width == 1:
        return TensorParallelModel(model, loss, None, frozenset())
    if sequence not in FULL_PARAMETER_SEQUENCES and _get_shard_specs(planned.model) == _get_shard_specs(model):
        raise ConfigError(
            f"a tensor axis of {width} ranks has nothing to cut in {type(model).__name__}: there is no "
            "MultiHeadAttention, MLP, MoE, TransformerBlock or GPT in it. Name layers, for example "
            'tensor_plan={"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel} for a Linear and the Linear '
            "that follows its activation, or "
            "use Mesh(tensor=1)"
        )
    return planned


def _get_shard_specs(model: Layer) -> dict[str, Any]:
    return {name: spec.cut for name, spec in model.specs().items()}


def _shard_model_and_loss(walk: ShardingWalk, model: Layer, loss: Loss, inputs: list[Kind]) -> TensorParallelModel:
    """Shard the model and the loss, and return both. Where needed, add layers that shard the model's input, and a layer
    that all-gathers an output if the loss cannot be computed on shards."""
    enter = None
    if not (isinstance(model, Container) and not model.fixed) and walk.needs_split(inputs[0], model, "", 0):
        enter, inputs = walk.make_split_layer(), [walk.cut]
    new, kinds = walk.shard_layer(model, "", inputs)
    if len(kinds) > 1 and any(not isinstance(kind, Replicated) for kind in kinds):
        way = "choose another sequence" if walk.sequence == "samples" else "close what is cut with a RowParallel"
        raise ConfigError(f"a model with several outputs must give them whole: {way}")
    kind, leave, output_dim = kinds[0], None, None
    if isinstance(kind, ShardedBatch):
        loss, output_dim = ShardedBatchLoss(loss), 0
    elif isinstance(kind, ShardedSequence):
        _require_sequence_shardable_loss(loss, walk.sequence)
        loss, output_dim = ShardedSequenceLoss(loss, walk.width), 1
    if isinstance(kind, ShardedFeatures):
        if not kind.ends:
            raise ConfigError(
                f"{kind.source!r} is a ColumnParallel that no RowParallel closes: its features leave the model cut. "
                "Make a Linear "
                "behind it a RowParallel, use ColumnParallel(gather_output=True), or VocabParallel for logits"
            )
        if type(loss) is CrossEntropyLoss:
            loss, output_dim = VocabParallelCrossEntropyLoss(kind.total, loss.ignore_index, loss.label_smoothing), -1
        else:
            leave = AllGatherFeatures(kind.total)
    if enter or (leave and not isinstance(new, Container)):
        new = WithInputOutput(new, enter, leave)
    elif leave:
        assert isinstance(new, Container)
        name = make_unused_name(new, "leave")
        new = new.with_steps([*new.steps, ChildCall(name, leave, new.outputs, (name,))], (name,))
    names = {get_canonical_name(walk.ties, name) for name in walk.partial}
    partial = frozenset(name for name, spec in new.specs().items() if name in names and spec.trainable)
    return TensorParallelModel(new, loss, output_dim, partial)


def _require_sequence_shardable_loss(loss: Any, sequence: str | None) -> None:
    """Raise ConfigError unless the loss can be computed on shards of the sequence, that is, has `acts_on = "position"`.
    If the loss has no attribute `acts_on`, "sample" is assumed."""
    acts_on = getattr(loss, "acts_on", "sample")
    if acts_on == "position":
        return
    whole = (
        ", or put the output together with nn.sharding.ColumnParallel(gather_output=True)"
        if sequence == "parallel"
        else ""
    )
    raise ConfigError(
        f'{type(loss).__name__}: it compares each {acts_on} as a whole (acts_on = "{acts_on}"), but the model\'s '
        f"output is cut along dim 1 by sequence={sequence!r}. If its total and weight are sums over dims 0 and 1, each "
        f'summand from one position alone, declare acts_on = "position" in its class; else use sequence=None{whole}'
    )


def match_marks_to_layer_paths(model: Layer, plan: Mapping[str, Any] | None) -> dict[str, Mark]:
    """Return the marks of a tensor plan as {path of a layer: mark}. Marks come from the first pattern that matches the
    path, and from the built-in plans of layers that are marked as `LayerDefault`.

    `plan` maps patterns to marks, which are classes or instances. Patterns are matched by fnmatch against dotted
    paths, where `*` also matches dots. If `plan` is None, all layers follow their built-in plans."""
    if plan is not None and not isinstance(plan, Mapping):
        raise ConfigError(
            f"tensor_plan={plan!r}: give a dict of path patterns and marks, for example "
            '{"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel}, or None for the model\'s own plan'
        )
    patterns = {pattern: _parse_mark(pattern, mark) for pattern, mark in (plan or {}).items()}
    layers = dict(iterate_layers(model))
    require_pattern_matches("tensor_plan", patterns, layers, "layer")
    marks: dict[str, Mark] = {}
    for path in layers:
        matched_mark = next((mark for pattern, mark in patterns.items() if fnmatchcase(path, pattern)), None)
        if matched_mark is not None:
            marks[path] = matched_mark
    _add_marks_of_layer_plans(model, "", marks, plan is None)
    return marks


def _add_marks_of_layer_plans(layer: Layer, path: str, marks: dict[str, Mark], inside: bool) -> None:
    """Update `marks` in place with the marks defined by the built-in plans of `layer` and of the layers inside it.
    `inside` is true if an enclosing layer follows its built-in plan."""
    if isinstance(marks.get(path), LayerDefault):
        if not inside and not any(found.plan for _, found in iterate_layers(layer)):
            raise ConfigError(
                f"tensor_plan: {path!r} {layer!r} has no plan of its own, attention, MLPs and models have: choose "
                "nn.sharding.ColumnParallel, nn.sharding.RowParallel or nn.sharding.VocabParallel"
            )
        inside = True
        del marks[path]
    for name, mark in layer.plan.items():
        given = marks.get(join_path(path, name), LayerDefault())
        if (
            inside
            if isinstance(given, LayerDefault)
            else given == ColumnParallel() and isinstance(mark, ColumnParallel)
        ):
            marks[join_path(path, name)] = mark
    for name, child in layer.children().items():
        _add_marks_of_layer_plans(child, join_path(path, name), marks, inside)


def _parse_mark(pattern: Any, mark: Any) -> Mark:
    if not isinstance(pattern, str):
        raise ConfigError(f"tensor_plan: the pattern {pattern!r} must be text, the dotted path of a layer")
    instance = mark() if isinstance(mark, type) and issubclass(mark, Mark) else mark
    if not isinstance(instance, Mark):
        raise ConfigError(
            f"tensor_plan[{pattern!r}] = {mark!r}: choose nn.sharding.ColumnParallel, nn.sharding.RowParallel, "
            "nn.sharding.VocabParallel or nn.sharding.LayerDefault, or one of these "
            "with options"
        )
    return instance
