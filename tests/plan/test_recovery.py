"""What ranks move to go on after a loss, on paper and as thread ranks do it."""

import random
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import fsdpx
from fsdpx import Elastic, Mesh, nn, optim, spawn
from fsdpx.comm import Communicator, Died
from fsdpx.elastic import recut
from fsdpx.elastic.copies import snapshot_bytes
from fsdpx.errors import ConfigError, MeshError, StateLost
from fsdpx.plan import predict

X = ((12, 8), "int64")
CHOICES = [
    (3, "ddp", None), (4, "fsdp", None), (5, "zero1", None), (3, "zero2", None), (4, "hybrid", Mesh(replica=2)),
    (4, "fsdp", Mesh(pipe=2)), (4, "ddp", Mesh(pipe=2)), (4, "fsdp", Mesh(tensor=2)), (2, "fsdp", None),
]  # fmt: skip


def model() -> nn.Layer:
    return nn.GPT(33, 16, 4, 2, 8)


class Moved:
    """Counts what each rank receives in a re-cut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sizes, self.posted = threading.local(), defaultdict[int, list[int]](list), recut._posted
        monkeypatch.setattr(recut, "_posted", self)

    def __call__(self, comm: Any, message: Any, arrays: Any, *rest: Any) -> Any:
        if not message.sends:
            nbytes = sum(int(rows.size.sum()) * arrays[rows.part].itemsize for rows in message.rows)
            self.sizes[self.now.rank].append(nbytes)
        return self.posted(comm, message, arrays, *rest)


@pytest.mark.parametrize("seed", range(8))
def test_as_many_bytes_and_messages_as_ranks_that_lose_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, moved = random.Random(seed), Moved(monkeypatch)
    ranks, strategy, mesh = CHOICES[seed]
    lost, copies = draw.randrange(mesh.filled(strategy, ranks).size if mesh else ranks), draw.choice([1, 2])
    optimizer = draw.choice([optim.AdamW, optim.SGD])
    pipe = {"microbatches": 2, "schedule": "gpipe"} if mesh and mesh.pipe == 2 else {}
    options: dict[str, Any] = {"strategy": strategy, "mesh": mesh, "group_bytes": 0, "loss": nn.CrossEntropy()} | pipe

    def body(comm: Communicator) -> int:
        moved.now.rank = comm.rank
        elastic = Elastic(copies=copies, every=1)
        trainer = model().as_distributed(comm=comm, elastic=elastic, optimizer=optimizer(), **options)
        actions = []

        def die(action: object) -> None:
            actions.append(action)
            if comm.rank == lost and trainer.steps == 2 and "UPDATE" in str(action):
                raise Died(str(action))

        trainer.inspect.engine.observers.append(die)
        x = np.ones(X[0], np.int64)
        for _ in range(5):
            trainer.step(x, x)
        kept = trainer.host._coordinator.assembly.copies._partners
        return len(kept.buddies) * snapshot_bytes(kept.own)

    found = predict(model(), (X, X), ranks=ranks, machine="epyc-100g", optimizer=optimizer(), **options)
    paper = found.recovery([lost], copies)
    sent = [one for one in spawn(body, ranks, survive=True, timeout=60) if one is not None]
    left = [rank for rank in range(ranks) if rank != lost]
    assert [(len(moved.sizes[rank]), sum(moved.sizes[rank])) for rank in left] == [*paper.received]
    assert sent == [*paper.copied]


def test_losses_that_cannot_be_made_good() -> None:
    def of(**options: Any) -> fsdpx.plan.Prediction:
        return predict(model(), (X, X), ranks=4, machine="epyc-100g", **options)

    assert sum(one.nbytes for one in of(strategy="fsdp").recovery([1, 2]).received) > 0  # each has the other's buddy
    with pytest.raises(StateLost, match=r"^without ranks 1, 3 parts of the state are gone \(.* \.\.\.\): keep"):
        of(strategy="fsdp").recovery([1, 3])
    assert of(strategy="fsdp").recovery([1, 3], copies=2).mesh.size == 2
    with pytest.raises(ConfigError, match=r"lost=\[4\]: numbers of ranks are needed, 0 to 3"):
        of().recovery([4])
    with pytest.raises(ConfigError, match=r"copies=-1\): a whole number, 0 or more"):
        of().recovery([0], copies=-1)
    with pytest.raises(MeshError, match="1 ranks are left, which is too few for it"):
        of(mesh=Mesh(tensor=2)).recovery([0, 1, 2])
