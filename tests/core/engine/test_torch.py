"""PyTorch as the oracle of whole training: gradients and AdamW steps of the same GPT, float64."""

from functools import cache

import numpy as np
import pytest
from models import distributed, part

from fsdpx import nn, optim, spawn
from fsdpx.testing import assert_close

torch = pytest.importorskip("torch")

VOCAB, WIDTH, LAYERS, HEADS, TIME, ROWS, STEPS = 41, 24, 2, 3, 10, 6, 8


def batches():
    texts = np.random.default_rng(4).integers(0, VOCAB, (STEPS, ROWS, TIME + 1))
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def logits(p, x):
    """GPT-2's forward in plain PyTorch operations over our parameter names."""
    f = torch.nn.functional
    h = p["embed.weight"][x] + p["embed.position"][: x.shape[1]]
    for i in range(LAYERS):
        b = f"blocks.{i}"
        n = f.layer_norm(h, (WIDTH,), p[f"{b}.norm1.weight"], p[f"{b}.norm1.bias"])
        qkv = f.linear(n, p[f"{b}.attn.qkv.weight"], p[f"{b}.attn.qkv.bias"])
        q, k, v = (t.reshape(*x.shape, HEADS, WIDTH // HEADS).transpose(1, 2) for t in qkv.split(WIDTH, dim=2))
        o = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + f.linear(o, p[f"{b}.attn.out.weight"], p[f"{b}.attn.out.bias"])
        n = f.layer_norm(h, (WIDTH,), p[f"{b}.norm2.weight"], p[f"{b}.norm2.bias"])
        up = f.gelu(f.linear(n, p[f"{b}.mlp.up.weight"], p[f"{b}.mlp.up.bias"]))
        h = h + f.linear(up, p[f"{b}.mlp.down.weight"], p[f"{b}.mlp.down.bias"])
    return f.linear(f.layer_norm(h, (WIDTH,), p["norm.weight"], p["norm.bias"]), p["embed.weight"])


@cache
def begun():
    """The parameters that a seed gives, on any ranks."""
    return spawn(lambda comm: trainer_of(comm, "ddp").parameters(), 1)[0]


@cache
def by_torch():
    p = {k: torch.tensor(v, requires_grad=True) for k, v in begun().items()}
    decayed = [v for v in p.values() if v.ndim > 1]
    plain = [v for v in p.values() if v.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    losses, first = [], {}
    for x, y in batches():
        adamw.zero_grad()
        y_hat = logits(p, torch.tensor(x))
        loss = torch.nn.functional.cross_entropy(y_hat.reshape(-1, VOCAB), torch.tensor(y).reshape(-1))
        loss.backward()
        losses.append(float(loss.detach()))
        first = first or {k: v.grad.numpy().copy() for k, v in p.items()}
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        adamw.step()
    return losses, first, {k: v.detach().numpy() for k, v in p.items()}


def trainer_of(comm, strategy):
    adamw = optim.AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, groups=optim.no_decay)
    options = {"strategy": strategy, "precision": "float64", "clip_norm": 1.0, "group_bytes": 4096}
    model = nn.GPT(VOCAB, WIDTH, LAYERS, HEADS, TIME)
    return distributed(model, comm, loss=nn.CrossEntropyLoss(), optimizer=adamw, **options)


def by_us(comm, strategy):
    trainer = trainer_of(comm, strategy)
    start, losses, first = trainer.parameters(), [], {}
    for x, y in batches():
        mine = part(comm, ROWS)
        losses.append(trainer.accumulate(x[mine], y[mine]))
        first = first or trainer.gradients()
        trainer.update()
    return start, losses, first, trainer.parameters()


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 1), ("zero2", 2), ("fsdp", 3)])
def test_gradients_and_steps_match(strategy, size):
    want_losses, want_first, want_end = by_torch()
    for start, losses, first, end in spawn(lambda comm: by_us(comm, strategy), size):
        assert_close(start, begun())
        np.testing.assert_allclose(losses, want_losses, rtol=1e-9)
        for name in start:
            np.testing.assert_allclose(first[name], want_first[name], rtol=1e-9, atol=1e-12, err_msg=name)
            np.testing.assert_allclose(end[name], want_end[name], rtol=1e-9, atol=1e-9, err_msg=name)
