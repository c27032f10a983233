"""Small models, batches and one way to train them, shared by the engine tests."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fsdpx import Trainer, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.state.gradients import get_chunks_of_rank
from fsdpx.errors import FsdpxError

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""Each another program on two ranks or more; test_parity.py says why that is all. On one rank all are one program."""

HYBRID = 4, 6, 8
"""Where "hybrid" is not "fsdp": two replicas of shards of 2, 3 and 4."""


def placed(sizes: Iterable[int], hybrid: Iterable[int] = HYBRID) -> list[tuple[str, int]]:
    """Strategy and number of ranks, each of which says something of its own."""
    many = [(strategy, size) for size in sizes for strategy in (STRATEGIES if size > 1 else ["fsdp"])]
    return many + [("hybrid", size) for size in hybrid]


def mlp() -> nn.Layer:
    return nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5))


def gpt() -> nn.Layer:
    return nn.GPT(31, 16, 2, 2, 8, tie=True, dropout=0.1)


def untied() -> nn.Layer:
    return nn.GPT(31, 16, 2, 2, 8, tie=False)


def deep() -> nn.Layer:
    """Layers enough for six stages."""
    return nn.GPT(31, 16, 4, 2, 8, tie=True, dropout=0.1)


def wide() -> nn.Layer:
    """Heads, vocabulary and features that no width divides evenly."""
    return nn.GPT(31, 20, 2, 5, 12, tie=True, dropout=0.1)


def norms() -> nn.Layer:
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm(24), nn.SiLU(), nn.RMSNorm(24), nn.Linear(24, 5))


def graph() -> nn.Layer:
    """A value that two nodes read, across units."""
    return nn.Graph(
        {
            "up": (nn.Linear(12, 16), "x"),
            "mid": (nn.Linear(16, 16), "up"),
            "act": (nn.Tanh(), "mid"),
            "sum": (nn.Add(), "up", "act"),
            "out": (nn.Linear(16, 5), "sum"),
        },
        inputs=("x",),
        outputs=("out",),
    )


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Layer]
    loss: nn.Loss
    batch: Callable[[np.random.Generator, int], tuple[Any, Any]]


def rows(rng: np.random.Generator, n: int) -> tuple[Any, Any]:
    return rng.normal(size=(n, 12)), rng.normal(size=(n, 5))


def tokens(rng: np.random.Generator, n: int, time: int = 8) -> tuple[Any, Any]:
    text = rng.integers(0, 31, (n, time + 1))
    labels = text[:, 1:].copy()
    labels[:, 2:3] = -100
    return text[:, :-1], labels


CASES = {
    "mlp": Case(mlp, nn.MSELoss(), rows),
    "gpt": Case(gpt, nn.CrossEntropyLoss(), tokens),
    "untied": Case(untied, nn.CrossEntropyLoss(label_smoothing=0.1), tokens),
    "norms": Case(norms, nn.MSELoss(), rows),
    "graph": Case(graph, nn.MSELoss(), rows),
}


LARGER = {
    "deep": Case(deep, nn.CrossEntropyLoss(), tokens),
    "wide": Case(wide, nn.CrossEntropyLoss(label_smoothing=0.1), partial(tokens, time=12)),
    "uneven": Case(
        wide, nn.CrossEntropyLoss(label_smoothing=0.1), lambda rng, n: tokens(rng, n, time=11 if n > 4 else 1)
    ),
}
"""For the pipe and tensor axes."""

KNOWN = CASES | LARGER


def part(comm: Communicator, n: int, chunks: int | None = None) -> slice:
    """This rank's rows of a global batch of n."""
    if chunks is None:
        return slice(n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size)
    mine = get_chunks_of_rank(chunks, comm.rank, comm.size)
    return slice(mine.start * n // chunks, mine.stop * n // chunks)


def own_parts(comm: Communicator, case: str, sizes: Iterable[int], seed: int = 5, chunks: int | None = None) -> Any:
    """This rank's rows of global batches, and their targets."""
    rng = np.random.default_rng(seed)
    for n in sizes:
        x, y = KNOWN[case].batch(rng, n)
        mine = part(comm, n, chunks)
        yield x[mine], y[mine]


def own_part(comm: Communicator, case: str, n: int, seed: int = 0, chunks: int | None = None) -> tuple[Any, Any]:
    """This rank's rows of a global batch of n, and their targets."""
    return next(own_parts(comm, case, [n], seed, chunks))


def make(comm: Communicator, case: str, strategy: Any = "fsdp", **options: Any) -> Trainer:
    chosen = KNOWN[case]
    optimizer = options.pop("optimizer", None) or optim.AdamW(lr=1e-2, eps=1e-5)
    options = {"loss": chosen.loss, "precision": "float64", "group_bytes": 2048, "seed": 3, **options}
    return chosen.model().as_distributed(optimizer=optimizer, strategy=strategy, comm=comm, **options)


def distributed(model: nn.Layer, comm: Communicator | None = None, **options: Any) -> Trainer:
    """A model of one's own, which learns to give its targets."""
    options = {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1), **options}
    return model.as_distributed(comm=comm, **options)


def train(
    comm: Communicator, case: str, strategy: Any = "fsdp", sizes: tuple[int, ...] = (11, 3), **options: Any
) -> Any:
    """Losses, parameters and trainer after one step per global batch; batches are the same at any world size."""
    trainer = make(comm, case, strategy, **options)
    batches = own_parts(trainer.data_group, case, sizes, chunks=options.get("reproducible_chunks"))
    return [trainer.step(*batch) for batch in batches], trainer.parameters(), trainer


def report_a_second_step(trainer: Trainer, case: str = "mlp", n: int = 12) -> Any:
    """The first one may differ in what is resident."""
    batch = own_part(trainer.data_group, case, n)
    trainer.step(*batch)
    trainer.inspect.reset_counters()
    trainer.step(*batch)
    return trainer.report()


class Same(nn.Layer):
    """Gives its input: for layers that differ from it in forward or backward."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        return x, ()

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        return dy, ()


def alike(size: int, act: Callable[[Communicator], Any]) -> str:
    """The one error, "Type: text", that all ranks raise when they run `act`."""

    def run(comm: Communicator) -> str:
        try:
            act(comm)
        except FsdpxError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    texts = spawn(run, size, timeout=20)
    assert len(set(texts)) == 1, texts
    return texts[0]
