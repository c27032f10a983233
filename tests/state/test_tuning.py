"""Choices by measurement: made once, kept on disk, overruled by what the user says."""

import json
import platform

import numpy as np
import pytest

from fsdpx import nn, optim
from fsdpx.array import blas
from fsdpx.launch.info import info
from fsdpx.state import tuning
from fsdpx.state.tuning import Tuning, stored, tune_for


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and the library of before afterwards."""
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path / "cache"))
    before = blas.chosen()
    yield tmp_path / "cache"
    blas.choose(before)


def _single():
    from fsdpx.comm.local import single

    return single()


def _trainer(**options):
    return nn.Chain(*(nn.Linear(32, 32) for _ in range(64))).as_distributed(
        loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), comm=_single(), **options
    )


def test_measured_once_then_read_from_disk(cache, monkeypatch):
    first = tune_for(_single(), True, np)
    monkeypatch.setattr(blas, "measure", lambda: pytest.fail("it was measured again"))
    assert tune_for(_single(), True, np) == first
    assert [t for _, t in stored()] == [first]
    assert "GFLOP/s per thread" in first.measured


def test_info_tells_what_was_chosen(cache):
    assert "nothing yet: the first job measures" in info()
    tune_for(_single(), True, np)
    assert "tuned, 1 ranks" in info()
    assert "GFLOP/s per thread" in info()


@pytest.mark.parametrize(("faster", "taken"), [(1.1, False), (1.5, True)])
def test_another_library_is_taken_only_if_clearly_faster(monkeypatch, faster, taken):
    usual = blas.chosen()
    other = next(name for name in blas.available() if name != usual)
    rates = dict.fromkeys(blas.available(), 1.0) | {usual: 50.0, other: 50.0 * faster}
    monkeypatch.setattr(blas, "measure", lambda: rates)
    assert (tune_for(_single(), True, np).blas == other) == taken
    assert (blas.chosen() == other) == taken


def test_not_wanted_means_not_measured(cache, monkeypatch):
    monkeypatch.setattr(blas, "measure", lambda: pytest.fail("it was measured"))
    assert tune_for(_single(), False, np).group_bytes == 1 << 20
    _trainer(tune=False)
    monkeypatch.setenv("FSDPX_TUNE", "0")
    _trainer()
    assert not cache.exists()


def test_thread_ranks_have_nothing_to_measure(monkeypatch):
    from fsdpx import spawn

    monkeypatch.setattr(blas, "measure", lambda: pytest.fail("it was measured"))
    assert spawn(lambda comm: tune_for(comm, True, np).group_bytes, 2) == [1 << 20] * 2


def test_what_the_user_says_goes_before(monkeypatch):
    monkeypatch.setattr(tuning, "_kept", lambda key: Tuning(blas.chosen(), group_bytes=8192))
    assert len(_trainer(tune=True).placement.layout.units) == 32
    assert len(_trainer(tune=True, group_bytes=4 * 4224).placement.layout.units) == 16
    assert len(_trainer(tune=False).placement.layout.units) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tuning": 3}', '{"tuning": {"blas": "mkl", "speed": 1}}'])
def test_a_spoilt_file_is_measured_anew(cache, monkeypatch, text):
    counted = []
    monkeypatch.setattr(blas, "measure", lambda: counted.append(1) or dict.fromkeys(blas.available(), 1.0))
    tune_for(_single(), True, np)
    (file,) = cache.glob("tuning-*.json")
    file.write_text(text)
    assert stored() == []
    again = tune_for(_single(), True, np)
    assert len(counted) == 2
    assert json.loads(file.read_text())["tuning"]["blas"] == again.blas


def test_a_cache_that_cannot_be_written_only_means_measuring_again(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path / "file" / "below"))
    assert tune_for(_single(), True, np).blas in blas.available()
    assert stored() == []


def test_other_machines_files_do_not_show(cache, monkeypatch):
    tune_for(_single(), True, np)
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert stored() == []


@pytest.mark.parametrize(
    ("latency", "rate", "wanted"),
    [(1e-9, 1e9, 256 << 10), (20e-6, 10e9, 2 << 20), (50e-6, 1e9, 512 << 10), (1.0, 1e9, 4 << 20)],
)
def test_units_are_as_large_as_makes_latency_small(latency, rate, wanted):
    assert tuning._group_bytes(latency, rate) == wanted
