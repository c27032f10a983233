"""LoRA beside PEFT: the same losses and adapters from the same beginning, and files that each reads of the other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import fsdpx  # noqa: E402
from fsdpx import models, nn, optim  # noqa: E402
from fsdpx.core.comm import Communicator, spawn  # noqa: E402

RANK, ALPHA, STEPS, LR = 4, 8.0, 5, 1e-2
OURS, THEIRS = ["attn.q", "attn.v"], ["q_proj", "v_proj"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_five_steps_and_files_both_ways(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).double()
    net.save_pretrained(tmp_path / "model")
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=THEIRS)
    theirs = peft.get_peft_model(net, settings)
    theirs.save_pretrained(tmp_path / "begin", save_embedding_layers=False)
    x = np.random.default_rng(0).integers(0, 50, (4, 9))
    wanted = trained_by_torch(theirs, torch.tensor(x))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)

    def run(comm: Communicator) -> Any:
        model = nn.add_lora(models.from_pretrained(tmp_path / "model"), RANK, ALPHA, targets=OURS)
        trainer = fsdpx.distribute(
            model, comm=comm, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=LR, weight_decay=0.0),
            precision="float64",
        )  # fmt: skip
        fsdpx.load_adapter(trainer, tmp_path / "begin")
        mine = x[2 * comm.rank : 2 * comm.rank + 2]
        losses = [trainer.step(mine[:, :-1], mine[:, 1:]) for _ in range(STEPS)]
        found = adapters(trainer)
        fsdpx.save_adapter(trainer, tmp_path / "ours")
        fsdpx.load_adapter(trainer, tmp_path / "theirs")
        return losses, found, adapters(trainer)

    losses, found, taken = spawn(run, 2)[0]
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-6)
    assert losses[-1] < losses[0]
    for name, array in found.items():
        np.testing.assert_allclose(array, taken[name], rtol=0, atol=1e-6, err_msg=name)
    again = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64), tmp_path / "ours"
    )
    with torch.no_grad():
        got, want = (m(torch.tensor(x)).logits.numpy() for m in (again, theirs))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def adapters(trainer: Any) -> dict[str, np.ndarray]:
    return {name: array for name, array in trainer.parameters().items() if ".lora_" in name}


def trained_by_torch(model: Any, x: Any) -> list[float]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(x[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 50), x[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
