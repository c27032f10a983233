"""Models of the library transformers with random weights: the same logits, gradients and AdamW steps."""

from functools import cache

import numpy as np
import pytest
from present import needs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import distributed, part  # noqa: E402
from setting import env  # noqa: E402

import fsdpx  # noqa: E402
from fsdpx import nn, optim  # noqa: E402
from fsdpx.core.comm import spawn  # noqa: E402
from fsdpx.nn.rotary import compute_rotary_frequencies_and_factor  # noqa: E402

VOCAB, WIDTH, LAYERS, HEADS, TIME, SAMPLES = 53, 32, 2, 4, 12, 4

TINY = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attn_implementation": "sdpa", "pad_token_id": None, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
ENCODER = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 48, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "image_size": 8,
    "patch_size": 4, "attention_probs_dropout_prob": 0.0, "num_labels": 5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def make(kind, **options):
    made = getattr(transformers, kind)
    return made(made.config_class(**options))


def theirs(kind, **options):
    return make(f"{kind}ForCausalLM", **{**TINY, **options})


def ours(**options):
    return nn.Llama(VOCAB, WIDTH, LAYERS, HEADS, 64, **{"kv_heads": 2, "hidden": 48, "eps": 1e-5, **options})


GEMMA = {"activation": "gelu_pytorch_tanh", "scale_embedding": True, "unit_offset": True, "tie": True, "d_head": 16}
PAIRS = {
    "llama": (lambda: theirs("Llama"), lambda: ours()),
    "llama with stretched positions": (
        lambda: theirs("Llama", rope_parameters={**LLAMA3, "rope_theta": 500.0}, tie_word_embeddings=True),
        lambda: ours(theta=500.0, rope_scaling=LLAMA3, tie=True),
    ),
    "mistral": (lambda: theirs("Mistral", sliding_window=5), lambda: ours(window=5)),
    "qwen2": (lambda: theirs("Qwen2"), lambda: ours(qkv_bias=True)),
    "qwen3": (lambda: theirs("Qwen3", head_dim=16), lambda: ours(qk_norm=True, d_head=16)),
    "gemma": (
        lambda: theirs("Gemma", head_dim=16, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
        lambda: ours(**GEMMA),
    ),
    "mixtral": (
        lambda: theirs("Mixtral", num_local_experts=5, num_experts_per_tok=2, experts_implementation="eager"),
        lambda: ours(experts=5, theta=1e6),
    ),
    "gpt2": (
        lambda: make(
            "GPT2LMHeadModel", vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=48,
            layer_norm_epsilon=1e-3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        lambda: nn.GPT(VOCAB, WIDTH, LAYERS, HEADS, 64, hidden=48, activation="gelu_new", eps=1e-3),
    ),
    "bert": (lambda: make("BertForMaskedLM", **ENCODER), lambda: nn.Bert(VOCAB, WIDTH, LAYERS, HEADS, 16, hidden=48)),
    "bert for classes": (
        lambda: make("BertForSequenceClassification", **ENCODER),
        lambda: nn.Bert(VOCAB, WIDTH, LAYERS, HEADS, 16, hidden=48, classes=5),
    ),
    "vit": (
        lambda: make("ViTForImageClassification", **ENCODER),
        lambda: nn.ViT(8, 4, WIDTH, LAYERS, HEADS, 5, hidden=48),
    ),
}  # fmt: skip
NAMES = {
    "bert.embeddings.word_embeddings": "embed.tokens", "bert.embeddings.position_embeddings.weight":
    "embed.tokens.position", "bert.embeddings.token_type_embeddings": "embed.types",
    "bert.embeddings.LayerNorm": "embed.norm", "bert.encoder.layer.": "blocks.", "attention.self.query": "attn.q",
    "attention.self.key": "attn.k", "attention.self.value": "attn.v", "attention.output.dense": "attn.out",
    "attention.output.LayerNorm": "norm1", "intermediate.dense": "mlp.up", "output.dense": "mlp.down",
    "output.LayerNorm": "norm2", "cls.predictions.transform.dense": "dense",
    "cls.predictions.transform.LayerNorm": "norm", "cls.predictions.bias": "head.bias",
    "bert.pooler.dense": "pooler", "classifier": "head", "vit.layers.": "blocks.",
    "vit.embeddings.cls_token": "embed.token", "vit.embeddings.position_embeddings": "embed.position",
    "vit.embeddings.patch_embeddings.projection": "embed", "vit.layernorm": "norm", "attention.q_proj": "attn.q",
    "attention.k_proj": "attn.k", "attention.v_proj": "attn.v", "attention.o_proj": "attn.out",
    "layernorm_before": "norm1", "layernorm_after": "norm2", "mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down",
    "mlp.gate.weight": "mlp.router", "mlp.experts.": "mlp.", "model.": "", "transformer.": "", "layers.": "blocks.",
    "h.": "blocks.", "embed_tokens": "embed",
    "self_attn.": "attn.", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate",
    "up_proj": "up", "down_proj": "down", "input_layernorm": "norm1", "post_attention_layernorm": "norm2",
    "lm_head": "head", "wte": "embed", "wpe.weight": "embed.position", "ln_f": "norm", "ln_1": "norm1",
    "ln_2": "norm2", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out", "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}  # fmt: skip


def renamed(name):
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def arrays(net, gradients=False):
    """Its parameters by our names; GPT-2 has its matrices the other way round."""
    found = {}
    for name, p in net.named_parameters():
        a = (p.grad if gradients else p).detach().numpy().copy()
        a = a.reshape(a.shape[-1:] if "cls_token" in name else a.shape[1:]) if a.shape[0] == 1 and a.ndim == 3 else a
        if "gate_up_proj" in name:  # of all experts, gates above the others
            halves = zip(("gate_proj", "up_proj"), np.split(a, 2, axis=1), strict=True)
            found |= {renamed(name.replace("gate_up_proj", way)): half for way, half in halves}
            continue
        found[renamed(name)] = a.T.copy() if ".c_" in name and a.ndim == 2 else a
    return found


def made(name, dtype):
    torch.manual_seed(1)
    net = PAIRS[name][0]().to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.05 * torch.randn_like(p)
    return net, PAIRS[name][1]()


def widened(net, model):
    """In float64 throughout: their norms and positions are computed in float32 whatever the model is in."""

    def norm(self, x):
        eps = getattr(self, "variance_epsilon", None) or self.eps
        factor = 1.0 + self.weight if type(self).__name__ == "GemmaRMSNorm" else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * factor

    def positions(self, x, position_ids):
        rotary = model.children()["blocks"].children()["0"].attn.rotary
        cos, sin = rotary.get_cos_sin(env(), 0, x.shape[1], x.shape[1], np.float64)
        return tuple(torch.tensor(np.concatenate((a, a), axis=1))[None] for a in (cos, sin))

    def choice(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        top, chosen = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
        return logits, top / top.sum(dim=-1, keepdim=True), chosen

    for module in net.modules():
        if "TopKRouter" in type(module).__name__:
            module.forward = choice.__get__(module)
        if "RMSNorm" in type(module).__name__:
            module.forward = norm.__get__(module)
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(module.embedding_dim**0.5, dtype=torch.float64)
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = positions.__get__(module)
    return net


def tokens(seed=0):
    text = np.random.default_rng(seed).integers(0, VOCAB, (SAMPLES, TIME + 1))
    return text[:, :-1], text[:, 1:]


def batch(name, seed=0):
    """Our inputs, theirs, and the target. Of BERT's samples one is padded at its end, and one at its beginning."""
    x, y = tokens(seed)
    rng = np.random.default_rng([seed, 1])
    if name == "vit":
        images = rng.standard_normal((SAMPLES, 3, 8, 8))
        return (images,), {"pixel_values": torch.tensor(images)}, y[:, 0] % 5
    if "bert" not in name:
        return (x,), {"input_ids": torch.tensor(x)}, y
    x = np.maximum(x, 1)  # token 0 pads: its row gets no gradient there
    kinds, mask = rng.integers(0, 2, x.shape), np.ones_like(x)
    mask[1, 8:], mask[2, :3] = 0, 0 if name == "bert" else 1
    words = ("input_ids", "token_type_ids", "attention_mask")
    given = {word: torch.tensor(a) for word, a in zip(words, (x, kinds, mask), strict=True)}
    return (x, kinds, mask), given, np.where(mask == 1, y, -100) if name == "bert" else y[:, 0] % 5


@pytest.mark.parametrize("name", PAIRS)
def test_logits_are_the_same(name):
    net, model = made(name, torch.float32)
    p = arrays(net)
    if "head.weight" not in model.specs():
        p.pop("head.weight", None)
    assert {n: a.shape for n, a in p.items()} == {n: s.shape for n, s in model.specs().items()}
    x, given, target = batch(name)
    x = tuple(a.astype(np.float32) if a.dtype.kind == "f" else a for a in x)
    y, _ = model.forward(env(training=False), p, x[0] if len(x) == 1 else x)
    want = net(**{k: a.float() if a.is_floating_point() else a for k, a in given.items()}).logits.detach().numpy()
    counts = target >= 0
    np.testing.assert_allclose(y[counts], want[counts], rtol=1e-5, atol=1e-5)


@cache
def trained_by_torch(name):
    """Our model, and of theirs the parameters, the losses of three steps, the first gradients and the last parameters:
    for all meshes."""
    net, model = made(name, torch.float64)
    net = widened(net, model) if isinstance(model, nn.Llama) else net
    begin = arrays(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    losses, first = [], {}
    for step in range(3):
        _, given, y = batch(name, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(**given).logits.flatten(0, -2), torch.tensor(y).flatten())
        loss.backward()
        first = first or arrays(net, gradients=True)
        optimizer.step()
        losses.append(loss.item())
    return model, begin, losses, first, arrays(net)


MESHES = {
    "alone": (1, {}),
    "fsdp": (3, {"strategy": "fsdp"}),
    "tensor": (2, {"mesh": fsdpx.Mesh(tensor=2)}),
    "sequence": (2, {"mesh": fsdpx.Mesh(tensor=2), "sequence": "parallel"}),
    "pipe x fsdp": (4, {"mesh": fsdpx.Mesh(pipe=2, shard=2), "schedule": "1f1b", "microbatches": 2}),
    "tensor x fsdp": (4, {"mesh": fsdpx.Mesh(tensor=2, shard=2)}),
    "samples x fsdp": (4, {"mesh": fsdpx.Mesh(tensor=2, shard=2), "sequence": "samples"}),
}
CASES = [(name, "alone") for name in PAIRS] + [
    ("llama", "fsdp"), ("llama", "tensor"), ("mistral", "pipe x fsdp"), ("mistral", "tensor"), ("qwen2", "sequence"),
    ("qwen3", "tensor"), ("gemma", "tensor"), ("gemma", "pipe x fsdp"), ("gpt2", "tensor x fsdp"), ("bert", "sequence"),
    ("bert", "pipe x fsdp"), ("bert for classes", "pipe x fsdp"), ("vit", "pipe x fsdp"), ("vit", "tensor"),
    ("mixtral", "fsdp"), ("mixtral", "tensor"), ("mixtral", "samples x fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), sorted(CASES))
def test_gradients_and_steps_are_the_same(name, mesh):
    (model, begin, losses, want, end), (ranks, options) = trained_by_torch(name), MESHES[mesh]

    def run(comm):
        optimizer = optim.AdamW(lr=1e-3, weight_decay=0.01)
        more = {"loss": nn.CrossEntropyLoss(), "precision": "float64", **options}
        trainer = distributed(model, comm, optimizer=optimizer, **more)
        trainer.load_parameters({n: begin[n] for n in trainer.parameters()})
        mine = part(trainer.data_group, SAMPLES)
        found, first = [], {}
        for step in range(3):
            x, _, y = batch(name, step)
            given = tuple(a[mine] for a in x)
            found.append(trainer.accumulate(given[0] if len(given) == 1 else given, y[mine]))
            first = first or trainer.gradients()
            trainer.update()
        return found, first, trainer.parameters()

    found, first, parameters = spawn(run, ranks)[0]
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    for n, value in parameters.items():
        np.testing.assert_allclose(first[n], want[n], rtol=1e-9, atol=1e-11, err_msg=n)
        np.testing.assert_allclose(value, end[n], rtol=1e-9, atol=1e-9, err_msg=n)


@pytest.mark.parametrize("time", [12, 200])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
        LLAMA3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda said: said["rope_type"],
)
def test_positions_are_stretched_as_there(scaling, time):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**{**TINY, "rope_parameters": {**scaling, "rope_theta": 10000.0}})
    want, size = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=time)
    got, factor = compute_rotary_frequencies_and_factor(WIDTH // HEADS, 10000.0, scaling, 64, time)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert factor == pytest.approx(size, rel=1e-12)


@needs("moe")
def test_the_balancing_loss_is_theirs():
    """Of one block: theirs is of all blocks together, ours of each."""
    torch.manual_seed(1)
    options = {"num_local_experts": 5, "num_hidden_layers": 1, "experts_implementation": "eager"}
    net = theirs("Mixtral", router_aux_loss_coef=0.1, output_router_logits=True, **options).double()
    with torch.no_grad():
        net.model.layers[0].mlp.gate.weight += torch.randn_like(net.model.layers[0].mlp.gate.weight)
    model = nn.Llama(VOCAB, WIDTH, 1, HEADS, 64, kv_heads=2, hidden=48, eps=1e-5, theta=1e6, experts=5, balance=0.1)
    x, y = (a[:, :8] for a in tokens())  # of 32 positions they have exact shares, in float32
    net = widened(net, model)
    out = net(torch.tensor(x))
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), torch.tensor(y).flatten()) + 0.1 * out.aux_loss
    loss.backward()
    p, want = arrays(net), arrays(net, gradients=True)
    trainer = model.as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=1e-3), precision="float64")
    trainer.load_parameters(p)
    trainer.accumulate(x, y)
    for n, value in trainer.gradients().items():
        np.testing.assert_allclose(value, want[n], rtol=1e-9, atol=1e-11, err_msg=n)
