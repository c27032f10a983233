"""The architectures that are known: one entry each."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.models.architecture import Architecture, Config
from fsdpx.nn.bert import Bert
from fsdpx.nn.gpt import GPT
from fsdpx.nn.llama import Llama
from fsdpx.nn.vit import ViT

__all__ = ["ARCHITECTURES"]


def _gpt2(c: Config, **options: Any) -> GPT:
    given: dict[str, Any] = {
        "tie": c.get("tie_word_embeddings", True), "hidden": c.get("n_inner"), "eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": c.get("activation_function", "gelu_new"),
    }  # fmt: skip
    return GPT(c["vocab_size"], c["n_embd"], c["n_layer"], c["n_head"], c["n_positions"], **given | options)


def _llama(c: Config, **options: Any) -> Llama:
    """Llama's, and what others have instead where their configuration says so."""
    rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", c.get("rope_theta", 10000.0))
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        rope = {}
    if bool(c.get("attention_bias")) != bool(c.get("mlp_bias")):
        raise ConfigError("config.json: biases in attention or the MLP alone are computed nowhere here")
    given: dict[str, Any] = {
        "kv_heads": c.get("num_key_value_heads"), "d_head": c.get("head_dim"), "hidden": c["intermediate_size"],
        "theta": theta, "rope_scaling": rope or None, "bias": bool(c.get("attention_bias")),
        "activation": c.get("hidden_act", "silu"), "eps": c.get("rms_norm_eps", 1e-6),
        "tie": c.get("tie_word_embeddings", False),
    }  # fmt: skip
    sizes = (c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    return Llama(*sizes, c["max_position_embeddings"], **given | options)


def _mistral(c: Config, **options: Any) -> Llama:
    return _llama(c, **{"window": c.get("sliding_window"), **options})


def _qwen2(c: Config, **options: Any) -> Llama:
    return _llama(c, **{"qkv_bias": True, **options})


def _qwen3(c: Config, **options: Any) -> Llama:
    return _llama(c, **{"qk_norm": True, "d_head": c.get("head_dim", 128), **options})


def _gemma(c: Config, **options: Any) -> Llama:
    own = {
        "scale_embedding": True, "unit_offset": True, "tie": c.get("tie_word_embeddings", True),
        "activation": c.get("hidden_activation") or "gelu_pytorch_tanh", "d_head": c.get("head_dim", 256),
    }  # fmt: skip
    return _llama(c, **own | options)


def _mixtral(c: Config, **options: Any) -> Llama:
    """Their loss that balances the load is one of all blocks together, and computed where `output_router_logits` asks
    for it; `balance=` is ours, of each block."""
    own = {"experts": c.get("num_local_experts", 8), "active": c.get("num_experts_per_tok", 2)}
    return _mistral({"rope_theta": 1e6, **c}, **own | options)


def _bert(c: Config, **options: Any) -> Bert:
    given: dict[str, Any] = {
        "hidden": c["intermediate_size"], "types": c.get("type_vocab_size", 2),
        "activation": c.get("hidden_act", "gelu"), "eps": c.get("layer_norm_eps", 1e-12),
    }  # fmt: skip
    sizes = (c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    return Bert(*sizes, c["max_position_embeddings"], **given | options)


def _bert_classes(c: Config, **options: Any) -> Bert:
    return _bert(c, **{"classes": _classes(c), **options})


def _vit(c: Config, **options: Any) -> ViT:
    given: dict[str, Any] = {
        "channels": c.get("num_channels", 3), "hidden": c["intermediate_size"], "qkv_bias": c.get("qkv_bias", True),
        "activation": c.get("hidden_act", "gelu"), "eps": c.get("layer_norm_eps", 1e-12),
    }  # fmt: skip
    sizes = (c["image_size"], c["patch_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"])
    return ViT(*sizes, _classes(c), **given | options)


def _classes(c: Config) -> int:
    return len(c.get("id2label") or (0, 1))


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
    "head.bias": "cls.predictions.bias",
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

PLAIN = {"use_sliding_window": False}

ARCHITECTURES = {
    "gpt2": Architecture(
        _gpt2, GPT2_NAMES, "transformer.",
        turned=("*.attn.*.weight", "*.mlp.*.weight"), unused=("*.attn.bias", "*.attn.masked_bias"),
        plain={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "llama": Architecture(_llama, LLAMA_NAMES, "model.", unused=("*.rotary_emb.inv_freq",)),
    "mistral": Architecture(_mistral, LLAMA_NAMES, "model."),
    "mixtral": Architecture(_mixtral, MIXTRAL_NAMES, "model.", plain={"router_jitter_noise": 0.0}),
    "qwen2": Architecture(_qwen2, LLAMA_NAMES, "model.", plain=PLAIN),
    "qwen3": Architecture(_qwen3, LLAMA_NAMES, "model.", plain=PLAIN),
    "gemma": Architecture(_gemma, LLAMA_NAMES, "model."),
    "bert": Architecture(
        _bert, BERT_NAMES | TOKENS_NAMES, "bert.",
        unused=("*.position_ids", "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.bias"),
    ),
    "BertForSequenceClassification": Architecture(
        _bert_classes, BERT_NAMES | CLASSES_NAMES, "bert.", unused=("*.position_ids",)
    ),
    "vit": Architecture(_vit, VIT_NAMES, "vit."),
}  # fmt: skip
"""`model_type` of a configuration, or the name of a class in it, -> what is to know."""
