"""A model and its loss for a tensor axis: what each rank runs, and what the engine must know about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.nn.block import MLP
from fsdpx.nn.container import ChildCall, Container, free, input_names
from fsdpx.nn.embedding import VocabCrossEntropy
from fsdpx.nn.layer import Layer
from fsdpx.nn.losses import CrossEntropy, Loss
from fsdpx.nn.marks import matched
from fsdpx.nn.rewrite import CutValue, Features, Kind, Rewriter, Whole
from fsdpx.nn.sequence import Enter, Framed, Leave, SampleLoss, SequenceLoss
from fsdpx.nn.ties import canonical

__all__ = ["Planned", "parallelise"]

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
