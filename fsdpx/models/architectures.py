"""The supported architectures of the transformers library, and how their configurations and tensor names map to fsdpx
models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.errors import ConfigError
from fsdpx.models.fields import (
    COUNT,
    FLAG,
    HARMLESS,
    NUMBER,
    OBJECT,
    PARTS,
    PLAIN,
    WORD,
    ConfigField,
    ValueKind,
    check_and_complete_config_fields,
    shorten_value,
)
from fsdpx.models.fields import (
    ConfigField as Field,
)
from fsdpx.nn.container import Container
from fsdpx.nn.encoders import Bert, ViT
from fsdpx.nn.gpt import GPT
from fsdpx.nn.llama import Llama

__all__ = ["ARCHITECTURES", "Architecture", "Config"]

Config = Mapping[str, Any]
"""The contents of `config.json`."""


@dataclass(frozen=True)
class Architecture:
    """A supported architecture: how to build the model from `config.json`, and how its parameters are named in files.

    Parameters
    ----------
    make_model : function that builds the model from a configuration and the caller's options
    names : parameter name in fsdpx, or name prefix that ends in a dot -> corresponding name in the files; * stands for
        the index of a block. If the name in the files contains #, the files store each slice of the parameter along dim
        0 as a tensor of its own, and # stands for 0, 1, ... The first entry that matches applies
    base_prefix : prefix of tensor names, such as "model."; files of a model without a head omit this prefix
    transposed : patterns (fnmatch) for the fsdpx names of matrices that the files store transposed
    unused : name patterns of tensors in the files that are not needed
    fields : configuration fields that determine the model
    required_values : configuration field that supports only some values -> these values; the field may also be missing
    ignored_fields : configuration fields that do not change the model. Fields common to all architectures need not be
        listed. Any other field that is in none of these three tables is an error
    aliases : alternative name of a configuration field -> its usual name
    tied : for models with `tie_word_embeddings`, a dict that maps the name of each tied tensor to the name of the
        tensor that it is tied to; the first entry is the head
    """

    make_model: Callable[..., Container]
    names: Mapping[str, str]
    base_prefix: str = ""
    transposed: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    fields: Mapping[str, ConfigField] = field(default_factory=dict)
    required_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def check_and_complete_config(self, config: Config, where: str, parts: int) -> dict[str, Any]:
        """Check the contents of `config.json`, and return the values of `fields`, with defaults for missing fields.
        Raise ConfigError for an unknown field or an unsupported value.

        `where` is the path of the file, for error messages. `parts` is the number of tensors in the weight files."""
        values = dict(config)
        for alias, name in self.aliases.items():
            value = values.pop(alias, None)
            if value is not None and values.setdefault(name, value) != value:
                raise ConfigError(
                    f"{where}: {alias}={shorten_value(value)} and {name}={shorten_value(values[name])} are the same "
                    "field"
                )
        plain = {**PLAIN, **self.required_values}
        for name, value in values.items():
            if name in self.fields or name in HARMLESS or name in self.ignored_fields:
                continue
            if name in plain and value not in plain[name]:
                raise ConfigError(
                    f"{where}: {name}={shorten_value(value)} is not supported; only {plain[name][0]!r} is"
                )
            if name not in plain and value is not None:
                raise ConfigError(
                    f"{where}: {name}={shorten_value(value)}: this field is unknown, and may require what is not "
                    "supported; remove it from the file if the model is the same without it"
                )
        return check_and_complete_config_fields(values, self.fields, where, parts)

    def get_names_in_files(self, name: str, rows: int) -> tuple[str, ...]:
        """Return the names that files use for a parameter: one tensor name or, for stacked experts, one for each of
        the `rows` slices along dim 0."""
        found = self._get_name_in_files(name)
        return tuple(found.replace("#", str(row)) for row in range(rows)) if "#" in found else (found,)

    def _get_name_in_files(self, name: str) -> str:
        for ours, theirs in self.names.items():
            pattern = re.escape(ours).replace(r"\*", r"(\d+)") + ("(.*)" if ours.endswith(".") else "")
            if match := re.fullmatch(pattern, name):
                groups = list(match.groups())
                rest = groups.pop() if ours.endswith(".") else ""
                return (theirs.replace("*", groups[0]) if groups else theirs) + rest
        raise ConfigError(f"{name} has no name in the files of this architecture")

    def is_stored_transposed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.transposed)

    def is_unused(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unused)


def _build_gpt2(c: Config, **options: Any) -> GPT:
    given: dict[str, Any] = {
        "tie": c["tie_word_embeddings"], "hidden": c["n_inner"], "eps": c["layer_norm_epsilon"],
        "activation": c["activation_function"],
    }  # fmt: skip
    return GPT(c["vocab_size"], c["n_embd"], c["n_layer"], c["n_head"], c["n_positions"], **given | options)


def _build_llama(c: Config, **options: Any) -> Llama:
    """Build a Llama model, or a similar model, from a configuration. `options` are arguments of `nn.Llama` that
    override the configuration or that the similar model needs."""
    theta, scaling = _parse_rope_base_and_scaling(c)
    bias, other = c.get("attention_bias", False), c.get("mlp_bias", False)
    if bias is not other:
        raise ConfigError(
            f"config.json: attention_bias={bias} and mlp_bias={other}: biases in only one of them are not supported"
        )
    given: dict[str, Any] = {
        "kv_heads": c["num_key_value_heads"], "d_head": c["head_dim"], "hidden": c["intermediate_size"],
        "theta": theta, "rope_scaling": scaling, "bias": bias, "activation": c["hidden_act"],
        "eps": c["rms_norm_eps"], "tie": c["tie_word_embeddings"],
    }  # fmt: skip
    sizes = (c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    return Llama(*sizes, c["max_position_embeddings"], **given | options)


def _parse_rope_base_and_scaling(c: Config) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling): the base of the rotary frequencies, and the options of position scaling. `scaling` is
    None if positions are not scaled."""
    if c["rope_parameters"] and c["rope_scaling"]:
        raise ConfigError("config.json: rope_parameters and rope_scaling are two names of one field")
    given = c["rope_parameters"] or c["rope_scaling"] or {}
    for name, value in given.items():
        if (name not in ROPE and value is not None) or (name in ROPE_PLAIN and value not in ROPE_PLAIN[name]):
            raise ConfigError(f"config.json: {name}={shorten_value(value)} of rotary positions is not supported")
    rope = check_and_complete_config_fields(given, ROPE, "config.json, rotary positions", 0)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type") or rope.pop("type") or "default"
    theta = c["rope_theta"] if theta is None else theta
    if kind == "default":
        return theta, None
    if kind in ("llama3", "yarn"):
        length = c["original_max_position_embeddings"] or rope["original_max_position_embeddings"]
        rope["original_max_position_embeddings"] = length or c["max_position_embeddings"]
    return theta, {"rope_type": kind} | {name: value for name, value in rope.items() if value is not None}


