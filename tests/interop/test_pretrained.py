"""Folders that transformers wrote: the same logits, the same bytes, and it loads what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fsdpx  # noqa: E402
from fsdpx import models, nn, optim  # noqa: E402
from fsdpx.comm import Communicator, spawn  # noqa: E402

DECODER: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
ENCODER = {
    **DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "image_size": 8, "patch_size": 4,
    "num_labels": 5, "pad_token_id": 0,
}  # fmt: skip
MADE: dict[str, Any] = {
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
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**ENCODER)),
}


@pytest.mark.parametrize("name", MADE)
def test_in_and_out_again(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = MADE[name]().eval()
    net.save_pretrained(tmp_path / "theirs")
    r = np.random.default_rng(0)
    x: Any = r.integers(0, 50, (4, 8))
    if name == "vit":
        x = r.standard_normal((4, 3, 8, 8)).astype(np.float32)
    elif "bert" in name:
        x = (x, np.zeros_like(x), np.ones_like(x))
    y = r.integers(0, 5, 4) if name in ("vit", "bert for classes") else r.integers(0, 50, (4, 8))

    def run(comm: Communicator) -> Any:
        model = models.from_pretrained(tmp_path / "theirs")
        trainer = fsdpx.distribute(model, comm=comm, loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-2))
        part = slice(2 * comm.rank, 2 * comm.rank + 2)
        given = tuple(a[part] for a in x) if isinstance(x, tuple) else x[part]
        before = trainer.predict(given)
        trainer.save_pretrained(tmp_path / "same")
        trainer.step(given, y[part])
        trainer.save_pretrained(tmp_path / "ours")
        return before, trainer.predict(given)

    before, after = (np.concatenate(parts) for parts in zip(*spawn(run, 2), strict=True))
    np.testing.assert_allclose(before, logits(net, x), atol=1e-5)
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
    trained = type(net).from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_allclose(after, logits(trained, x), atol=1e-5)
    assert np.abs(after - before).max() > 1e-3


def logits(net: Any, x: Any) -> np.ndarray:
    with torch.no_grad():
        if isinstance(x, tuple):
            tokens, kinds, mask = (torch.tensor(a) for a in x)
            found = net(tokens, token_type_ids=kinds, attention_mask=mask)
        else:
            found = net(torch.tensor(x))
    return found.logits.numpy()
