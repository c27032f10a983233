"""Parameters that travel in 8 bits: the same on all ranks, bytes as predicted, and training that arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amount import few, in_full
from bits import bits
from models import KNOWN, make, part

import fsdpx
from fsdpx import Mesh, Precision, nn, optim, spawn
from fsdpx.checkpoint.pieces import held
from fsdpx.comm import Communicator
from fsdpx.errors import ConfigError

EIGHT = Precision(param="int8")


def train(comm: Communicator, precision: Any, count: int = 6, **options: Any) -> tuple[Any, list[float]]:
    trainer = make(comm, "wide", options.pop("strategy", "fsdp"), precision=precision, group_bytes=600, **options)
    rng, losses = np.random.default_rng(4), []
    for _ in range(count):
        x, y = KNOWN["wide"].batch(rng, 12)
        losses.append(trainer.step(x[part(trainer.data, 12)], y[part(trainer.data, 12)]))
    return trainer, losses


MESHES = {
    "uneven shards": (Mesh(shard=3), "fsdp"),
    "zero1": (Mesh(shard=2), "zero1"),
    "hybrid": (Mesh(replica=2, shard=2), "fsdp"),
    "tensor": (Mesh(shard=2, tensor=2), "fsdp"),
    "pipe": (Mesh(shard=2, pipe=2), "fsdp"),
}


@in_full
@pytest.mark.parametrize("name", few(MESHES, len(MESHES)))
def test_bytes_are_predicted_ranks_agree_and_the_loss_is_close(name: str) -> None:
    mesh, strategy = MESHES[name]

    def body(comm: Communicator, precision: Any) -> Any:
        trainer, losses = train(comm, precision, mesh=mesh, strategy=strategy)
        trainer.reset()
        x, y = KNOWN["wide"].batch(np.random.default_rng(1), 12)
        trainer.step(x[part(trainer.data, 12)], y[part(trainer.data, 12)])
        report, axes = trainer.report(), trainer.placement.axes
        key = ("shard", "all_gather")
        assert report.traffic[key] == report.predicted[key]
        if precision is EIGHT:
            alike = {(p.name, p.start): np.array(p.array) for p in held(trainer.engine.state) if p.spec.cut is None}
            for theirs in axes.tensor.all_gather_object(alike):
                np.testing.assert_equal(theirs, alike)
        return losses, report.traffic[key].bytes, bits(trainer)

    found, plain = (spawn(body, mesh.size, precision) for precision in (EIGHT, "float32"))
    assert len({str((losses, end)) for losses, _, end in found}) == 1
    assert found[0][1] < 0.4 * plain[0][1]
    np.testing.assert_allclose(found[0][0], plain[0][0], rtol=0.03)
    assert found[0][0] != plain[0][0]


def test_all_ranks_compute_with_the_same_rounded_parameters() -> None:
    """Also the owner: each block is off by at most half a level of its largest."""

    def body(comm: Communicator) -> Any:
        trainer, _ = train(comm, EIGHT, 1, strategy="zero1")
        x, y = KNOWN["wide"].batch(np.random.default_rng(1), 12)
        trainer.evaluate(x[part(comm, 12)], y[part(comm, 12)])
        state, found = trainer.engine.state, []
        for p, page in trainer.placement.pages.items():
            full, own = state.ledger.array("full", p), state.ledger.array("master", p)
            off = np.abs(full[page.mine.start : page.mine.stop] - own)
            for at in range(0, own.size, 256):
                assert off[at : at + 256].max() <= np.abs(own[at : at + 256]).max() / 127 * 0.5001
            found.append((np.array(full).tobytes(), float(off.max())))
        return found

    ranks = spawn(body, 3)
    assert ranks[0]
    assert all([full for full, _ in one] == [full for full, _ in ranks[0]] for one in ranks)
    assert max(off for _, off in ranks[0]) > 0


def test_a_dry_run_predicts_the_same() -> None:
    model = nn.Chain(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))
    dry = fsdpx.dry_run(
        model, ((6, 12), "float32"), ((6, 5), "float32"), ranks=3, loss=nn.MSE(), optimizer=optim.AdamW(),
        strategy="fsdp", precision=EIGHT,
    )  # fmt: skip
    counted = {key: count for key, count in dry.report.traffic.items() if key[0] != "world"}
    assert counted == dry.report.predicted


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chunks=4 and Precision\(param='int8'\): blocks are those of shards"):
        spawn(lambda comm: make(comm, "mlp", precision=EIGHT, chunks=4), 1)
    with pytest.raises(ConfigError, match=r"Precision\(param='int8', compute='bf16'\): choose None or bf16 or float32"):
        Precision("bf16", param="int8")
