"""Names of other libraries, unknown names and objects of PyTorch: one line says what is meant here."""

from pathlib import Path
from typing import Any

import pytest

import fsdpx
from fsdpx import nn, optim, spawn, words
from fsdpx.errors import ConfigError

MODEL: Any = nn.Linear(2, 2)
GIVEN: dict[str, Any] = {"loss": nn.MSE(), "optimizer": optim.SGD(lr=0.1)}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"stratgy": "ddp"}, r"distribute\(stratgy=\.\.\.\): no such option; did you mean 'strategy'\?"),
        ({"find_unused_parameters": True}, "here that is nothing: parameters without a gradient are found"),
        ({"micro_batch_size": 4}, "here that is microbatches=, their number, not their size"),
        ({"qqqq": 1}, r"distribute\(qqqq=\.\.\.\): no such option: model, loss, optimizer"),
        ({"strategy": "FULL_SHARD"}, "unknown strategy 'FULL_SHARD': .*; here that is strategy=\"fsdp\""),
        ({"strategy": "ZeRO-3"}, 'here that is strategy="zero3"'),
        ({"strategy": "DDP"}, 'here that is strategy="ddp"'),
        ({"strategy": "ShardingStrategy.NO_SHARD"}, 'here that is strategy="ddp"'),
        ({"strategy": "easgd"}, 'easgd is no longer in fsdpx: use strategy="gossip", or "diloco"'),
        ({"codec": "randomk"}, 'unknown codec .*; randomk is no longer in fsdpx: use codec="topk"'),
        ({"cuda_graphs": True}, "cuda_graphs is no longer in fsdpx: use nothing; leave it out"),
        ({"strategy": "hybird"}, r"did you mean 'hybrid'\?"),
    ],
)
def test_unknown_names_are_told_what_is_meant(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        fsdpx.distribute(MODEL, **{**GIVEN, **given})


def test_names_of_an_earlier_version_say_what_to_use_instead() -> None:
    with pytest.raises(AttributeError, match=r"^SOAP is no longer in fsdpx: use optim\.Muon\(\.\.\.\)$"):
        optim.SOAP  # noqa: B018
    with pytest.raises(AttributeError, match=r"^RandomK is no longer in fsdpx: use codec=\"topk\"$"):
        fsdpx.RandomK  # noqa: B018
    assert not hasattr(optim, "Adagrad")


def test_fit_knows_them_too() -> None:
    with pytest.raises(ConfigError, match=r"fit\(num_epochs=...\): no such option; here that is trainer.fit\(lo"):
        MODEL.as_distributed(**GIVEN).fit([], num_epochs=3)


def test_options_that_differ_are_printed_alone() -> None:
    def run(comm: Any) -> None:
        MODEL.as_distributed(**GIVEN, comm=comm, seed=comm.rank, check_finite=comm.rank == 1)

    line = r"^ranks differ in options: rank 0 has seed=0, check_finite=False, rank 1 has seed=1, check_finite=True\n"
    with pytest.raises(ConfigError, match=line.replace(r"\n", "")) as caught:
        spawn(run, 2)
    assert "clip_norm" not in str(caught.value)


def test_an_optimiser_of_pytorch_is_named_with_its_counterpart() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.zeros(2, requires_grad=True)]
    theirs = torch.optim.AdamW(weights, lr=0.5, weight_decay=0.1)
    for given, line in (
        (theirs, r"^torch\.optim\.AdamW: use fsdpx\.optim\.AdamW\(lr=0\.5, weight_decay=0\.1\)$"),
        (torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 9), r"^torch.*CosineAnnealingLR: .*schedules\.Cosine\("),
        (torch.optim.Rprop(weights), r"^torch\.optim\.Rprop is not in fsdpx: choose one of .*AdamW"),
    ):
        with pytest.raises(ConfigError, match=line):
            MODEL.as_distributed(loss=nn.MSE(), optimizer=given)


def test_the_page_of_names_has_the_whole_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
    rows = [f"| `{word}` | {ours} |" for word, ours in words.OTHERS.items()]
    assert "\n".join(rows) in page
