"""The memory of processes as dry runs count it."""

from functools import cache

import pytest

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.state.footprint import ProcessBytes
from fsdpx.errors import ConfigError
from fsdpx.plan import dry_run as module
from fsdpx.plan.dry_run import ProcessBaseline

MIB = 1 << 20

WIDTH, LAYERS = 256, 8

PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4


def dry(ranks, here, strategy):
    batch, model = ((16, WIDTH), "float32"), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    options = {"loss": nn.MSELoss(), "optimizer": optim.AdamW(), "strategy": strategy, "group_bytes": 0}
    return fsdpx.dry_run(model, batch, batch, ranks=ranks, ranks_per_host=here, **options)


@pytest.fixture
def forgotten(tmp_path, monkeypatch):
    """What was measured before is not known, and what the test measures is not known after it."""
    monkeypatch.setenv("FSDPX_CACHE", str(tmp_path))
    anew = cache(module.measure_or_load_baseline_memory.__wrapped__)
    monkeypatch.setattr(module, "measure_or_load_baseline_memory", anew)


def test_without_neighbors_nothing_is_shared():
    footprint = dry(4, 1, "fsdp").footprint
    assert "shared windows" not in footprint.parts
    assert footprint.rss == footprint.pss == footprint.host_bytes
    assert footprint.parts["interpreter and libraries"].rss > 20 * MIB


def test_full_parameters_are_on_a_host_once_and_gradients_are_read_by_all():
    run = dry(4, 4, "fsdp")
    windows, slab = run.footprint.parts["shared windows"], run.report.memory["working set"]
    assert windows.pss == pytest.approx(PARAMETERS / 4 + slab, rel=0.01)
    assert windows.rss == pytest.approx(PARAMETERS + slab * 1.75, rel=0.01)
    assert run.report.shared_parameters == (PARAMETERS, 4)
    assert "4 ranks of this host share the full parameters, 2.01 MiB; each counts 1/4" in str(run.report)
    assert "ranks of this host share" not in str(dry(4, 1, "fsdp").report)
    ddp = dry(4, 4, "ddp").footprint.parts["shared windows"]
    assert ddp.pss == pytest.approx(PARAMETERS, rel=0.01)
    assert ddp.rss == pytest.approx(PARAMETERS * 1.75, rel=0.01)


def test_hosts_share_by_themselves():
    apart, together = dry(4, 2, "fsdp"), dry(4, 4, "fsdp")
    assert apart.footprint.ranks_here == 2
    assert apart.footprint.host_bytes == 2 * apart.footprint.pss
    assert together.footprint.host_bytes == 4 * together.footprint.pss
    assert apart.report.memory["working set"] > together.report.memory["working set"], "pages travel between hosts"


def test_messages_instead_of_windows_share_nothing(monkeypatch):
    monkeypatch.setenv("FSDPX_NODE", "0")
    assert "shared windows" not in dry(4, 4, "fsdp").footprint.parts
    with pytest.raises(ConfigError, match="ranks_per_host=0: at least one rank is on a host"):
        dry(4, 0, "fsdp")


def test_what_is_alive_inside_an_action_is_counted():
    run = dry(1, 1, "fsdp")
    one = 16 * WIDTH * 4
    assert run.activations >= LAYERS * one
    assert run.activations < run.peak_heap_bytes <= run.activations + 6 * one


def test_a_model_that_takes_minutes_of_random_numbers_is_counted_without_any(monkeypatch):
    def init(*_):
        pytest.fail("initial values were made")

    class Own(nn.Linear):
        def specs(self):
            return {name: nn.ParameterSpec(spec.shape, init) for name, spec in super().specs().items()}

    model = nn.Sequential(Own(50_000, 50_000), nn.BatchNorm(50_000))
    batch = ((2, 50_000), "float32")
    run = fsdpx.dry_run(model, batch, batch, ranks=1, loss=nn.MSELoss(), optimizer=optim.SGD())
    assert run.report.memory["parameters"] > 10_000_000_000


def test_the_process_is_asked_once_and_what_it_said_is_kept(tmp_path, monkeypatch, forgotten):
    asked, answer = [], ProcessBaseline(1, 2, 3, 4)
    monkeypatch.setattr(module, "_measure_baseline_memory_in_child", lambda *how: asked.append(how) or answer)
    for _ in range(2):
        module.measure_or_load_baseline_memory.cache_clear()
        assert module.measure_or_load_baseline_memory(True, "openblas", 2) == answer
    assert asked == [(True, "openblas", 2)] * 2, "once to compile, once to measure"
    assert [file.name.startswith("measured-process-") for file in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize(("width", "found"), [(64, 2 * 64 * 64 * 4), (2048, 3 * MIB)])
def test_a_product_takes_what_was_measured_and_no_more_than_its_operands(width, found, monkeypatch):
    base, batch = ProcessBaseline(MIB, MIB, workspace=3 * MIB), ((32, width), "float32")
    monkeypatch.setattr(module, "measure_or_load_baseline_memory", lambda *_: base)
    options = {"ranks": 1, "loss": nn.MSELoss(), "optimizer": optim.SGD()}
    parts = fsdpx.dry_run(nn.Sequential(nn.Linear(width, width)), batch, batch, **options).footprint.parts
    assert parts["matrix products"] == ProcessBytes(found, found)
    assert parts["between activations"].rss == parts["activations"].rss // 16


def test_without_mpi_the_process_is_asked_without(monkeypatch, forgotten):
    answer = ProcessBaseline(1, 2)
    monkeypatch.setattr(module, "_measure_baseline_memory_in_child", lambda mpi, *_: "no MPI" if mpi else answer)
    assert module.measure_or_load_baseline_memory(True, "openblas", 2) == answer
    monkeypatch.setattr(module, "_measure_baseline_memory_in_child", lambda *_: "SyntaxError: wrong")
    with pytest.raises(ConfigError, match="the memory of a process cannot be measured here: SyntaxError: wrong"):
        module.measure_or_load_baseline_memory(False, "mkl", 3)
