"""Models of the library transformers, cut into units: the same losses and parameters as in plain PyTorch."""

from functools import cache

import numpy as np
import pytest
from torch_training import demand_training, train_in_torch, train_on_ranks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fsdpx  # noqa: E402
from fsdpx import optim  # noqa: E402
from fsdpx.errors import ConfigError  # noqa: E402
from fsdpx.ext.interop.torch import from_torch  # noqa: E402

SAMPLES, VOCAB, STEPS = 12, 50, 3


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def resnet18():
    """ResNet-18 (He et al. 2016) with few channels."""
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6, 8, 8], depths=[2, 2, 2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


WAYS = {
    "one": (1, {"strategy": "ddp"}),
    "ddp": (3, {"strategy": "ddp"}),
    "zero2": (2, {"strategy": "zero2"}),
    "fsdp": (4, {}),
    "pipe": (2, {"mesh": fsdpx.Mesh(pipe=2), "schedule": "1f1b", "microbatches": 2}),
}


def prepared(make):
    """The model with random weights, its inputs and targets, and the units that it is cut into (None: by itself)."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        # Llama's norm in the format of its input: the library's own computes in float32 whatever the model is in, and
        # a last bit of float64 becomes one of float32 there
        patch.setattr(transformers.models.llama.modeling_llama, "LlamaRMSNorm", torch.nn.RMSNorm)
        net, r = make().train().double(), np.random.default_rng(0)
    if make is resnet18:
        return net, r.standard_normal((SAMPLES, 3, 32, 32)), r.integers(0, 5, SAMPLES), ()
    return net, *r.integers(0, VOCAB, (2, SAMPLES, 8)), None


@cache
def in_float64(make):
    """The model cut into units, which takes PyTorch seconds; inputs, targets, what plain PyTorch ends with, and what
    the first values are read from."""
    net, x, y, units = prepared(make)
    return from_torch(net, x[:4], units=units), x, y, plain(net, x, y), net


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [gpt2, llama, resnet18])
def test_steps_are_those_of_plain_pytorch(make, way):
    model, x, y, wanted, _ = in_float64(make)
    ranks, options = WAYS[way]
    if make is resnet18 and way == "pipe":  # a batch norm sees one microbatch at a time
        options = options | {"microbatches": 1}
    found = trained(model, x, y, ranks, precision="float64", **options)
    demand_training(found, wanted, 1e-9)
    assert found[1].keys() == wanted[1].keys()


def test_chunks_of_a_model_with_batch_norms_are_refused():
    model, x, y, *_ = in_float64(resnet18)
    first = "resnet.embedder.embedder.normalization"
    with pytest.raises(
        ConfigError, match=f"reproducible_chunks=6: layer '{first}' takes statistics over the global batch"
    ):
        trained(model, x, y, 1, precision="float64", reproducible_chunks=6)


def trained(model, x, y, ranks, **options):
    """Losses and last parameters of thread ranks that share the batch; ranks of a pipe read all of it."""
    data = 1 if "mesh" in options else None
    return train_on_ranks(model, x, y, optim.AdamW(lr=1e-3, weight_decay=0.01), ranks, STEPS, data, **options)[:2]


def plain(net, x, y):
    losses, net = train_in_torch(net, x, y, STEPS, lr=1e-3, weight_decay=0.01)
    own = dict(net.named_parameters()) | {n: b for n, b in net.named_buffers() if "running" in n}
    return losses, {name: p.detach().numpy() for name, p in own.items()}
