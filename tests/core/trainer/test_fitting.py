"""Out of memory: the error says what the plan is, how much there is, and what would fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import Same

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array import arena
from fsdpx.core.state import footprint
from fsdpx.core.trainer import out_of_memory

ROWS = 8


class Full(Same):
    """Finds no memory in the forward of more than two rows."""

    def forward(self, env: Any, params: Any, x: Any) -> Any:
        if isinstance(x, np.ndarray) and len(x) > 2:
            raise MemoryError("Unable to allocate 7 bytes")
        return x, ()


def trainer(comm: Any = None, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 64), *[nn.ReLU() for _ in range(3)], Full(), nn.Linear(64, 2))
    return fsdpx.distribute(model, loss=nn.MSELoss(), optimizer=optim.AdamW(lr=0.1), comm=comm, tune=False, **options)


def test_the_plan_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> Any:
        raise MemoryError(f"unable to allocate {nbytes} bytes")

    monkeypatch.setattr(arena, "_map_zero_pages", none)
    monkeypatch.setattr(out_of_memory, "find_memory_budget", lambda held, here: (f"little for {here}", 1 << 20))

    def rank(comm: Any) -> str:
        with pytest.raises(fsdpx.errors.OutOfMemory) as raised:
            trainer(comm, strategy="ddp")
        return str(raised.value)

    for number, text in enumerate(fsdpx.spawn(rank, 2)):
        head, there, plan, less = text.split("\n\n")
        assert head == f"rank {number} of 2 has too little memory: unable to allocate {arena.BLOCK_BYTES} bytes"
        assert there == "memory that there is: little for 2"
        kinds = [line.split("  ")[0] for line in plan.splitlines()[2:]]
        assert kinds == ["gradients", "optimizer", "parameters", "in all"]
        assert [line.split("  ")[0] for line in less.splitlines()[2:]] == ["strategy='zero1'"]
        assert less.endswith("  fits")


def test_a_step_names_action_unit_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "find_memory_budget", lambda held, here: ("little", 9000))
    made = trainer()
    with pytest.raises(fsdpx.errors.OutOfMemory) as raised:
        made.step(np.zeros((ROWS, 4), "float32"), np.zeros((ROWS, 2), "float32"))
    head, _, plan, less = str(raised.value).split("\n\n")
    assert head == (
        "rank 0 of 1 has too little memory: Unable to allocate 7 bytes\nin forward of layer '4' Full()\n"
        "on rank 0, in action F0.0 (unit '0..5')"
    )
    assert "activations" in plan
    choices = [line.split("  ")[0] for line in less.splitlines()[2:]]
    assert choices == ["microbatches=2", "microbatches=4", "microbatches=8"]
    made.close()


def test_nothing_fits() -> None:
    text = out_of_memory.format_cheaper_options(
        {"strategy": "zero2", "recompute": "all", "precision": "bf16"}, lambda changes: 9, 8
    )
    assert text == (
        "none of the choices that fsdpx knows fits: take more ranks, a smaller model or batch, or "
        "offload=fsdpx.OffloadConfig(...)"
    )


@pytest.mark.parametrize(("line", "folder"), [("0::/a/b", "a"), ("4:cpu,memory:/a/b", "memory/a")])
def test_limits_of_control_groups(tmp_path: Path, line: str, folder: str) -> None:
    """Of the group that the process is in, and of those around it."""
    name = "memory.limit_in_bytes" if folder.startswith("memory") else "memory.max"
    (tmp_path / folder / "b").mkdir(parents=True)
    (tmp_path / folder / name).write_text("4096\n")
    (tmp_path / folder / "b" / name).write_text("max\n")
    assert list(footprint._find_control_group_limits(f"{line}\n3:pids:/a", tmp_path)) == [4096]


def test_the_room_of_this_machine() -> None:
    text, most = footprint.find_memory_budget(1 << 20, 2)
    if most is None:
        assert text == "unknown on this system"
    else:
        assert " on this machine" in text
        assert text.endswith("; 2 ranks share it")
        assert most >= 0
