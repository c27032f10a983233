"""What docs/promises.md promises: names that are documented, checkpoints of all versions, one version everywhere."""

import re
from pathlib import Path

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.errors import CheckpointError

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "tests" / "core" / "checkpoint" / "kept").iterdir())
"""A checkpoint of each version, of a Linear(3, 2) after two steps of AdamW on `BATCH`."""
BATCH = np.arange(12.0).reshape(4, 3) / 12, np.ones((4, 2))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_checkpoints_of_all_versions_go_on(folder: Path, ranks: int) -> None:
    def go_on(comm: Communicator) -> tuple[int, list[float], float]:
        trainer = nn.Linear(3, 2).as_distributed(
            loss=nn.MSELoss(), optimizer=optim.AdamW(lr=0.5), precision="float32", tune=False, comm=comm
        )
        trainer.load(folder)
        loaded = trainer.global_step, trainer.parameters()["bias"].tolist()
        mine = slice(4 * comm.rank // comm.size, 4 * (comm.rank + 1) // comm.size)
        return *loaded, trainer.step(BATCH[0][mine], BATCH[1][mine])

    for steps, bias, loss in spawn(go_on, ranks):
        assert steps == 2
        assert bias == pytest.approx([-0.27866828, -1.48102653], rel=1e-6)
        assert loss == pytest.approx(5.10269589, rel=1e-5)


def test_a_checkpoint_of_this_version_is_kept() -> None:
    assert fsdpx.__version__ in [folder.name for folder in KEPT]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    for file in KEPT[-1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes().replace(b'"checkpoint": 1,', b'"checkpoint": 2,'))
    trainer = nn.Linear(3, 2).as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(lr=0.5), precision="float32")
    with pytest.raises(CheckpointError, match="format 2 of checkpoints; this fsdpx reads format 1"):
        trainer.load(tmp_path)


def test_public_names_are_documented() -> None:
    page = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    assert [name for name in fsdpx.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [fsdpx.__version__]
    (licence,) = re.findall(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.findall(r"^license: (.*)$", citation, re.M) == [licence]