def _build_mistral(c: Config, **options: Any) -> Llama:
    return _build_llama(c, **{"window": c["sliding_window"], **options})


def _build_qwen2(c: Config, **options: Any) -> Llama:
    _require_full_attention(c)
    return _build_llama(c, **{"qkv_bias": True, **options})


def _build_qwen3(c: Config, **options: Any) -> Llama:
    _require_full_attention(c)
    return _build_llama(c, **{"qk_norm": True, **options})


def _require_full_attention(c: Config) -> None:
    if odd := set(c["layer_types"] or ()) - {"full_attention"}:
        raise ConfigError(
            f"config.json: layer_types: {shorten_value(min(odd))} is not supported; only 'full_attention' is"
        )


def _build_gemma(c: Config, **options: Any) -> Llama:
    """Build a Gemma model from a configuration.

    In Gemma's configurations, "gelu" in the field `hidden_act` has always meant the tanh approximation. The other field
    for the activation, `hidden_activation`, is no longer read by recent versions of transformers."""
    activation = "gelu_pytorch_tanh" if c["hidden_act"] == "gelu" else c["hidden_act"]
    if (c["hidden_activation"] or activation) != activation:
        raise ConfigError(
            f"config.json: hidden_activation={c['hidden_activation']!r} and hidden_act={c['hidden_act']!r}: which of "
            "them counts differs between versions of transformers; take one out of the file"
        )
    return _build_llama(c, **{"scale_embedding": True, "unit_offset": True, "activation": activation, **options})


def _build_mixtral(c: Config, **options: Any) -> Llama:
    """Build a Mixtral model from a configuration.

    If `output_router_logits` is set, Mixtral computes a single load-balancing loss over all blocks. The option
    `balance=` of `nn.Llama` adds one loss per block instead."""
    own = {"experts": c["num_local_experts"], "active": c["num_experts_per_tok"]}
    return _build_mistral(c, **own | options)


