"""strategy="auto": all ranks take what the plan of rank 0 finds, what the user fixed stays, and errors are alike."""

import re
from dataclasses import replace

import numpy as np
import pytest
from caches import set_own_cache
from commands import shown
from models import alike
from steps import X, gpt

import fsdpx
from fsdpx import data, nn, optim, spawn
from fsdpx.core.base.messages import format_count
from fsdpx.errors import ConfigError
from fsdpx.plan import Machine, measuring
from fsdpx.plan.auto import MACHINE_FILE
from fsdpx.plan.measuring import format_machine_file

PLAIN = {"batch": None, "memory": None}
NARROW = {"mesh": fsdpx.Mesh(), "microbatches": 2}
"""Options that are fixed in tests that do not depend on the search result; the search then takes a third of the
time."""
TOKENS = np.arange(128).reshape(16, 8) % 64


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where no machine was measured."""
    monkeypatch.chdir(tmp_path)


def auto(comm, blocks=2, **options):
    chosen = {"strategy": "auto", "batch": (X, X), "memory": "1GiB", "tune": False} | options
    return gpt(blocks).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(), comm=comm, **chosen)


def planned(size, **options):
    """What each rank says of its plan."""
    return spawn(lambda comm: auto(comm, **NARROW, **options).report().planned, size)


def stepped(trainer):
    size, rank = trainer.data_group.size, trainer.data_group.rank
    mine = slice(16 * rank // size, 16 * (rank + 1) // size)
    return [trainer.step(TOKENS[mine], TOKENS[mine]) for _ in range(2)]


def test_ranks_take_what_the_plan_finds_and_train(capsys):
    options = {"machine": "ethernet-10g", "recompute": "all"}
    found = fsdpx.plan(gpt(), batch=(X, X), ranks=3, memory="1GiB", precision=None, **options)
    best = found.best_candidate

    def body(comm):
        with auto(comm, **options) as trainer, auto(comm, **PLAIN, **best.options) as same:
            placed, asked = trainer.inspect.placement, same.inspect.placement
            assert (placed.sharding, placed.axes.mesh) == (asked.sharding, asked.axes.mesh)
            return trainer.report().planned, stepped(trainer)

    reports = spawn(body, 3)
    assert len({words for words, _ in reports}) == 1
    words, losses = reports[0]
    assert words.startswith(f"{best.python_text}; predicted: {best.prediction.seconds:.4g} s per step and ")
    assert f"on 3 ranks of ethernet-10g; the fastest of {len(found.candidates)} configurations within 1.00 GiB" in words
    assert capsys.readouterr().err.count(f"fsdpx: strategy='auto': {words}\n") == 1
    alone = spawn(lambda comm: stepped(auto(comm, strategy="ddp", **PLAIN)), 1)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)


def test_what_fits_is_chosen_and_what_is_fixed_stays():
    def body(comm):
        options = {"recompute": "all", "blocks": 4}
        wide = auto(comm, **options).inspect.placement
        tight = auto(comm, **options, memory="600KiB").inspect.placement
        chosen = {"mesh": fsdpx.Mesh(pipe=2), "schedule": "gpipe", "precision": "float64", "recompute": "all"}
        return wide, tight, auto(comm, **chosen).inspect.placement

    wide, tight, fixed = spawn(body, 2)[0]
    for words in ("mesh=fsdpx.Mesh(pipe=2)", "recompute='all'", "precision='float64'"):
        assert words in fixed.options.planned.partition(";")[0]
    assert [place.sharding.full_params == "use" or place.axes.pipe.size > 1 for place in (wide, tight)] == [False, True]
    assert fixed.axes.mesh == fsdpx.Mesh(pipe=2).fill_from_strategy("fsdp", 2)
    assert (fixed.options.schedule, fixed.options.recompute.every, fixed.formats.master) == ("gpipe", 1, np.float64)


def test_a_measured_machine_is_taken_from_where_the_job_is_started():
    MACHINE_FILE.write_text(format_machine_file(replace(Machine.load("ethernet-10g"), name="ours")))
    assert all("on 2 ranks of ours (machine.toml)" in words for words in planned(2))
    MACHINE_FILE.unlink()
    laptops = "on 2 ranks of laptops (there is no machine.toml, which python -m fsdpx measure-machine writes)"
    assert all(laptops in words for words in planned(2))


def test_measure_machine_writes_where_plans_look(monkeypatch, tmp_path):
    quick = {"ROUNDS": 1, "ROUND_SECONDS": 0.001, "SHORT_ROUND_SECONDS": 1e-6, "LAYER_COUNTS": (1, 3)}
    for name, value in (quick | {"SHORT": 1 << 14, "LONG": 1 << 16}).items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring.Processors, "large", 128)
    monkeypatch.setattr(measuring.Processors, "block", 1 << 18)
    monkeypatch.setenv("FSDPX_TUNE", "1")
    set_own_cache(monkeypatch, tmp_path / "cache")
    said = shown("measure-machine --name ours")
    found = Machine.load(MACHINE_FILE)
    assert found.name == "ours"
    assert found.disk is not None
    assert said.startswith("written: machine.toml; it begins with\n\n# Measured on ")
    (words,) = planned(1)
    assert words.count("on 1 rank of ours (machine.toml)") == 1


def test_without_a_limit_the_free_memory_of_the_host_is_it():
    assert all("GiB per rank" in words.partition("; the fastest of")[2] for words in planned(2, memory=None))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "64KiB"}, r"nothing fits into 64\.00 KiB per rank: on 2 the least is .*parameters"),
        ({"machine": "nowhere"}, "machine='nowhere' is none of"),
        ({"batch": None},
         r"strategy='auto' plans a step of a batch that it must know: say batch=\(\(\(64, 1024\), 'int64'"),
        ({"batch": (X, ((8, 8), "int64"))},
         r"batch=\(\(\(16, 8\), 'int64'\), \(\(8, 8\), 'int64'\)\): the shape and dtype of inputs and targets"),
        ({"strategy": "fsdp", "batch": None},
         "memory='1GiB': a plan needs it, and nothing is planned; say strategy='auto'$"),
    ],
)  # fmt: skip
def test_the_same_error_on_all_ranks(options, says):
    assert re.match(f"ConfigError: {says}", alike(2, lambda comm: auto(comm, **options)), re.DOTALL)


def test_a_trainer_without_optimizer_has_no_plan():
    with pytest.raises(ConfigError, match=r"^strategy='auto': this trainer was made without optimizer, for prediction"):
        nn.Linear(2, 2).as_distributed(loss=nn.MSELoss(), strategy="auto", batch=(X, X))


def test_ranks_that_ask_for_different_plans():
    said = alike(2, lambda comm: auto(comm, memory="1GiB" if comm.rank else "2GiB"))
    assert said == "ConfigError: ranks differ in memory: rank 0 has 2GiB, rank 1 has 1GiB"
    said = alike(2, lambda comm: auto(comm, **({} if comm.rank else {"strategy": "fsdp", **PLAIN})))
    assert said.startswith("ConfigError: ranks differ in strategy='auto' (")


def test_arrays_are_a_batch_and_run_files_can_say_all_of_it():
    same = {"model": gpt(), "loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW()}
    auto_options = {"strategy": "auto", "memory": "1GiB", **NARROW}
    plan = {**same, "distribute": {**auto_options, "batch": [[[16, 8], "int64"]] * 2}}
    loaded = {**same, "distribute": auto_options, "data": data.ArrayDataset(TOKENS, TOKENS)}
    loaded["loader"] = {"batch_size": 16}

    def body(comm):
        made = [fsdpx.ModelBuilder(each).build_trainer(comm) for each in (plan, loaded)]
        made.append(auto(comm, batch=(TOKENS, TOKENS), **NARROW))
        return {trainer.report().planned for trainer in made}

    assert len(set.union(*spawn(body, 2))) == 1
    with pytest.raises(ConfigError, match="plans a step of a batch that it must know"):
        fsdpx.ModelBuilder({**loaded, "loader": {}}).build_trainer()


def test_elastic_ranks_begin_by_the_plan():
    def body(comm):
        made = auto(comm, elastic=True, **NARROW)
        return made.report().planned, made.step(TOKENS, TOKENS)

    (words, loss), other = spawn(body, 2)
    assert other == (words, loss)
    assert "on 2 ranks of laptops" in words
    plain = spawn(lambda comm: auto(comm, strategy="ddp", **PLAIN).step(TOKENS, TOKENS), 1)
    assert loss == pytest.approx(plain[0], rel=1e-5)


def test_reports_and_dry_runs_state_the_choice():
    part, options = ((8, 8), "int64"), {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(), **NARROW}
    options |= {"strategy": "auto", "memory": "1GiB", "batch": (X, X)}
    run = fsdpx.dry_run(gpt(), part, part, ranks=2, rank=1, **options)
    assert f"\nplanned: {run.report.planned}\n" in str(run.report)
    assert "on 2 ranks of laptops" in run.report.planned
    (summary,) = spawn(lambda comm: auto(comm, **NARROW).inspect.gather_summary(), 1)
    assert f"\nplanned: {summary.reports[0].planned}\n" in str(summary)
    assert summary.to_json()[0]["planned"] == summary.reports[0].planned


@pytest.mark.world
@pytest.mark.mpi
def test_processes_train_by_the_plan_of_rank_0(world):
    if world.size > 3:
        pytest.skip("each rank searches: two and three ranks show that they use one plan")
    with auto(world, **NARROW) as trainer, auto(world, strategy="ddp", **PLAIN) as plain:
        words = world.all_gather_object(trainer.report().planned)
        assert len(set(words)) == 1
        assert f"on {format_count(world.size, 'rank')} of laptops" in words[0]
        np.testing.assert_allclose(stepped(trainer), stepped(plain), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"^nothing fits into 64\.00 KiB per rank"):
        auto(world, memory="64KiB")
