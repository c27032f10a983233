"""A model and its loss for a tensor axis: the pass that cuts layers, and what each rank runs then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.activation import CutDropout, Dropout
from fsdpx.nn.block import MLP
from fsdpx.nn.container import ChildCall, Container, free, input_names
from fsdpx.nn.embedding import Embedding, TokenEmbedding, VocabCrossEntropy, VocabEmbedding, VocabTokenEmbedding
from fsdpx.nn.heads import Attention, PerHead
from fsdpx.nn.layer import Layer, dotted, prefixed
from fsdpx.nn.linear import ColumnLinear, Linear, RowLinear
from fsdpx.nn.losses import CrossEntropy, Loss
from fsdpx.nn.lowrank import ColumnLoRA, LoRALinear, RowLoRA
from fsdpx.nn.marks import Column, Mark, Row, Vocab, matched
from fsdpx.nn.moe import CutMoE, MoE
from fsdpx.nn.sequence import Enter, Framed, Leave, PartTokenEmbedding, SampleLoss, SequenceLoss
from fsdpx.nn.ties import canonical

__all__ = ["CutValue", "Features", "Kind", "Planned", "Rewriter", "Whole", "parallelise"]

@dataclass(frozen=True)
class Whole:
    """A value that every rank holds in full."""

    def __str__(self) -> str:
        return "a whole input"


@dataclass(frozen=True)
class CutValue:
    """A value that is cut along dim 1, or dim 0 where samples are cut."""

    def __str__(self) -> str:
        return "a part of the sequence"


@dataclass(frozen=True)
class Features:
    """A value whose last dim, of full size `total`, was cut by layer `source`. ends: it may be the model's output."""

    total: int
    blocks: int
    grain: int
    source: str = field(compare=False)
    ends: bool = field(compare=False, default=False)

    def __str__(self) -> str:
        return f"features that {self.source!r} cut"


Kind = Whole | CutValue | Features
"""How a value is cut over the tensor axis."""


