"""Folders that transformers wrote: the same logits, the same bytes, and it loads what was trained."""

import json
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface_hub.errors import StrictDataclassError  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import fsdpx  # noqa: E402
from fsdpx import models, nn, optim  # noqa: E402
from fsdpx.core.comm import spawn  # noqa: E402
from fsdpx.errors import CheckpointError, ConfigError  # noqa: E402

WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**WIDTHS, "vocab_size": 50, "max_position_embeddings": 16}
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
VISION = {**WIDTHS, "image_size": 8, "patch_size": 4, "num_labels": 5}
ENCODER = {**TEXT, "num_labels": 5}
MADE = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, eos_token_id=0)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=4)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=3)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=8)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, head_dim=8)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)),
    "bert for classes": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)),
}


@pytest.mark.parametrize("name", MADE)
def test_in_and_out_again(name, tmp_path):
    torch.manual_seed(0)
    net = MADE[name]().eval()
    net.save_pretrained(tmp_path / "theirs")
    x, r = inputs(name, 4, first=0), np.random.default_rng(1)
    y = r.integers(0, 5, 4) if name in ("vit", "bert for classes") else r.integers(0, 50, (4, 8))

    def run(comm):
        model = models.from_pretrained(tmp_path / "theirs")
        trainer = fsdpx.distribute(model, comm=comm, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=1e-2))
        part = slice(2 * comm.rank, 2 * comm.rank + 2)
        given = tuple(a[part] for a in x) if isinstance(x, tuple) else x[part]
        before = trainer.predict(given)
        models.save_pretrained(trainer, tmp_path / "same")
        trainer.step(given, y[part])
        models.save_pretrained(trainer, tmp_path / "ours")
        return before, trainer.predict(given)

    before, after = (np.concatenate(parts) for parts in zip(*spawn(run, 2), strict=True))
    np.testing.assert_allclose(before, logits(net, x), atol=1e-5)
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
    np.testing.assert_allclose(after, logits(type(net).from_pretrained(tmp_path / "ours").eval(), x), atol=1e-5)
    assert np.abs(after - before).max() > 1e-3


def logits(net, x):
    with torch.no_grad():
        if isinstance(x, tuple):
            tokens, kinds, mask = (torch.tensor(a) for a in x)
            found = net(tokens, token_type_ids=kinds, attention_mask=mask)
        else:
            found = net(torch.tensor(x))
    return found.logits.numpy()


def inputs(name, samples=2, first=1):
    r = np.random.default_rng(0)
    if name == "vit":
        return r.standard_normal((samples, 3, 8, 8)).astype(np.float32)
    x = r.integers(first, 50, (samples, 8))
    return (x, np.zeros_like(x), np.ones_like(x)) if "bert" in name else x


def ours(folder, x):
    return models.from_pretrained(folder).as_distributed().predict(x)


SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "head_dim", "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "image_size",
    "patch_size", "num_channels", "type_vocab_size", "num_local_experts", "id2label", "label2id", "num_labels",
    "model_type", "architectures", "transformers_version", "return_dict", "dtype",
}  # fmt: skip
ODD = {
    "is_causal": False, "is_decoder": True, "logit_scale": 2.0, "partial_rotary_factor": 0.5,
    "use_bidirectional_attention": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "relu",
    "quantization_config": {"bits": 4}, "per_layer_config": {"0": {"hidden_act": "relu"}}, "layer_types": ["other"],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "longrope", "a": 1},
    "original_max_position_embeddings": 4,
}  # fmt: skip


def changed(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return 0.75 if value == 0.5 else 0.5
    return value + 4 if isinstance(value, int) else "relu" if isinstance(value, str) else 7


@pytest.mark.parametrize("name", MADE)
def test_every_field_is_computed_harmless_or_refused_by_name(name, tmp_path):
    torch.manual_seed(0)
    net, x = MADE[name]().eval(), inputs(name)
    net.save_pretrained(tmp_path)
    file, refused = tmp_path / "config.json", dict[str, str]()
    said, own = json.loads(file.read_text()), json.loads(net.config.to_json_string(use_diff=False))
    fields = {field: changed(value) for field, value in own.items() if field not in SIZES}
    for field, value in (fields | ODD).items():
        file.write_text(json.dumps({**said, field: value}))
        try:
            found = ours(tmp_path, x)
        except CheckpointError:  # other tensors than the files have
            continue
        except ConfigError as error:
            refused[field] = str(error)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                there = type(net).from_pretrained(tmp_path).eval()
            except (ValueError, StrictDataclassError):  # of a kind that it does not take
                continue
        np.testing.assert_allclose(found, logits(there, x), atol=1e-5, err_msg=field)
    assert {"logit_scale", "quantization_config", "is_causal", "per_layer_config"} <= refused.keys()
    assert all(re.search(f"{field}|activation|rotary|experts", text) for field, text in refused.items()), refused
    assert not {"use_cache", "initializer_range", "bos_token_id", "layer_norm_eps", "rms_norm_eps"} & refused.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "gemma", "bert"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_the_files_counts(name, tied, tmp_path):
    """A configuration that ties it, and files with another one: transformers 5 keeps both."""
    torch.manual_seed(0)
    net, x = MADE[name]().eval(), inputs(name)
    net.save_pretrained(tmp_path / "a")
    head, table = net.get_output_embeddings(), net.get_input_embeddings()
    tensors = {n: t.clone() for n, t in net.state_dict().items()}
    for n, t in tensors.items():
        if t is not None and (n.startswith("lm_head") or "decoder" in n):
            t.add_(torch.randn(t.shape))
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    file = tmp_path / "a" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": tied}))
    assert head.weight.shape == table.weight.shape
    there = type(net).from_pretrained(tmp_path / "a").eval()
    assert not torch.equal(there.get_output_embeddings().weight, there.get_input_embeddings().weight)

    model = models.from_pretrained(tmp_path / "a")
    trainer = fsdpx.distribute(model, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=1e-2))
    np.testing.assert_allclose(trainer.predict(x), logits(there, x), atol=1e-5)
    trainer.step(x, x[0] if isinstance(x, tuple) else x)
    models.save_pretrained(trainer, tmp_path / "b")
    trained = type(net).from_pretrained(tmp_path / "b").eval()
    np.testing.assert_allclose(trainer.predict(x), logits(trained, x), atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_head_that_is_the_table_twice_stays_tied(name, tmp_path):
    torch.manual_seed(0)
    net, x = MADE[name]().eval(), inputs(name)
    net.save_pretrained(tmp_path)
    save_file({n: t.clone() for n, t in net.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert "head.weight" in models.from_pretrained(tmp_path).ties
    np.testing.assert_allclose(ours(tmp_path, x), logits(net, x), atol=1e-5)
