"""nn.Llama under the engine: the same numbers however it is cut, saved and recomputed."""

from typing import Any

import numpy as np
import pytest

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.comm import Communicator


def data(step: int) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(step)
    text = rng.integers(0, 31, (4, 9))
    return (text[:, :-1], np.sort(rng.integers(0, 2, (4, 8)), axis=1)), text[:, 1:]


def train(size: int, segments: bool = True, **options: Any) -> dict[str, np.ndarray]:
    """Parameters after three steps."""
    given: dict[str, Any] = {"precision": "float64", **options}

    def run(comm: Communicator) -> dict[str, np.ndarray]:
        model = nn.Llama(31, 16, 2, 4, 8, kv_heads=2, qk_norm=True, segments=segments)
        adamw = optim.AdamW(lr=1e-2)
        trainer = model.as_distributed(loss=nn.CrossEntropy(), optimizer=adamw, comm=comm, seed=3, **given)
        parts = 1 if "mesh" in options else comm.size
        mine = slice(None) if parts == 1 else slice(comm.rank * 4 // parts, (comm.rank + 1) * 4 // parts)
        for step in range(3):
            x, y = data(step)
            cut = tuple(a[mine] for a in x)
            trainer.step(cut if segments else cut[0], y[mine])
        return trainer.parameters()

    return spawn(run, size)[0]


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray], exact: float) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=exact, atol=exact, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp", "recompute": "attention"},
        {"mesh": Mesh(pipe=2), "schedule": "1f1b", "microbatches": 2, "recompute": "all"},
        {"mesh": Mesh(tensor=2), "sequence": "parallel"},
    ],
    ids=["fsdp", "pipe", "tensor"],
)
def test_packed_documents_train_alike_on_two_ranks(options: dict[str, Any]) -> None:
    same(train(2, **options), train(1), 1e-10)


def test_chunks_and_recompute_leave_the_bits() -> None:
    want = train(1, segments=False, precision="float32", chunks=4)
    for size, options in ((2, {"strategy": "fsdp"}), (1, {"recompute": "attention"})):
        got = train(size, segments=False, precision="float32", chunks=4, **options)
        assert all(np.array_equal(got[name], value) for name, value in want.items())


def test_16_bits_follow() -> None:
    same(train(1, precision="bf16"), train(1), 0.06)