class Rewriter:
    """One pass over a model: replaces each layer by what fits its inputs, and finds out how its results are cut."""

    def __init__(self, width: int, sequence: str | None, marks: Mapping[str, Mark], own: set[str]) -> None:
        self.width, self.sequence, self.marks, self.own = width, sequence, marks, own
        self.context, self.samples = sequence in ("ulysses", "ring"), sequence == "samples"
        self.cuts = 0
        self.partial: set[str] = set()
        self.ties: dict[str, str] = {}

    def visit(self, layer: Layer, path: str, kinds: Sequence[Kind]) -> tuple[Layer, list[Kind]]:
        """The layer that replaces `layer`, and how its results are cut."""
        if self.samples and not isinstance(layer, Container):
            return self._of_samples(layer, path), [CutValue()]
        if isinstance(layer, Container) and path in self.marks:
            raise ConfigError(
                f"tensor_plan: {path!r} is a {type(layer).__name__}, which cannot be a {_name(self.marks[path])}: name "
                "the Linear layers inside, or give it nn.Own"
            )
        if isinstance(layer, Container):
            return self.container(layer, path, kinds)
        new, kind = self._leaf(layer, path, list(kinds))
        return new, [kind]

    def container(self, layer: Container, path: str, kinds: Sequence[Kind]) -> tuple[Container, list[Kind]]:
        """`visit` of a container: of its steps, with an `Enter` before those that must read a part of the sequence."""
        values = dict(zip(layer.inputs, kinds, strict=True))
        entered: dict[str, str] = {}
        steps: list[ChildCall] = []
        for step in layer.steps:
            below = dotted(path, step.name)
            sources = []
            for place, source in enumerate(step.sources):
                if self.enters(values[source], step.layer, below, place):
                    if source not in entered:
                        entered[source] = free(layer, f"enter_{source.replace('.', '_')}")
                        steps.append(ChildCall(entered[source], Enter(self.dim), (source,), (entered[source],)))
                        values[entered[source]] = CutValue()
                    source = entered[source]
                sources.append(source)
            new, given = self.visit(step.layer, below, [values[source] for source in sources])
            values.update(zip(step.gives, given, strict=True))
            steps.append(ChildCall(step.name, new, tuple(sources), step.gives))
        self._ties(layer, path, steps)
        return layer.rewired(steps), [values[name] for name in layer.outputs]

    def enters(self, kind: Kind, layer: Layer, path: str, place: int) -> bool:
        """Whether a value of this kind must be cut before `layer` reads it."""
        if self.sequence is None or not isinstance(kind, Whole):
            return False
        return self.samples or not self._takes_whole(layer, path, place)

    @property
    def dim(self) -> int:
        """Along which activations are cut."""
        return 0 if self.samples else 1

    def _takes_whole(self, layer: Layer, path: str, place: int) -> bool:
        """Whether `layer` needs all of an input: an embedding that is cut by rows does, and attention its segments."""
        if isinstance(layer, Container):
            name = layer.inputs[place]
            readers = [(s, i) for s in layer.steps for i, source in enumerate(s.sources) if source == name]
            return any(self._takes_whole(s.layer, dotted(path, s.name), i) for s, i in readers)
        if isinstance(layer, Attention):
            return place == 3
        return isinstance(layer, Embedding | TokenEmbedding) and path in self.marks

    def _ties(self, layer: Container, path: str, steps: Sequence[ChildCall]) -> None:
        """Tied parameters must be cut alike."""
        specs = prefixed((step.name, step.layer) for step in steps)
        for alias, name in layer.ties.items():
            self.ties[dotted(path, alias)] = dotted(path, name)
            if specs[alias].cut != specs[name].cut:
                raise ConfigError(
                    f"{dotted(path, alias)!r} is tied to {dotted(path, name)!r}, but one lies over the tensor axis as "
                    f"{specs[alias].cut} and the other as {specs[name].cut} (None is whole): cut both layers alike"
                )

    def _leaf(self, layer: Layer, path: str, kinds: list[Kind]) -> tuple[Layer, Kind]:
        mark = self.marks.get(path)
        if mark is not None:
            return self._marked(layer, path, mark, kinds[0])
        if isinstance(layer, PerHead):
            return self._per_head(layer, path, kinds)
        if isinstance(layer, MoE) and (self.context or path in self.own):
            return self._experts(layer, path, kinds[0])
        kind = kinds[0] if kinds else Whole()
        if any(other != kind for other in kinds):
            got = ", ".join(map(str, kinds))
            raise ConfigError(
                f"{path!r} {layer!r} reads {got} together: close features that are cut with a Row first, or cut both"
            )
        if isinstance(kind, Features):
            self._by_itself(layer, path, kind, ("element",))
            close = "close them before it, with a Row or Column(gather_output=True)"
            self._no_parameters(layer, path, kind, close)
            return self._dropout(layer, path, kind), kind
        if isinstance(kind, CutValue):
            self._add_partial(layer, path)
            if type(layer) is TokenEmbedding:
                size = (layer.vocab, layer.d_model, layer.seq_len)
                return PartTokenEmbedding(*size, init=layer.init, position_init=layer.position_init), kind
            self._by_itself(layer, path, kind, ("element", "position"))
            return layer.on_part() if isinstance(layer, MoE) else self._dropout(layer, path, kind), kind
        return layer, kind

    def _experts(self, layer: MoE, path: str, kind: Kind) -> tuple[Layer, Kind]:
        self._not_features(layer, path, kind)
        self._enough(path, layer.experts, "experts", "" if self.context else "a tensor_plan that leaves them whole")
        self.partial.add(dotted(path, "router"))
        self.cuts += 1
        size = (layer.d_model, layer.d_hidden, layer.experts, layer.active, layer.balance, isinstance(kind, CutValue))
        return CutMoE(*size, init=layer.init, out_init=layer.out_init), kind

    def _of_samples(self, layer: Layer, path: str) -> Layer:
        """The layer for a part of the samples: the layer itself, unless it looks at several samples together."""
        if isinstance(layer, MoE):
            return self._experts(layer, path, CutValue())[0]
        if layer.collective or any(spec.state for spec in layer.specs().values()):
            raise ConfigError(
                f"{path!r} {layer!r} takes statistics over samples, which sequence='samples' cuts: use LayerNorm or "
                "RMSNorm"
            )
        self._add_partial(layer, path)
        return layer

    def _per_head(self, layer: PerHead, path: str, kinds: list[Kind]) -> tuple[Layer, Kind]:
        """With a part of the heads a layer does what it does with all; parts of several inputs must be of the same."""
        kinds = kinds[:3]  # without segments, which are whole
        cut = [kind for kind in kinds if isinstance(kind, Features)]
        if cut:
            blocks, grain = layer.blocks, cut[0].grain
            whole = all(kind.blocks == blocks and kind.grain % layer.d_head == 0 for kind in cut)
            if len(cut) < len(kinds) or not whole or len({kind.total // kind.grain for kind in cut}) > 1:
                options = f"grain={layer.d_head}" if blocks == 1 else f"{blocks=}, grain={layer.d_head}"
                raise ConfigError(
                    f"{path!r} {layer!r} reads {', '.join(map(str, kinds))}, but needs heads of {layer.d_head} "
                    f"features that stay together: give Columns a grain, such as nn.Column({options})"
                )
            self._add_partial(layer, path)
            return layer, Features(cut[0].total // blocks, 1, grain, cut[0].source)
        if any(isinstance(kind, CutValue) for kind in kinds):
            self._add_partial(layer, path)
            if self.sequence == "ulysses" and isinstance(layer, Attention):
                self._enough(path, layer.n_heads, "heads", 'sequence="ring"')
            return layer.on_part(path, str(self.sequence)), CutValue()
        return layer, kinds[0]

    def _marked(self, layer: Layer, path: str, mark: Mark, kind: Kind) -> tuple[Layer, Kind]:
        self.cuts += 1
        if isinstance(mark, Vocab) and type(layer) is TokenEmbedding:
            return self._token_embedding(layer, path)
        if isinstance(mark, Vocab) and type(layer) is Embedding:
            self._enough(path, layer.num_embeddings, "embeddings")
            parts = self.sequence is not None
            new = VocabEmbedding(layer.num_embeddings, layer.embedding_dim, parts, init=layer.init)
            return new, CutValue() if parts else Whole()
        linear = self._linear(layer, path, mark)
        if isinstance(mark, Row):
            return self._marked_row(linear, path, kind)
        assert isinstance(mark, Column | Vocab)
        self._not_features(linear, path, kind)
        options = mark if isinstance(mark, Column) else Column()
        count, rest = divmod(linear.out_features, options.blocks * options.grain)
        if rest:
            raise ConfigError(
                f"{path!r} {linear!r}: its {linear.out_features} results are not {options.blocks} blocks of multiples "
                f"of {options.grain}"
            )
        self._enough(path, count, "results" if options.grain == 1 else f"runs of {options.grain} results")
        cut = (options.blocks, options.grain, options.gather_output)
        new_column = self._column(linear, path, isinstance(kind, CutValue), *cut)
        if options.gather_output:
            return new_column, Whole()
        size = (linear.out_features, options.blocks, options.grain)
        return new_column, Features(*size, path, ends=isinstance(mark, Vocab))

    def _token_embedding(self, layer: TokenEmbedding, path: str) -> tuple[Layer, Kind]:
        self._enough(path, layer.vocab, "tokens in its vocabulary")
        parts, size = self.sequence is not None, (layer.vocab, layer.d_model, layer.seq_len)
        if parts:
            self.partial.add(dotted(path, "position"))
        new = VocabTokenEmbedding(*size, parts, init=layer.init, position_init=layer.position_init)
        return new, CutValue() if parts else Whole()

    def _marked_row(self, linear: Linear, path: str, kind: Kind) -> tuple[Layer, Kind]:
        if not isinstance(kind, Features):
            raise ConfigError(
                f"{path!r} {linear!r} is a Row, but reads {kind}: make the Linear before it a Column, so that its "
                "features are cut"
            )
        if kind.blocks != 1 or kind.total != linear.in_features:
            raise ConfigError(
                f"{path!r} {linear!r} cannot close {kind}: they are {kind.total} in {kind.blocks} blocks, and a Row "
                f"reads {linear.in_features} in one block"
            )
        parts = self.sequence is not None
        return self._row(linear, path, kind.grain, parts), CutValue() if parts else Whole()

    def _column(
        self, linear: Linear, path: str, parts: bool, blocks: int = 1, grain: int = 1, gather_output: bool = False
    ) -> ColumnLinear:
        if isinstance(linear, LoRALinear):
            self.partial.add(dotted(path, ColumnLoRA.partial))
            return ColumnLoRA(linear, gather_output=gather_output, sequence=parts, blocks=blocks, grain=grain)
        size = (linear.in_features, linear.out_features, linear.bias, gather_output, parts, blocks, grain)
        return ColumnLinear(*size, init=linear.init, bias_init=linear.bias_init)

    def _row(self, linear: Linear, path: str, grain: int, parts: bool) -> RowLinear:
        if parts and linear.bias:
            self.partial.add(dotted(path, "bias"))
        if isinstance(linear, LoRALinear):
            self.partial.add(dotted(path, RowLoRA.partial))
            return RowLoRA(linear, sequence=parts, grain=grain)
        size = (linear.in_features, linear.out_features, linear.bias, parts, grain)
        return RowLinear(*size, init=linear.init, bias_init=linear.bias_init)

    def _linear(self, layer: Layer, path: str, mark: Mark | None = None) -> Linear:
        if isinstance(layer, LoRALinear) and layer.dropout:
            raise ConfigError(
                f"{path!r} {layer!r} cannot be cut, since its adapters have dropout={layer.dropout}: use nn.lora with "
                "dropout=0"
            )
        if type(layer) not in (Linear, LoRALinear):
            what = f" as {_name(mark)}" if mark else ""
            raise ConfigError(
                f"{path!r} {layer!r} cannot be cut{what}: Column and Row take a Linear, Vocab an Embedding, "
                "TokenEmbedding or the Linear that ends the model, and Own attention, MLP, MoE and what contains them"
            )
        assert isinstance(layer, Linear)
        return layer

    def _dropout(self, layer: Layer, path: str, kind: Kind) -> Layer:
        if type(layer) is not Dropout:
            return layer
        if isinstance(kind, CutValue):
            return CutDropout(layer.p, 1)
        assert isinstance(kind, Features)
        if kind.blocks != 1:
            raise ConfigError(f"{path!r} {layer!r} reads {kind} in {kind.blocks} blocks: put it where they are closed")
        return CutDropout(layer.p, -1, kind.total, kind.grain)

    def _by_itself(self, layer: Layer, path: str, kind: Kind, pieces: tuple[str, ...]) -> None:
        """ConfigError unless the layer can act on its part of the input alone."""
        if type(layer) is Dropout or layer.acts_on in pieces:
            return
        way = f"it cannot be used with sequence={self.sequence!r}"
        if isinstance(kind, Features):
            way = "close them with a Row before it, or use Column(gather_output=True)"
        reads = f"{path!r} {layer!r} reads {kind}"
        raise ConfigError(f"{reads}, but acts on each {layer.acts_on} as a whole (Layer.acts_on): {way}")

    def _no_parameters(self, layer: Layer, path: str, kind: Features, instead: str) -> None:
        """Between a Column and its Row, every rank would compute the gradient from its own features only."""
        if names := ", ".join(dotted(path, name) for name in layer.specs()):
            raise ConfigError(
                f"{path!r} {layer!r} reads {kind}, but has parameters ({names}), which every rank holds whole and of "
                f"whose gradient it would get a part only: {instead}"
            )

    def _not_features(self, layer: Layer, path: str, kind: Kind) -> None:
        if isinstance(kind, Features):
            raise ConfigError(f"{path!r} {layer!r} reads {kind}: close them with a Row before it")

    def _enough(self, path: str, count: int, things: str, instead: str = "") -> None:
        if count < self.width:
            way = f", or {instead}" if instead else ""
            raise ConfigError(
                f"{path!r} has {count} {things}, fewer than the {self.width} ranks of the tensor axis: use "
                f"Mesh(tensor={max(count, 1)}) or less{way}"
            )

    def _add_partial(self, layer: Layer, path: str) -> None:
        self.partial.update(dotted(path, name) for name in layer.specs())


def _name(mark: Mark | None) -> str:
    return "nothing" if mark is None else type(mark).__name__


SEQUENCES = (None, "parallel", "ulysses", "ring", "samples")
WHOLE = ("ulysses", "ring", "samples")
"""The values of `sequence` that cut no parameters but those of experts."""


@dataclass(frozen=True)
class Planned:
    """The result of `parallelise`: what each rank of the tensor axis runs on the same batch.

    output_dim: the dim along which the model's output is cut: -1 classes, 1 sequence, 0 samples; None: not cut.
    partial: names of the parameters whose gradient each rank computes a part of, to be summed over the axis once."""

    model: Layer
    loss: Loss
    output_dim: int | None
    partial: frozenset[str]


def parallelise(
    model: Layer, loss: Loss, width: int, plan: Mapping[str, Any] | None = None, sequence: str | None = None
) -> Planned:
    """`model` and `loss` for a tensor axis. Parameters keep their names, shapes and initial values.

    Communicates nothing; the result is the same on every rank. ConfigError, with the path of the layer, for what cannot
    be cut.

    Parameters
    ----------
    model : any layer; attention, MLPs, MoE, GPT, Llama, Bert and ViT have a plan of their own (`Layer.plan`)
    loss : needs `acts_on = "position"` if `sequence` leaves the model's output cut along dim 1
    width : ranks of the tensor axis
    plan : name pattern (fnmatch) -> `Column`, `Row`, `Vocab` or `Own`; None: the layers' own plans
    sequence : None, "parallel", "ulysses", "ring" or "samples", see below

    "parallel" cuts activations between cut layers along dim 1 (Korthikanti et al. 2022); None leaves them full on every
    rank. "ulysses" (Jacobs et al. 2023) and "ring" (Liu et al. 2023) cut no parameters but the experts of MoE
    layers, and activations along dim 1 from end to end. "samples" cuts experts alone, and activations along dim 0: its
    ranks are data-parallel for all other layers (Rajbhandari et al. 2022).
    """
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"a tensor axis of width {width!r}: it must be a whole number >= 1")
    if sequence not in SEQUENCES:
        raise ConfigError(f"sequence={sequence!r}: choose one of {', '.join(map(repr, SEQUENCES))}")
    if sequence in WHOLE and plan is not None:
        raise ConfigError(f"sequence={sequence!r} leaves parameters whole but for experts: it takes no tensor_plan")
    marks, own = ({}, set()) if sequence in WHOLE else matched(model, plan)
    rewriter = Rewriter(width, sequence, marks, own)
    inputs: list[Kind] = [Whole()] * len(input_names(model))
    planned = _root(rewriter, model, loss, inputs)
    if width == 1:
        return Planned(model, loss, None, frozenset())
    if not rewriter.cuts and sequence not in WHOLE:
        raise ConfigError(
            f"a tensor axis of {width} ranks has nothing to cut in {type(model).__name__}: there is no "
            "MultiHeadAttention, MLP, MoE, TransformerBlock or GPT in it. Name layers, for example "
            'tensor_plan={"0": nn.Column, "2": nn.Row} for a Linear and the Linear that follows its activation, or '
            "use Mesh(tensor=1)"
        )
    return planned


def _root(rewriter: Rewriter, model: Layer, loss: Loss, inputs: list[Kind]) -> Planned:
    """The model with its ends: where full inputs are cut, and what is done with a result that is cut."""
    new, enter = model, None
    if isinstance(model, Container) and not isinstance(model, MLP):
        new, kinds = rewriter.visit(model, "", inputs)
    else:
        if rewriter.enters(inputs[0], model, "", 0):
            enter, inputs = Enter(rewriter.dim), [CutValue()]
        new, kinds = rewriter.visit(model, "", inputs)
    if len(kinds) > 1 and any(not isinstance(kind, Whole) for kind in kinds):
        way = "choose another sequence" if rewriter.samples else "close what is cut with a Row"
        raise ConfigError(f"a model with several outputs must give them whole: {way}")
    kind, leave, output_dim = kinds[0], None, None
    if isinstance(kind, CutValue) and rewriter.samples:
        loss, output_dim = SampleLoss(loss), 0
    elif isinstance(kind, CutValue):
        _may_be_cut(loss, rewriter.sequence)
        loss, output_dim = SequenceLoss(loss, rewriter.width), 1
    if isinstance(kind, Features):
        _may_end(kind)
        if type(loss) is CrossEntropy:
            loss, output_dim = VocabCrossEntropy(kind.total, loss.ignore_index, loss.label_smoothing), -1
        else:
            leave = Leave(kind.total)
    if enter or (leave and not isinstance(new, Container)):
        new = Framed(new, enter, leave)
    elif leave:
        assert isinstance(new, Container)
        name = free(new, "leave")
        new = new.rewired([*new.steps, ChildCall(name, leave, new.outputs, (name,))], (name,))
    return Planned(new, loss, output_dim, _canonical(rewriter, new))


def _may_be_cut(loss: Any, sequence: str | None) -> None:
    """The loss must add up over parts of the sequence; one that is not a `Loss` may lack `acts_on`."""
    acts_on = getattr(loss, "acts_on", "sample")
    if acts_on == "position":
        return
    whole = ", or put the output together with nn.Column(gather_output=True)" if sequence == "parallel" else ""
    raise ConfigError(
        f'{type(loss).__name__}: it compares each {acts_on} as a whole (acts_on = "{acts_on}"), but the model\'s '
        f"output is cut along dim 1 by sequence={sequence!r}. If its total and weight are sums over dims 0 and 1, each "
        f'summand from one position alone, declare acts_on = "position" in its class; else use sequence=None{whole}'
    )


def _may_end(kind: Features) -> None:
    if not kind.ends:
        raise ConfigError(
            f"{kind.source!r} is a Column that no Row closes: its features leave the model cut. Make a Linear behind "
            "it a Row, use Column(gather_output=True), or Vocab for logits"
        )


def _canonical(rewriter: Rewriter, model: Layer) -> frozenset[str]:
    """`partial` under canonical names, without parameters that are not trained."""
    names = {canonical(rewriter.ties, name) for name in rewriter.partial}
    return frozenset(name for name, spec in model.specs().items() if name in names and spec.trainable)
