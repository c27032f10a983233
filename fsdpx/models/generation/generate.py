"""Text generation on any number of ranks. The ranks compute logits together, each rank chooses the tokens of its own
texts, and the chosen tokens are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from fsdpx.core.array.namespace import to_host
from fsdpx.core.comm.communicator import ReduceOp
from fsdpx.core.state.placement import Placement
from fsdpx.core.trainer.batch import checksum_arrays
from fsdpx.core.trainer.call_runner import CallRunner
from fsdpx.core.trainer.session import Session
from fsdpx.errors import ConfigError
from fsdpx.models.generation.texts import (
    Sampling,
    Stream,
    TextLimits,
    convert_prompts_to_lists,
    find_context_start,
    generate_texts,
    is_single_prompt,
    pad_texts,
)
from fsdpx.nn.cache import KeyValueCache
from fsdpx.nn.container import Container
from fsdpx.nn.layer import Layer, join_path

__all__ = ["generate"]


def generate(
    host: CallRunner,
    prompt: Any,
    max_new_tokens: int,
    stop: int | Collection[int],
    sampling: tuple[Any, ...],
    stream: Stream | None,
    cached: bool,
) -> Any:
    """Implement `Trainer.generate`: for a single prompt, return the new tokens as an array; for several prompts, return
    a list of arrays. Collective.

    `sampling` holds the arguments of `Sampling`, in order."""
    with host.raising_errors_on_all_ranks("generate"):
        chosen = Sampling(*sampling)
    prompts, session = [prompt] if is_single_prompt(prompt) else prompt, host.session
    with host.using_weights("parameters"), session.hiding_accumulated_gradients():
        found = _generate_on_ranks(session, prompts, max_new_tokens, stop, chosen, stream, cached)
    return found[0] if is_single_prompt(prompt) else found


def _generate_on_ranks(
    session: Session,
    prompts: Sequence[Any],
    max_new_tokens: int,
    stop: int | Collection[int],
    sampling: Sampling,
    stream: Stream | None,
    cached: bool,
) -> list[np.ndarray]:
    """Generate new tokens for each prompt, and return them on every rank. Collective."""
    place = session.placement
    layers = [
        found
        for unit in place.layout.units
        for node in unit.nodes
        for found in _iterate_leaf_layers(node.path, node.layer)
    ]
    if cached:
        _require_cacheable_layers(layers)
    context = min((n for _, layer in layers if (n := getattr(layer, "seq_len", None)) is not None), default=1 << 31)
    vocab = session.require_logits_and_get_vocab_size(np.zeros((1, 1), np.int64))
    limits = TextLimits.from_options(max_new_tokens, stop, vocab)
    texts = convert_prompts_to_lists(prompts, vocab, context)
    read = checksum_arrays(np.array(text) for text in texts)
    session.agree_on_call(f"generate({len(texts)} prompts {read}, {limits}, {sampling}, cache={cached})")
    axes, count = place.axes, len(texts)
    own_texts = range(count * axes.data.rank // axes.data.size, count * (axes.data.rank + 1) // axes.data.size)
    reader = ModelReader(session, own_texts, context, max(map(len, texts)) + max_new_tokens, cached)
    share_tokens = _make_token_all_reduce(place)
    return generate_texts(texts, own_texts, reader.compute_logits, share_tokens, sampling, limits, stream)


class ModelReader:
    """Computes the logits of texts that grow by one token per call. Uses a key-value cache if `cached` is True.

    Attributes
    ----------
    own_texts : indices of the texts that this rank processes
    context : maximum number of tokens that the model can read at once
    capacity : number of tokens per text that the cache has room for
    """

    def __init__(self, session: Session, own_texts: range, context: int, longest: int, cached: bool) -> None:
        self.session, self.own_texts, self.context = session, own_texts, context
        self.capacity, self.cached = min(context, longest), cached
        self.cache: KeyValueCache | None = None
        self.begins: list[int] = []

    def compute_logits(self, texts: list[list[int]]) -> np.ndarray:
        """Return the logits of the next token for each of this rank's texts, as an array (texts, vocab). `texts`
        contains the tokens of all texts, not only this rank's texts. Collective."""
        begins = [find_context_start(len(text), self.context) for text in texts]
        ends = [len(text) - begin for text, begin in zip(texts, begins, strict=True)]
        own_texts = slice(self.own_texts.start, self.own_texts.stop)
        if self.cache is None or begins != self.begins:
            tokens = pad_texts([texts[i][begins[i] :] for i in self.own_texts], max(ends))
            self.cache = KeyValueCache(len(self.own_texts), self.capacity) if self.cached else None
            last = np.array(ends[own_texts], np.int64) - 1
        else:
            tokens = pad_texts([texts[i][-1:] for i in self.own_texts], 1)
            self.cache.lengths = np.array(ends[own_texts], np.int64) - 1
            last = np.zeros(len(self.own_texts), np.int64)
        self.begins = begins
        feed = self.session.make_predict_inputs_from_tokens(tokens, self.own_texts.start, self.cache)
        (found,) = self.session.gather_outputs_over_tensor_and_pipeline(self.session.run_program("predict", feed), feed)
        return np.asarray(to_host(found[np.arange(last.size), last]), np.float64)


def _make_token_all_reduce(place: Placement) -> Callable[[np.ndarray], None]:
    axes = place.axes
    # Tokens are shared by summing over all ranks. Ranks that differ only on the pipeline or tensor axis chose the same
    # tokens, so only one of them contributes.
    is_reporting_rank = axes.pipe.rank == axes.tensor.rank == 0

    def share_tokens(found: np.ndarray) -> None:
        if axes.world.size == 1:
            return
        if not is_reporting_rank:
            found[:] = 0
        axes.world.all_reduce(found, ReduceOp.SUM, what="new tokens").wait()

    return share_tokens


def _iterate_leaf_layers(path: str, layer: Layer) -> Iterable[tuple[str, Layer]]:
    if not isinstance(layer, Container):
        yield path, layer
        return
    for name, child in layer.children().items():
        yield from _iterate_leaf_layers(join_path(path, name), child)


def _require_cacheable_layers(layers: Iterable[tuple[str, Layer]]) -> None:
    """Raise ConfigError if a layer cannot process a text token by token with a key-value cache. The message names the
    path of this layer."""
    for path, layer in layers:
        able = layer.acts_on in ("position", "element") if layer.caches is None else layer.caches
        if not able:
            raise ConfigError(
                f"generate: layer {path!r} {layer!r} keeps no keys and values, and its result at a position may depend "
                'on others: use cache=False; or, if it does not, say acts_on = "position" in its class (Layer.caches)'
            )
