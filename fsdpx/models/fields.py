"""Check the fields of model configurations (`config.json`) and their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fsdpx.core.base.dataclass import dataclass
from fsdpx.errors import ConfigError

__all__ = [
    "COUNT", "FLAG", "HARMLESS", "NEEDED", "NUMBER", "OBJECT", "PARTS", "PLAIN", "WORD", "ConfigField", "ValueKind",
    "check_and_complete_config_fields", "shorten_value",
]  # fmt: skip

MAX_COUNT = 2**31 - 1
NEEDED: Any = object()
"""Value of `ConfigField.default` that marks required fields."""


@dataclass(frozen=True)
class ValueKind:
    """The allowed values of a configuration field: `words` describes them for error messages, and `test` returns
    whether a value is allowed."""

    words: str
    test: Callable[[Any], bool]


COUNT = ValueKind(f"a whole number from 1 to {MAX_COUNT}", lambda v: type(v) is int and 1 <= v <= MAX_COUNT)
PARTS = ValueKind("a whole number from 1 to the number of tensors in the files", COUNT.test)
NUMBER = ValueKind("a number of at least 0", lambda v: type(v) in (int, float) and 0 <= v < math.inf)
FLAG = ValueKind("true or false", lambda v: isinstance(v, bool))
WORD = ValueKind("a text", lambda v: isinstance(v, str))
OBJECT = ValueKind("an object", lambda v: isinstance(v, dict))


@dataclass(frozen=True)
class ConfigField:
    """A field of a model configuration, and the values that it may have.

    Parameters
    ----------
    kind : the allowed values
    default : the value if the configuration does not contain the field
    null : whether the value may be null
    """

    kind: ValueKind
    default: Any = NEEDED
    null: bool = False


PLAIN: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None), "cross_attention_hidden_size": (None,), "is_causal": (True,),
    "is_decoder": (False, None), "is_encoder_decoder": (False, None), "pruned_heads": (None, {}),
}  # fmt: skip
"""Configuration fields that all architectures have in common, with the supported values of each field."""

HARMLESS = frozenset(
    """
    architectures model_type transformers_version tokenizer_class finetuning_task task_specific_params problem_type
    name_or_path _name_or_path _commit_hash _num_labels num_labels id2label label2id
    dtype torch_dtype torchscript use_bfloat16 use_cache return_dict use_return_dict output_past output_attentions
    output_hidden_states gradient_checkpointing chunk_size_feed_forward pretraining_tp tie_encoder_decoder
    tf_legacy_loss attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation
    initializer_range initializer_factor attention_dropout hidden_dropout classifier_dropout
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix
    max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens epsilon_cutoff eta_cutoff
    encoder_repetition_penalty num_beam_groups diversity_penalty
    """.split()
)
"""Fields that are common to all architectures and do not change the model's outputs: descriptions, dtypes, dropout
(which is an option of fsdpx models), and settings for text generation."""


def check_and_complete_config_fields(
    config: Mapping[str, Any], fields: Mapping[str, ConfigField], where: str, parts: int
) -> dict[str, Any]:
    """Return the values of `fields` in a configuration, with defaults for missing fields. Raise ConfigError for an
    invalid value.

    Parameters
    ----------
    config : a JSON object
    fields : fields by name
    where : path of the configuration, for error messages
    parts : number of tensors in the files, which is the maximum for fields of the kind `PARTS`
    """
    found = {}
    for name, field in fields.items():
        value = config.get(name, field.default)
        if value is NEEDED:
            raise ConfigError(f"{where}: it does not say {name!r}")
        good = (field.null or value is field.default) if value is None else field.kind.test(value)
        if not good or (field.kind is PARTS and value is not None and value > parts):
            raise ConfigError(f"{where}: {name}={shorten_value(value)}: it must be {field.kind.words}")
        found[name] = value
    return found


def shorten_value(value: Any) -> str:
    """Return a value as text of at most about 120 characters, for an error message."""
    text = repr(value) if not isinstance(value, (dict, list, str)) or len(value) < 100 else f"{str(value)[:100]} ..."
    return text if len(text) < 120 else f"{text[:100]} ..."
