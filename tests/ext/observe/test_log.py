"""Logs of fit: two jobs, hostile folders, numbers that are none."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
from metric_rows import rows_of
from models import CASES, make

from fsdpx import data, spawn
from fsdpx.core.trainer.fit_checkpoints import FitHistory
from fsdpx.errors import ConfigError
from fsdpx.ext.observe import log as logs

RANK_0 = SimpleNamespace(call_runner=SimpleNamespace(rank=0))
"""As much of a trainer as a log looks at."""


def write_one_row(folder, values):
    """The rows of a log of one step."""
    log = logs.TrainingLog(folder, ())
    log._lock_and_truncate(0)
    log._write_row(RANK_0, FitHistory([1.0]), values)
    log.on_train_end(RANK_0, FitHistory())
    return rows_of(folder)


def test_two_jobs_do_not_write_one_log(tmp_path):
    def body(comm):
        trainer, log = make(comm, "mlp"), logs.TrainingLog(tmp_path, ())
        samples = data.ArrayDataset(*CASES["mlp"].batch(np.random.default_rng(0), 24))
        loader = data.DataLoader(samples, 8, comm=trainer.data_group, shuffle=True)
        log.on_train_begin(trainer, FitHistory())
        with pytest.raises(ConfigError) as caught:
            trainer.fit(loader, progress=False, log=tmp_path)
        log.on_train_end(trainer, FitHistory())
        trainer.fit(loader, progress=False, log=tmp_path)
        return str(caught.value)

    for text in spawn(body, 2):
        assert f"{tmp_path}: another job is writing its log there: " in text
    assert not (tmp_path / ".lock").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_a_log_replaces_pipes_and_links_that_lie_in_its_place(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "other").write_text("another file")
    for name in ("metrics.csv", "log.txt"):
        os.mkfifo(tmp_path / "log" / name)
    (tmp_path / "log/metrics.jsonl").symlink_to(tmp_path / "other")
    assert write_one_row(tmp_path / "log", {"loss": 1.0}) == [{"step": 1, "epoch": 1, "loss": 1.0}]
    assert (tmp_path / "other").read_text() == "another file"
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "log").iterdir())


def test_numbers_that_are_none_are_left_out(tmp_path):
    assert write_one_row(tmp_path, {"loss": 1.0, "gradient_norm": math.nan}) == [{"step": 1, "epoch": 1, "loss": 1.0}]
