"""Patterns of names: those that match nothing are errors, and norms are found by what they are."""

import re
from typing import Any

import numpy as np
import pytest

from fsdpx import Local, nn, optim, spawn
from fsdpx.errors import CheckpointError, ConfigError

MLP = nn.Chain(
    nn.Linear(6, 8), nn.LayerNorm(8), {"bn1": nn.BatchNorm(8)}, {"normal": nn.Linear(8, 8)}, {"ln": nn.RMSNorm(8)}
)
ONE = nn.Chain(nn.Linear(6, 8))
GROUPS = {"heads.*": {"lr_scale": 2.0}}


def made(model: Any = MLP, optimizer: Any = None, **options: Any) -> Any:
    return model.as_distributed(loss=nn.MSE(), optimizer=optimizer or optim.SGD(lr=0.1), **options)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: made(optimizer=optim.AdamW(groups={**optim.no_decay, "norml.*": {}})), "AdamW(groups=): 'norml.*'"),
        (lambda: made(ONE, strategy=Local(2, optim.SGD(lr=1, groups=GROUPS))), "SGD(groups=): 'heads.*'"),
        (lambda: made(optimizer=optim.Muon(but=["heads.*"])), "Muon(but=): 'heads.*'"),
        (lambda: made(frozen=["norml.weight"]), "frozen: 'norml.weight'"),
        (lambda: made(codec={"norml.*": "int8"}), "codec: 'norml.*'"),
        (lambda: made().freeze("norml.*"), "freeze: 'norml.*'"),
        (lambda: made().parameters(names=["norml.weight"]), "parameters(names=): 'norml.weight'"),
        (lambda: nn.Chain(nn.Linear(2, 2), frozen=["1.*"]), "Chain(frozen=): '1.*'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(use: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        use()
    said, _, near = str(caught.value).partition(" matches no parameter; ")
    assert said == text
    assert near.startswith("the nearest are 'normal." if "norml" in text else "there are '")


@pytest.mark.parametrize(
    ("use", "given"),
    [
        (lambda: made(frozen=5), "frozen=5"),
        (lambda: made().parameters(names=5), "names=5"),
        (lambda: made().freeze(5), "freeze=(5,)"),
        (lambda: nn.Chain(nn.Linear(2, 2), frozen={"0.*": True}), "frozen={'0.*': True}"),
    ],
)
def test_what_is_no_list_of_patterns_is_an_error(use: Any, given: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{given}: a list of name patterns is needed")):
        use()


def test_names_of_files_that_nothing_has_are_an_error_with_the_nearest() -> None:
    wrong = r"rename: 'encodr.\*' matches no name there; the nearest are 'encoder.w'$"
    with pytest.raises(CheckpointError, match=wrong):
        made().load_weights({"encoder.w": np.zeros(3)}, strict=False, rename={"encodr.*": "0.*"})


def spared(trainer: Any) -> set[str]:
    """The parameters without weight decay, by the optimiser's own groups."""
    held = trainer.inspect.placement.segments.values()
    groups = trainer.inspect.placement.optimizer.groups
    every = [(s, run) for part in held for s, run in zip(part.items, part.overrides(groups), strict=True)]
    return {s.name for s, run in every if run.decay(0.1) == 0}


MODELS: dict[str, tuple[Any, str]] = {
    "chain": (MLP, "0.bias 1.weight 1.bias bn1.weight bn1.bias normal.bias ln.weight"),
    "frozen bias": (nn.Chain(nn.Linear(6, 8, bias=False), nn.LayerNorm(8, bias=False)), "1.weight"),
    "llama": (nn.Llama(31, 16, 1, 2, 8), "blocks.0.norm1.weight blocks.0.norm2.weight norm.weight"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_no_decay_is_the_list_by_hand(name: str, ranks: int) -> None:
    model, names = MODELS[name]
    optimizer = optim.AdamW(groups=optim.no_decay)
    found = spawn(lambda comm: spared(made(model, optimizer, comm=comm)), ranks)
    assert set().union(*found) == set(names.split())


@pytest.mark.parametrize("model", [nn.GPT(31, 16, 2, 2, 8), nn.Bert(31, 16, 2, 2, 8), nn.ViT(8, 4, 16, 1, 2, 5)])
def test_no_decay_of_models_whose_norms_are_called_so(model: Any) -> None:
    trainer = made(model, optim.AdamW(groups=optim.no_decay))
    by_name = {n for n in trainer.inspect.placement.layout.specs if n.endswith("bias") or "norm" in n or ".ln_" in n}
    assert spared(trainer) == by_name


def test_no_decay_knows_the_norms_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from fsdpx.interop.torch import from_torch

    class OwnRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: Any) -> Any:
            return x * self.scale

    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GroupNorm(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), OwnRMSNorm()
    )
    names = {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.bias", "4.scale"}
    for model in (from_torch(net), from_torch(net, torch.zeros(4, 6))):
        assert spared(made(model, optim.AdamW(groups=optim.no_decay))) == names
