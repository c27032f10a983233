"""Models of the library transformers, cut into units: the same losses and parameters as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fsdpx  # noqa: E402
from fsdpx import nn, optim  # noqa: E402
from fsdpx.comm import Communicator, spawn  # noqa: E402
from fsdpx.interop.torch import from_torch  # noqa: E402

SAMPLES, VOCAB = 6, 50


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


# Llama's norms compute in float32, whatever the model is in: a last bit of float64 becomes one of float32 there.
@pytest.mark.parametrize(("make", "exact"), [(gpt2, 1e-9), (llama, 1e-5)])
@pytest.mark.parametrize("options", [{}, {"mesh": fsdpx.Mesh(pipe=2), "schedule": "1f1b"}], ids=["fsdp", "pipe"])
def test_ten_steps_are_those_of_plain_pytorch(make: Any, exact: float, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = make().double().train()
    r = np.random.default_rng(0)
    x, y = r.integers(0, VOCAB, (SAMPLES, 8)), r.integers(0, VOCAB, (SAMPLES, 8))
    losses, end = plain(net, x, y)
    model = from_torch(net, x)

    def run(comm: Communicator) -> Any:
        adamw = optim.AdamW(lr=1e-3, weight_decay=0.01)
        given: dict[str, Any] = {"loss": nn.CrossEntropy(), "optimizer": adamw, "precision": "float64"}
        trainer = fsdpx.distribute(model, comm=comm, **given, **options)
        part = slice(None) if options else slice(comm.rank * SAMPLES // 2, (comm.rank + 1) * SAMPLES // 2)
        return [trainer.step(x[part], y[part]) for _ in range(10)], trainer.parameters()

    found, parameters = spawn(run, 2)[0]
    np.testing.assert_allclose(found, losses, rtol=exact)
    assert parameters.keys() == end.keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(value, end[name], atol=exact, err_msg=name)


def plain(net: Any, x: Any, y: Any) -> tuple[list[float], dict[str, Any]]:
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        logits = net(torch.tensor(x)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(y).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().numpy() for name, p in net.named_parameters()}
