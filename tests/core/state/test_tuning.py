"""Choices by measurement: made once, kept on disk, overruled by what the user says."""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from amount import few
from caches import set_own_cache
from present import needs

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array import blas
from fsdpx.core.array.blas import libraries
from fsdpx.core.base import environment
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.state import tuning
from fsdpx.core.state.tuning import agree_on_tuning, load_blas_measurement


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and the library of before afterwards."""
    before = blas.get_selected_library()
    yield set_own_cache(monkeypatch, tmp_path / "cache")
    blas.select_library(before)


def agree(tune=True):
    return agree_on_tuning(make_single_rank_communicator(), tune, np)


def model():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(16)))


def count_units(**options):
    options |= {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1), "comm": make_single_rank_communicator()}
    return len(model().as_distributed(**options).inspect.placement.layout.units)


def test_measured_once_then_read_from_disk(cache, monkeypatch):
    first = agree()
    monkeypatch.setattr(blas, "measure_gflops_of_each_library", lambda count: pytest.fail("it was measured again"))
    assert agree() == first
    assert load_blas_measurement().value["library"] == first.blas in load_blas_measurement().value["rates"]


@needs("half")
def test_libraries_are_told_apart_and_chosen_without_loading_them(monkeypatch):
    """Each that is loaded takes memory in every rank, and time before the first step."""
    from fsdpx.ext.half import onednn

    for cached in (libraries.load_blas_library, onednn.load_onednn):
        cached.cache_clear()
    with monkeypatch.context() as within:
        within.setattr(libraries, "load_shared_library", lambda path: pytest.fail(f"{path} is loaded"))
        assert tuning._make_blas_choice_cache_key()["libraries"] == blas.describe_library_files()


@needs("half", "launch")
def test_info_tells_what_was_chosen(rates):
    assert "nothing yet: the first job measures" in str(fsdpx.info())
    agree()
    text, today = str(fsdpx.info()), datetime.now(UTC)
    assert f"BLAS {blas.get_selected_library()}; measured" in text
    assert "GFLOP/s per thread" in text
    days = {f"{day:%Y-%m-%d}" for day in (today, today - timedelta(hours=1))}
    assert re.search(r"measured (\S+) \d\d:\d\d UTC", text)[1] in days


@pytest.fixture
def rates(monkeypatch):
    """A list of what each measurement finds: GFLOP/s of all libraries."""
    found = []

    def measure(count):
        found.append(dict.fromkeys(blas.list_available_blas_libraries(), 50.0))
        return found[-1]

    monkeypatch.setattr(blas, "measure_gflops_of_each_library", measure)
    monkeypatch.setattr(tuning, "_remeasured", set())
    return found


def test_again_measures_anew_once_in_a_process(monkeypatch, rates):
    agree()
    agree()
    assert len(rates) == 1
    monkeypatch.setenv("FSDPX_TUNE", "again")
    assert environment.read_environment().tune
    monkeypatch.setattr(tuning, "_remeasured", set())
    agree()
    assert len(rates) == 2
    agree()
    assert len(rates) == 2


@needs("plan")
def test_a_dry_run_takes_what_real_ranks_have_measured(monkeypatch):
    monkeypatch.setattr(blas, "measure_gflops_of_each_library", lambda count: pytest.fail("it was measured"))
    batch = ((4, 32), "float32")

    def units(**options):
        options |= {"ranks": 4, "ranks_per_host": 4, "loss": nn.MSELoss(), "optimizer": optim.SGD()}
        run = fsdpx.dry_run(model(), batch, batch, **options)
        return len(run.trainer.inspect.placement.layout.units)

    assert units(tune=True) == units(tune=False) == 1
    library = blas.get_selected_library()
    measured = {"library": library, "rates": {library: 50.0}}
    tuning.write_record("blas", tuning._make_blas_choice_cache_key(), measured)
    monkeypatch.setattr(tuning, "MULTI_RANK_GROUP_BYTES", 8192)
    assert units(tune=True) == 8
    assert units(tune=False) == 1


@pytest.mark.parametrize(("faster", "taken"), [(1.1, False), (1.5, True)])
def test_another_library_is_taken_only_if_clearly_faster(monkeypatch, faster, taken):
    usual = blas.get_selected_library()
    other = next(name for name in blas.list_available_blas_libraries() if name != usual)
    rates = dict.fromkeys(blas.list_available_blas_libraries(), 1.0) | {usual: 50.0, other: 50.0 * faster}
    monkeypatch.setattr(blas, "measure_gflops_of_each_library", lambda count: rates)
    assert (agree().blas == other) == taken
    assert (blas.get_selected_library() == other) == taken


def test_jobs_of_all_sizes_on_a_machine_compute_with_one_library(monkeypatch):
    """The same bits at any number of ranks, whatever a busy moment makes of a measurement."""
    if len(blas.list_available_blas_libraries()) < 2:
        pytest.skip("one library only")
    usual, names = blas.get_selected_library(), blas.list_available_blas_libraries()
    other = next(name for name in names if name != usual)
    for fastest in (other, usual):
        rates = {**dict.fromkeys(names, 1.0), fastest: 2.0}
        monkeypatch.setattr(blas, "measure_gflops_of_each_library", lambda count, rates=rates: rates)
        assert agree().blas == other
    monkeypatch.setenv("FSDPX_TUNE", "again")
    monkeypatch.setattr(tuning, "_remeasured", set())
    assert agree().blas == usual


def test_not_wanted_means_not_measured(cache, monkeypatch):
    monkeypatch.setattr(blas, "measure_gflops_of_each_library", lambda count: pytest.fail("it was measured"))
    assert agree(False).group_bytes == 1 << 20
    count_units(tune=False)
    monkeypatch.setenv("FSDPX_TUNE", "0")
    count_units()
    assert not list(cache.glob("measured-blas-*"))


def test_thread_ranks_have_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(blas, "measure_gflops_of_each_library", lambda count: pytest.fail("it was measured"))
    assert fsdpx.spawn(lambda comm: agree_on_tuning(comm, True, np).group_bytes, 2) == [1 << 20] * 2


def test_what_the_user_says_goes_before(monkeypatch):
    monkeypatch.setattr(tuning, "GROUP_BYTES", 8192)
    assert count_units(tune=True) == 8
    assert count_units(tune=True, group_bytes=4 * 4224) == 4
    assert count_units(tune=False) == 1


WHOLE, MORE = '{"key": KEY, "date": "", "value": %s}', '{"key": KEY, "date": "", "value": {GOOD, %s}}'
BAD = '"library": "no such library"', '"library": 3', '"rates": 3', '"rates": {"numpy": "1"}', '"more": 1'
SPOILT = [
    "", "{", "[]", "[" * 9999, '{"value": 3}', WHOLE % 3, WHOLE % "{}", '{"key": {}, "date": "", "value": {GOOD}}',
    '{"key": KEY, "value": {GOOD}}', *(MORE % bad for bad in BAD),
]  # fmt: skip


@pytest.mark.parametrize("text", few(SPOILT, 4))
def test_a_spoilt_file_is_measured_anew(cache, rates, text):
    agree()
    (file,) = cache.glob("measured-blas-*.json")
    key, good = json.loads(file.read_text())["key"], json.loads(file.read_text())["value"]
    name = next((name for name in good if f'"{name}"' in text), None)  # none of the names is there twice
    kept = {other: value for other, value in good.items() if other != name}
    file.write_text(text.replace("KEY", json.dumps(key)).replace("GOOD", json.dumps(kept)[1:-1]))
    assert load_blas_measurement() is None
    with pytest.warns(RuntimeWarning, match=f"^fsdpx: {file}: .*; it is ignored$"):
        again = agree()
    assert len(rates) == 2
    assert json.loads(file.read_text())["value"]["library"] == again.blas


def test_a_cache_that_cannot_be_written_means_measuring_again_and_is_named_once(tmp_path, monkeypatch, rates):
    assert tuning.describe_cache_location() == f"; the result is kept in {tmp_path / 'cache'}"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path / "file" / "below"))
    said = (
        r"measurements and compiled kernels cannot be kept in .*/file/below \(Not a directory\), so every start "
        "measures and compiles again, .*: set FSDPX_CACHE"
    )
    with pytest.warns(RuntimeWarning, match=said):
        assert agree().blas in blas.list_available_blas_libraries()
    agree()
    assert len(rates) >= 2
    assert (tuning.describe_cache_location(), load_blas_measurement()) == ("", None)


def test_other_machines_files_do_not_show(rates, monkeypatch):
    agree()
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert load_blas_measurement() is None


@pytest.mark.jobs
def test_run_retune_measures_anew_at_the_first_start_only(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\nfrom fsdpx.core.base import environment\nprint(environment.read_environment().retune, "
        "flush=True)\n"
        "os.kill(os.getpid(), 9) if os.environ['FSDPX_RESTART'] == '0' else None\n"
    )
    command = [sys.executable, "-m", "fsdpx", "run", "-n", "1", "--backoff", "0.1", "--retune", str(script)]
    environ = {name: value for name, value in os.environ.items() if name != "FSDPX_TUNE"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert re.findall(r"^(True|False)$", done.stdout, re.M) == ["True", "False"], done.stderr