def _build_bert(c: Config, **options: Any) -> Bert:
    given: dict[str, Any] = {
        "hidden": c["intermediate_size"], "types": c["type_vocab_size"], "activation": c["hidden_act"],
        "eps": c["layer_norm_eps"], "tie": c["tie_word_embeddings"],
    }  # fmt: skip
    sizes = (c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    return Bert(*sizes, c["max_position_embeddings"], **given | options)


def _build_bert_classifier(c: Config, **options: Any) -> Bert:
    return _build_bert(c, **{"classes": _count_classes(c), **options})


def _build_vit(c: Config, **options: Any) -> ViT:
    given: dict[str, Any] = {
        "channels": c["num_channels"], "hidden": c["intermediate_size"], "qkv_bias": c["qkv_bias"],
        "activation": c["hidden_act"], "eps": c["layer_norm_eps"],
    }  # fmt: skip
    sizes = (c["image_size"], c["patch_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    return ViT(*sizes, _count_classes(c), **given | options)


def _count_classes(c: Config) -> int:
    return len(c["id2label"] or ()) or c["num_labels"]


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


NULL_COUNT = Field(COUNT, None, null=True)
SIZES = {
    "hidden_size": Field(COUNT), "num_hidden_layers": Field(PARTS), "num_attention_heads": Field(COUNT),
    "intermediate_size": Field(COUNT),
}  # fmt: skip
CLASSES = {"id2label": Field(OBJECT, None, null=True), "num_labels": Field(COUNT, 2)}
TIE = Field(FLAG, True)

GPT2_FIELDS = {
    "vocab_size": Field(COUNT), "n_embd": Field(COUNT), "n_layer": Field(PARTS), "n_head": Field(COUNT),
    "n_positions": Field(COUNT), "n_inner": NULL_COUNT, "layer_norm_epsilon": Field(NUMBER, 1e-5),
    "activation_function": Field(WORD, "gelu_new"), "tie_word_embeddings": TIE,
}  # fmt: skip

ROPE_PLAIN = {"partial_rotary_factor": (1.0, None)}
ROPE = {
    "rope_type": Field(WORD, None, null=True), "type": Field(WORD, None, null=True), "truncate": Field(FLAG, True),
    **dict.fromkeys(("original_max_position_embeddings",), NULL_COUNT),
    **dict.fromkeys(
        ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "attention_factor", "partial_rotary_factor"),
        Field(NUMBER, None, null=True),
    ),
}  # fmt: skip
"""The supported fields of `rope_parameters`."""

LLAMA_FIELDS = SIZES | {
    "vocab_size": Field(COUNT), "max_position_embeddings": Field(COUNT), "num_key_value_heads": NULL_COUNT,
    "head_dim": NULL_COUNT, "rope_parameters": Field(OBJECT, None, null=True),
    "rope_scaling": Field(OBJECT, None, null=True), "rope_theta": Field(NUMBER, 10000.0),
    "original_max_position_embeddings": NULL_COUNT, "hidden_act": Field(WORD, "silu"),
    "rms_norm_eps": Field(NUMBER, 1e-6), "tie_word_embeddings": Field(FLAG, False),
}  # fmt: skip
BIASES = {"attention_bias": Field(FLAG, False), "mlp_bias": Field(FLAG, False)}
MISTRAL_FIELDS = LLAMA_FIELDS | {
    "num_key_value_heads": Field(COUNT, 8, null=True), "sliding_window": Field(COUNT, 4096, null=True),
}  # fmt: skip
MIXTRAL_FIELDS = MISTRAL_FIELDS | {
    "sliding_window": NULL_COUNT, "num_local_experts": Field(PARTS, 8), "num_experts_per_tok": Field(COUNT, 2),
    "rope_theta": Field(NUMBER, 1e6), "rms_norm_eps": Field(NUMBER, 1e-5),
}  # fmt: skip
QWEN2_FIELDS = LLAMA_FIELDS | {
    "num_key_value_heads": Field(COUNT, 32, null=True),
    "layer_types": Field(ValueKind("a list of texts", _is_list_of_texts), None, null=True),
}  # fmt: skip
QWEN3_FIELDS = QWEN2_FIELDS | {"head_dim": Field(COUNT, 128)}
GEMMA_FIELDS = LLAMA_FIELDS | {
    "num_key_value_heads": Field(COUNT, 16), "head_dim": Field(COUNT, 256), "tie_word_embeddings": TIE,
    "hidden_act": Field(WORD, "gelu_pytorch_tanh"), "hidden_activation": Field(WORD, None, null=True),
}  # fmt: skip
BERT_FIELDS = SIZES | {
    "vocab_size": Field(COUNT), "max_position_embeddings": Field(COUNT), "type_vocab_size": Field(COUNT, 2),
    "hidden_act": Field(WORD, "gelu"), "layer_norm_eps": Field(NUMBER, 1e-12), "tie_word_embeddings": TIE,
}  # fmt: skip
VIT_FIELDS = SIZES | CLASSES | {
    "image_size": Field(COUNT, 224), "patch_size": Field(COUNT, 16), "num_channels": Field(COUNT, 3),
    "qkv_bias": Field(FLAG, True), "hidden_act": Field(WORD, "gelu"), "layer_norm_eps": Field(NUMBER, 1e-12),
}  # fmt: skip

GPT2_NAMES = {
    "embed.weight": "transformer.wte.weight",
    "embed.position": "transformer.wpe.weight",
    "blocks.*.norm1.": "transformer.h.*.ln_1.",
    "blocks.*.attn.qkv.": "transformer.h.*.attn.c_attn.",
    "blocks.*.attn.out.": "transformer.h.*.attn.c_proj.",
    "blocks.*.norm2.": "transformer.h.*.ln_2.",
    "blocks.*.mlp.up.": "transformer.h.*.mlp.c_fc.",
    "blocks.*.mlp.down.": "transformer.h.*.mlp.c_proj.",
    "norm.": "transformer.ln_f.",
    "head.weight": "lm_head.weight",
}

LLAMA_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.*.norm1.": "model.layers.*.input_layernorm.",
    "blocks.*.attn.q.": "model.layers.*.self_attn.q_proj.",
    "blocks.*.attn.k.": "model.layers.*.self_attn.k_proj.",
    "blocks.*.attn.v.": "model.layers.*.self_attn.v_proj.",
    "blocks.*.attn.out.": "model.layers.*.self_attn.o_proj.",
    "blocks.*.attn.": "model.layers.*.self_attn.",
    "blocks.*.norm2.": "model.layers.*.post_attention_layernorm.",
    "blocks.*.mlp.gate.": "model.layers.*.mlp.gate_proj.",
    "blocks.*.mlp.up.": "model.layers.*.mlp.up_proj.",
    "blocks.*.mlp.down.": "model.layers.*.mlp.down_proj.",
    "norm.": "model.norm.",
    "head.weight": "lm_head.weight",
}

MIXTRAL_NAMES = LLAMA_NAMES | {
    "blocks.*.mlp.router": "model.layers.*.block_sparse_moe.gate.weight",
    "blocks.*.mlp.gate": "model.layers.*.block_sparse_moe.experts.#.w1.weight",
    "blocks.*.mlp.up": "model.layers.*.block_sparse_moe.experts.#.w3.weight",
    "blocks.*.mlp.down": "model.layers.*.block_sparse_moe.experts.#.w2.weight",
}

BERT_NAMES = {
    "embed.tokens.weight": "bert.embeddings.word_embeddings.weight",
    "embed.tokens.position": "bert.embeddings.position_embeddings.weight",
    "embed.types.": "bert.embeddings.token_type_embeddings.",
    "embed.norm.": "bert.embeddings.LayerNorm.",
    "blocks.*.attn.q.": "bert.encoder.layer.*.attention.self.query.",
    "blocks.*.attn.k.": "bert.encoder.layer.*.attention.self.key.",
    "blocks.*.attn.v.": "bert.encoder.layer.*.attention.self.value.",
    "blocks.*.attn.out.": "bert.encoder.layer.*.attention.output.dense.",
    "blocks.*.norm1.": "bert.encoder.layer.*.attention.output.LayerNorm.",
    "blocks.*.mlp.up.": "bert.encoder.layer.*.intermediate.dense.",
    "blocks.*.mlp.down.": "bert.encoder.layer.*.output.dense.",
    "blocks.*.norm2.": "bert.encoder.layer.*.output.LayerNorm.",
}
TOKENS_NAMES = {
    "dense.": "cls.predictions.transform.dense.",
    "norm.": "cls.predictions.transform.LayerNorm.",
    "head.weight": "cls.predictions.decoder.weight",
    "head.bias": "cls.predictions.decoder.bias",
}
CLASSES_NAMES = {"pooler.": "bert.pooler.dense.", "head.": "classifier."}

VIT_NAMES = {
    "embed.token": "vit.embeddings.cls_token",
    "embed.position": "vit.embeddings.position_embeddings",
    "embed.": "vit.embeddings.patch_embeddings.projection.",
    "blocks.*.norm1.": "vit.encoder.layer.*.layernorm_before.",
    "blocks.*.attn.q.": "vit.encoder.layer.*.attention.attention.query.",
    "blocks.*.attn.k.": "vit.encoder.layer.*.attention.attention.key.",
    "blocks.*.attn.v.": "vit.encoder.layer.*.attention.attention.value.",
    "blocks.*.attn.out.": "vit.encoder.layer.*.attention.output.dense.",
    "blocks.*.norm2.": "vit.encoder.layer.*.layernorm_after.",
    "blocks.*.mlp.up.": "vit.encoder.layer.*.intermediate.dense.",
    "blocks.*.mlp.down.": "vit.encoder.layer.*.output.dense.",
    "norm.": "vit.layernorm.",
    "head.": "classifier.",
}

NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
ROTARY = {"partial_rotary_factor": (1.0, None)}
QWEN_PLAIN = NO_BIAS | ROTARY | {"use_sliding_window": (False, None), "use_mrope": (False, None)}
LLAMA_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
ENCODER_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BERT_PLAIN = {"position_embedding_type": ("absolute", None)}
BERT_HARMLESS = (
    *ENCODER_DROPOUT, "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type",
)  # fmt: skip

ARCHITECTURES = {
    "gpt2": Architecture(
        _build_gpt2, GPT2_NAMES, "transformer.",
        transposed=("*.attn.*.weight", "*.mlp.*.weight"), unused=("*.attn.bias", "*.attn.masked_bias"),
        fields=GPT2_FIELDS,
        required_values={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False, None)},
        ignored_fields=(
            "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_type",
            "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        ),
        aliases={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        tied={"lm_head.weight": "transformer.wte.weight"},
    ),
    "llama": Architecture(
        _build_llama, LLAMA_NAMES, "model.", unused=("*.rotary_emb.inv_freq",), fields=LLAMA_FIELDS | BIASES,
        required_values=ROTARY,
        ignored_fields=("max_sequence_length",), tied=LLAMA_TIED,
    ),
    "mistral": Architecture(
        _build_mistral, LLAMA_NAMES, "model.", fields=MISTRAL_FIELDS, required_values=NO_BIAS | ROTARY, tied=LLAMA_TIED
    ),
    "mixtral": Architecture(
        _build_mixtral, MIXTRAL_NAMES, "model.", fields=MIXTRAL_FIELDS,
        required_values=NO_BIAS | ROTARY | {"router_jitter_noise": (0.0, None)},
        ignored_fields=("output_router_logits", "router_aux_loss_coef"), aliases={"num_experts": "num_local_experts"},
        tied=LLAMA_TIED,
    ),
    "qwen2": Architecture(
        _build_qwen2, LLAMA_NAMES, "model.", fields=QWEN2_FIELDS, required_values=QWEN_PLAIN,
        ignored_fields=("sliding_window", "max_window_layers"), tied=LLAMA_TIED,
    ),
    "qwen3": Architecture(
        _build_qwen3, LLAMA_NAMES, "model.", fields=QWEN3_FIELDS, required_values=QWEN_PLAIN,
        ignored_fields=("sliding_window", "max_window_layers"), tied=LLAMA_TIED,
    ),
    "gemma": Architecture(
        _build_gemma, LLAMA_NAMES, "model.", fields=GEMMA_FIELDS,
        required_values=NO_BIAS | ROTARY | {"use_bidirectional_attention": (False, None)}, tied=LLAMA_TIED,
    ),
    "bert": Architecture(
        _build_bert, BERT_NAMES | TOKENS_NAMES, "bert.",
        unused=(
            "*.position_ids", "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.bias",
            "cls.predictions.bias",
        ),
        fields=BERT_FIELDS, required_values=BERT_PLAIN, ignored_fields=BERT_HARMLESS,
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    ),
    "BertForSequenceClassification": Architecture(
        _build_bert_classifier, BERT_NAMES | CLASSES_NAMES, "bert.", unused=("*.position_ids",),
        fields=BERT_FIELDS | CLASSES, required_values=BERT_PLAIN, ignored_fields=BERT_HARMLESS,
    ),
    "vit": Architecture(
        _build_vit, VIT_NAMES, "vit.", fields=VIT_FIELDS,
        ignored_fields=(*ENCODER_DROPOUT, "encoder_stride", "pooler_output_size", "pooler_act", "tie_word_embeddings"),
    ),
}  # fmt: skip
"""The supported architectures. The keys are values of `model_type` in a configuration, or class names in its
`architectures`."""
