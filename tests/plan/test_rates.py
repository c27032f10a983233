"""Days and costs: intervals and shares that are published, or that simulated failures give."""

import json
import random
from dataclasses import replace
from math import exp, inf, sqrt

import pytest

import fsdpx
from fsdpx import nn
from fsdpx.__main__ import main
from fsdpx.errors import ConfigError
from fsdpx.plan import Compute, Level, Machine, predict
from fsdpx.plan.machine import Storage
from fsdpx.plan.rates import interval, useful

FLAT = Machine("flat", (Level("host", 0.0, 1e9),), Compute({"float32": 1e12}, 1e30, cores=4, watts=50.0))
WIDTH = 64
X = ((16, WIDTH), "float32")


def chain() -> nn.Layer:
    return nn.Chain(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def test_the_interval_is_that_of_young_where_checkpoints_are_quick() -> None:
    assert interval(0.01, 1e6) == pytest.approx(sqrt(2 * 0.01 * 1e6), rel=1e-3)
    assert interval(3.0, 1.0) == 1.0  # Daly's for checkpoints that take longer than twice the time to a failure


@pytest.mark.parametrize(("save", "mtbf"), [(120.0, 11160.0), (10.0, 11160.0), (600.0, 3600.0)])
def test_no_other_interval_is_better(save: float, mtbf: float) -> None:
    best = interval(save, mtbf)
    most = max(useful(best * part, save, 30.0, mtbf) for part in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0))
    assert useful(best, save, 30.0, mtbf) > most


@pytest.mark.parametrize(("save", "lost"), [(120.0, 0.147), (10.0, 0.042), (0.2, 0.006)])
def test_what_failures_cost_to_first_order(save: float, lost: float) -> None:
    """sqrt(2 save / mtbf), at 3.1 h between failures, as in the Llama 3 job."""
    assert 1 - useful(interval(save, 11160.0), save, 1e-9, 11160.0) == pytest.approx(lost, rel=0.12)


def test_the_useful_share_is_what_simulated_failures_leave() -> None:
    save, restore, mtbf, work = 60.0, 200.0, 3000.0, 3e6
    between, draw = interval(save, mtbf), random.Random(3)
    time = done = 0.0
    while done < work:  # failures strike checkpoints and restores as well
        left = draw.expovariate(1 / mtbf)
        whole = int(left // (between + save))
        done += whole * between
        time += left
        while (again := draw.expovariate(1 / mtbf)) < restore:
            time += again
        time += restore
    assert done / time == pytest.approx(useful(between, save, restore, mtbf), rel=0.03)


def test_failures_that_let_nothing_end() -> None:
    """More come than a checkpoint takes: no steps a day, and no number for costs without end."""
    made = predict(chain(), (X, X), ranks=2, machine=FLAT)
    assert useful(interval(0.0, 9.0), 0.0, 9.0, 9.0) == pytest.approx(exp(-1))
    day = made.rates(mtbf=1e-3, save=60.0)
    assert (day.steps, day.hours) == (0.0, inf)
    assert json.loads(json.dumps(day.as_json(), allow_nan=False))["hours"] is None
    with pytest.raises(ConfigError, match=r"^save='60': seconds are needed, a number above 0$"):
        made.rates(mtbf=1e6, save="60")


def test_a_checkpoint_is_shared_out_as_ranks_write_it() -> None:
    """Parameters and two moments, whatever the strategy; replicas write an even part each."""
    size = 4 * (WIDTH * WIDTH + WIDTH) * 3 * 4
    for strategy in ("ddp", "fsdp"):
        found = predict(chain(), (X, X), ranks=4, machine=FLAT, strategy=strategy)
        checkpoint = found.checkpoint()
        assert ([one.written.nbytes for one in checkpoint.each], checkpoint.nbytes) == ([size // 4], size)
    mesh = fsdpx.Mesh(pipe=2, shard=1, replica=2)
    found = predict(chain(), (X, X), ranks=4, machine=FLAT, mesh=mesh, microbatches=2)
    assert sum(one.written.nbytes for one in found.checkpoint().each) * 2 == size


def test_seconds_of_a_checkpoint_are_those_of_the_disk() -> None:
    size = 4 * (WIDTH * WIDTH + WIDTH) * 3 * 4
    compute = replace(FLAT.compute, mtbf=4e6)
    alone, together = (
        predict(chain(), (X, X), ranks=4, machine=replace(FLAT, compute=compute, disk=disk)).rates()
        for disk in (Storage(1e3, 2e3), Storage(1e3, 2e3, total=2e3))
    )
    assert (alone.save, alone.restore) == (size / 4 / 1e3, (size / 4 + size) / 2e3)  # a quarter of digests, and all
    assert (together.save, together.restore) == (size / 2e3, 5 * size / 2e3)
    assert alone.mtbf == 1e6
    assert alone.interval == interval(alone.save, 1e6)
    assert together.useful < alone.useful < 1


def test_what_a_day_gives_and_costs() -> None:
    found = predict(chain(), (X, X), ranks=4, machine=FLAT)
    rates = found.rates()
    assert rates.steps == pytest.approx(86400 / found.seconds)
    assert rates.samples == pytest.approx(16 * rates.steps)
    assert (rates.useful, rates.mtbf, rates.interval, rates.unit) == (1.0, None, None, "core-hours")
    assert rates.hours == pytest.approx(1000 * found.seconds * 4 * 4 / 3600)
    assert rates.joules == pytest.approx(1000 * found.seconds * 4 * 50)
    half = found.rates(mtbf=4 * 3600.0, save=600.0, restore=900.0)
    assert half.hours == pytest.approx(rates.hours / half.useful)
    assert half.steps == pytest.approx(rates.steps * half.useful)
    assert str(half).splitlines()[1].startswith("a failure each 1 h; a checkpoint takes 600 s and is best made after")
    assert predict(chain(), (X, X), ranks=1, machine="h100-dgx-400g").rates(save=1.0).unit == "GPU-hours"


def test_numbers_that_are_no_seconds() -> None:
    found = predict(chain(), (X, X), ranks=4, machine=FLAT)
    with pytest.raises(ConfigError, match=r"mtbf=3600.0: machine 'flat' has no \[disk\], so say how long a checkpoint"):
        found.rates(mtbf=3600.0)
    with pytest.raises(ConfigError, match=r"save=-1: seconds are needed, a number above 0"):
        found.rates(save=-1)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan mlp --ranks 4 --machine laptop --batch 64 --most 2 --mtbf 1e6 --save 5 --restore 60".split()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "\na day: " in text
    assert "a failure each 69.4 h; a checkpoint takes 5 s and is best made after each" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rates"]
    assert (found["mtbf"], found["save"], found["restore"]) == (2.5e5, 5.0, 60.0)
    assert found["joules"] > 0
