"""What ranks write and read at a checkpoint on paper is what thread ranks do, at another world size, too."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fsdpx
from fsdpx import Mesh, nn, optim
from fsdpx.checkpoint import pieces, read, write
from fsdpx.comm import Communicator
from fsdpx.plan import Prediction, predict

X = ((12, 8), "int64")
MESHES = [
    (1, "ddp", None), (2, "zero1", None), (3, "fsdp", None), (4, "zero2", None), (3, "ddp", None),
    (4, "hybrid", Mesh(replica=2, shard=2)), (4, "fsdp", Mesh(pipe=2)), (4, "fsdp", Mesh(tensor=2)),
    (6, "ddp", Mesh(replica=3, tensor=2)), (8, "fsdp", Mesh(pipe=2, tensor=2)),
]  # fmt: skip


class Disk:
    """Counts what each rank does with tensors in files, whichever thread does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ranks, self.sizes = threading.local(), dict[int, int](), dict[int, list[int]]()
        self.opened, self.write_at, self.read_at = write.opened, write.write_at, read._read_at
        for module, name, call in ((write, "opened", self.open), (write, "write_at", self.write)):
            monkeypatch.setattr(module, name, call)
        monkeypatch.setattr(read, "_read_at", self.read)

    @contextmanager
    def open(self, path: Path, writing: bool = False) -> Iterator[int]:
        with self.opened(path, writing=writing) as fd:
            self.ranks[fd] = self.now.rank
            yield fd

    def write(self, fd: int, data: Any, offset: int) -> None:
        self.sizes[self.ranks[fd]].append(len(data))
        self.write_at(fd, data, offset)

    def read(self, source: Any, files: Any, file: str, data: Any, offset: int) -> None:
        self.sizes[self.now.rank].append(len(data))
        self.read_at(source, files, file, data, offset)

    def found(self, call: Any, rank: int) -> tuple[int, int]:
        """How many, and their bytes, while `call` runs on this rank."""
        self.now.rank, self.sizes[rank] = rank, []
        call()
        return len(self.sizes[rank]), sum(self.sizes[rank])


@pytest.mark.parametrize("seed", range(8))
def test_as_many_bytes_and_calls_as_ranks_that_run(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    draw, disk = random.Random(seed), Disk(monkeypatch)
    block = draw.choice([256, 1024, 4 << 20])
    for module in (pieces, read):
        monkeypatch.setattr(module, "BLOCK", block)
    precision, optimizer = draw.choice(["float32", "bf16", "float64"]), draw.choice([optim.AdamW, optim.SGD])
    saving, loading = draw.choice(MESHES), draw.choice(MESHES)

    def options(strategy: str, mesh: Mesh | None) -> dict[str, Any]:
        more = {"microbatches": 2} if mesh is not None and mesh.pipe == 2 else {}
        return {"strategy": strategy, "mesh": mesh, "precision": precision, "optimizer": optimizer()} | more

    def predicted(ranks: int, *choice: Any) -> Prediction:
        return predict(nn.GPT(33, 16, 4, 2, 8), (X, X), ranks=ranks, machine="epyc-100g", **options(*choice))

    def made(comm: Communicator, *choice: Any) -> fsdpx.Trainer:
        return nn.GPT(33, 16, 4, 2, 8).as_distributed(loss=nn.CrossEntropy(), comm=comm, **options(*choice))

    def save(comm: Communicator) -> tuple[int, int]:
        trainer = made(comm, *saving[1:])
        return disk.found(lambda: trainer.save(tmp_path / "saved"), comm.rank)

    def load(comm: Communicator) -> list[tuple[int, int]]:
        trainer, path = made(comm, *loading[1:]), tmp_path / "saved"
        return [disk.found(partial(trainer.load, path, verify=verify), comm.rank) for verify in (False, True)]

    wrote = fsdpx.spawn(save, saving[0])
    checkpoint = predicted(*saving).checkpoint()
    assert [wrote[one.rank] for one in checkpoint.each] == [one.written for one in checkpoint.each]
    assert sum(nbytes for _, nbytes in wrote) == checkpoint.nbytes
    did = fsdpx.spawn(load, loading[0])
    for one in predicted(*loading).checkpoint().each:
        (calls, nbytes), both = one.loaded, (one.loaded.calls + one.verified.calls, one.read)
        assert did[one.rank] == [(calls, nbytes), both]


def test_ranks_that_hold_all_read_all() -> None:
    """What a load takes grows with replicas, and a shared disk gives it to all of them together."""
    for strategy, times in (("ddp", 4), ("fsdp", 1)):
        found = predict(nn.GPT(33, 16, 4, 2, 8), (X, X), ranks=4, machine="epyc-100g", strategy=strategy).checkpoint()
        (one,) = found.each
        assert one.loaded.nbytes * 4 == pytest.approx(times * found.nbytes, rel=0.01)
        assert found.read == (one.verified.nbytes + one.loaded.nbytes) * 4
        assert one.verified.nbytes == one.written.nbytes == found.nbytes // 4
