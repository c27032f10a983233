"""python -m fsdpx compile: a job after it compiles nothing."""

import os
from pathlib import Path

import pytest
from commands import refused, start
from trials import ROOT, job

from fsdpx.core.array.kernels import choice
from fsdpx.core.engine.warmup import OTHER_WARMUPS, list_kernel_names
from fsdpx.ext.native import code_cache
from fsdpx.launch.catalog import CATALOG, list_kernels_of_model_and_loss

MINE = """
from fsdpx import nn

def make():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
"""
TRAIN = """
import numpy as np
import fsdpx
from fsdpx import nn, optim
from mine import make

trainer = make().as_distributed(loss=nn.MSELoss(), optimizer=optim.AdamW(lr=0.1), clip_norm=1.0)
trainer.step(np.ones((2, 3), "f4"), np.ones((2, 2), "f4"))
trainer.predict(np.ones((2, 3), "f4"))
trainer.close()
"""


@pytest.mark.jobs
@pytest.mark.skipif(not code_cache.can_store_machine_code(), reason="machine code is not kept here")
def test_a_job_compiles_nothing_more(tmp_path: Path) -> None:
    """Also what ranks run that meet in shared memory."""
    (tmp_path / "mine.py").write_text(MINE)
    cache = tmp_path / "cache"

    def compile_mine() -> str:
        done = start(1, *"-m fsdpx compile mine:make".split(), folder=tmp_path, FSDPX_CACHE=str(cache))
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = compile_mine()
    compiled = {file.name for file in (cache / "code").iterdir()}
    found = f"kernels of mine:make in float32 are in {cache / 'code'}\n{len(compiled)} were compiled now, in "
    assert first.startswith(found)
    result = job(tmp_path, TRAIN, ranks=2, FSDPX_CACHE=str(cache), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert result.status == 0, result.err
    assert {file.name for file in (cache / "code").iterdir()} == compiled
    assert f"{cache / 'code'}\n0 were compiled now" in compile_mine()


def test_every_kernel_of_every_model_is_one_of_all() -> None:
    names = list_kernel_names()
    known = {name for name in names if name in OTHER_WARMUPS or choice.SAMPLE_CALLS[name.partition(" ")[0]]}
    compiled = {*choice.import_all_compiled_kernels(), *OTHER_WARMUPS}
    for model in CATALOG:
        needed = {name for name in list_kernels_of_model_and_loss(model) if name.partition(" ")[0] in compiled}
        assert needed <= known, model


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path / "file" / "cache"))
    assert "/file/cache cannot be written: set FSDPX_CACHE to a folder " in refused("compile mlp")
