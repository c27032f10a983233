"""Run files: what they build is what the same calls build, and what cannot be is said with its place."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from bits import bits

import fsdpx
from fsdpx import nn, optim
from fsdpx.__main__ import main
from fsdpx.errors import ConfigError

ROOT = Path(__file__).parents[2]

PLAN = {
    "model": {"make": "Sequential", "args": [{"make": "Linear", "args": [4, 8], "bias": False}, {"make": "GELU"}]},
    "loss": {"make": "MSELoss"},
    "optimizer": {
        "make": "AdamW",
        "lr": {"make": "WarmUp", "steps": 4, "schedule": 0.1},
        "groups": {"use": "no_decay"},
    },
    "distribute": {"mesh": "replica=1,shard=2", "compression": {"make": "PowerSGD", "rank": 2}, "group_bytes": 0},
}


def test_a_plan_trains_as_the_same_calls_do():
    r = np.random.default_rng(0)
    x, y = r.standard_normal((6, 4)), r.standard_normal((6, 8))

    def both(comm):
        built = fsdpx.ModelBuilder(PLAN).build_trainer(comm)
        called = fsdpx.distribute(
            nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU()),
            loss=nn.MSELoss(),
            optimizer=optim.AdamW(lr=optim.schedules.WarmUp(4, 0.1), groups=optim.no_decay),
            comm=comm, mesh=fsdpx.Mesh(replica=1, shard=2), compression=fsdpx.PowerSGD(2), group_bytes=0,
        )  # fmt: skip
        for trainer in (built, called):
            for _ in range(2):
                trainer.step(x[comm.rank :: 2], y[comm.rank :: 2])
        assert built.inspect.lr == called.inspect.lr == pytest.approx(0.075)
        return bits(built), bits(called)

    for built, called in fsdpx.spawn(both, 2):
        assert built == called


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modle": 1}, "plan: there is no section [modle]; did you mean 'model'?"),
        ({"loss": "MSELoss"}, 'plan: [loss] says nothing to make: make = "Name"'),
        ({"optimizer": {"make": "AdamV"}}, "plan: [optimizer] there is no 'AdamV' in fsdpx; did you mean 'Adam.*'?"),
        ({"optimizer": {"make": "Qqq"}},
         "plan: [optimizer] there is no 'Qqq' in fsdpx; names of your own are written module:name"),
        ({"optimizer": {"make": "SGD", "lrr": 1}},
         "plan: [optimizer] SGD(lrr=...): no such option; did you mean 'lr'?"),
        ({"model": {"make": "Sequential", "args": [{"make": "Linear"}]}},
         "plan: [model.args[0]] Linear: missing a required argument: 'in_features'"),
        ({"model": {"make": "no.such:Layer"}}, "plan: [model] no.such:Layer: No module named 'no'"),
        ({"model": {"make": "math:layer"}}, "plan: [model] math:layer: module 'math' has no attribute 'layer'"),
        ({"distribute": {"stratgy": "ddp"}},
         "plan: [distribute] distribute(stratgy=...): no such option; did you mean 'strategy'?"),
        ({"distribute": 3}, "plan: distribute is a section: write [distribute] and its values below"),
        ({"model": 3}, 'plan: [model] says nothing to make: make = "Name"'),
        ({"loss": object}, "loss=<class 'object'>: an object is needed.*"),
        ({"model": {"make": "Linear", "args": 3}}, "plan: [model] args = 3: a list is needed, args = [3]"),
        ({"model": {"make": ["Linear"]}}, "plan: [model] ['Linear'] is no name"),
        ({"optimizer": {"make": "SGD", "groups": {"make": "no_decay"}}},
         'plan: [optimizer.groups] no_decay is no function: use = "no_decay"'),
        ({"optimizer": {"make": "SGD", "groups": {"use": "no_decay", "lr": 1}}},
         'plan: [optimizer.groups] lr: use takes nothing; make = "Name" is a call'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_its_place(change, said):
    with pytest.raises(ConfigError) as error:
        fsdpx.ModelBuilder({**PLAN, "distribute": {}, **change}).build_trainer()
    assert re.fullmatch(re.escape(said).replace(r"\.\*", ".*"), str(error.value)), error.value


def test_sections_that_are_missing():
    with pytest.raises(ConfigError, match=re.escape("plan: the section [optimizer] is missing")):
        fsdpx.ModelBuilder({name: PLAN[name] for name in ("model", "loss")})
    trainer = fsdpx.ModelBuilder({**PLAN, "distribute": {}}).build_trainer()
    with pytest.raises(ConfigError, match=re.escape("plan: the section [data] is missing")):
        fsdpx.ModelBuilder(PLAN).make_loaders(trainer)


def test_changes_of_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nmake = "GELU"\n[loss]\nmake = "MSELoss"\n[optimizer]\nmake = "SGD"\nlr = 0.1\n')
    changes = ["optimizer.lr=0.5", "distribute.strategy=ddp", "fit.validation.every = 3"]
    plan = fsdpx.ModelBuilder.from_file(file, changes).plan
    assert plan["optimizer"] == {"make": "SGD", "lr": 0.5}
    assert plan["distribute"] == {"strategy": "ddp"}
    assert plan["fit"] == {"validation": {"every": 3}}
    changes = ["model.a=True", "model.b= no", "model.c=Off", "model.d=true", "model.e='no'", "model.f=none"]
    plan = fsdpx.ModelBuilder.from_file(file, changes).plan["model"]
    assert plan == {"make": "GELU", "a": True, "b": False, "c": False, "d": True, "e": "no", "f": "none"}
    for change, said in (("lr=3", "a change is written section.key=value"), ("optimizer.lr.x=1", "lr is a value")):
        with pytest.raises(ConfigError, match=said):
            fsdpx.ModelBuilder.from_file(file, [change])
    with pytest.raises(ConfigError, match="no run file can be read there: No such file or directory"):
        fsdpx.ModelBuilder.from_file(tmp_path / "other.toml")
    file.write_text("[model\n")
    with pytest.raises(ConfigError, match="this is not TOML: "):
        fsdpx.ModelBuilder.from_file(file)


def test_train_runs_the_file_of_the_page_and_goes_on(tmp_path, monkeypatch, capsys):
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "run-file.md").read_text(), re.S)
    assert (ROOT / "launch" / "run.toml").read_text().endswith(block[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the curve is drawn in tests/examples
    text = np.random.default_rng(0).integers(32, 127, 6000, dtype=np.uint8).tobytes()
    Path("docs").mkdir()
    Path("docs", "some.md").write_bytes(text)
    small = ["model.d_model=16", "model.seq_len=8", "data.seq_len=8", "validation.seq_len=8", "loader.batch_size=4"]
    line = ["train", str(ROOT / "launch" / "run.toml"), "--set", *small, "fit.every=4", "fit.validation_batches=1"]
    fsdpx.finalize()
    try:
        assert main([*line, "fit.steps=4"]) == 0
        assert re.search(r"\n4 steps, [\d,]+ samples/s, training loss 5\.\d+, validation", capsys.readouterr().out)
        assert main([*line, "fit.steps=6", "--resume"]) == 0
        assert "\n2 steps, " in capsys.readouterr().out
        (folder,) = Path("runs").iterdir()
        assert folder.name.startswith("run-")
        for name in ("config.json", "report.html", "metrics.jsonl", "model/model.safetensors", "checkpoints/step-6"):
            assert (folder / name).exists(), name
        assert main([*line, "fit.validation_batches=0"]) == 2
        assert "[fit] validation_batches=0: a whole number, at least 1" in capsys.readouterr().err
        assert main(["train", "run.toml"]) == 2
        assert "fsdpx train: run.toml: no run file can be read there" in capsys.readouterr().err
    finally:
        fsdpx.finalize()


def test_objects_stand_for_themselves():
    plan = {"model": nn.Linear(3, 2), "loss": nn.CrossEntropyLoss(), "optimizer": optim.SGD(lr=0.5)}
    builder = fsdpx.ModelBuilder(plan)
    assert builder.make_model() is plan["model"]
    assert builder.build_trainer().inspect.placement.optimizer is plan["optimizer"]
    with pytest.raises(ConfigError, match=r"plan: \[loss\] says nothing to make"):
        fsdpx.ModelBuilder({**plan, "loss": 3}).build_trainer()


def test_tables_in_tuples_are_calls() -> None:
    model = {"make": "Sequential", "args": ({"make": "Linear", "args": (3, 4)}, {"make": "ReLU"})}
    optimizer = {"make": "Adam", "betas": (0.8, 0.9)}
    builder = fsdpx.ModelBuilder({**PLAN, "model": model, "optimizer": optimizer, "distribute": {}})
    assert repr(builder.make_model()) == repr(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    assert builder.build_trainer().inspect.placement.optimizer.betas == (0.8, 0.9)


def test_modules_and_losses_of_pytorch_stand_for_themselves() -> None:
    torch = pytest.importorskip("torch")
    plan = {"model": torch.nn.Linear(3, 2), "loss": torch.nn.MSELoss(), "optimizer": optim.SGD(lr=0.1)}
    table = {**plan, "model": {"make": "torch.nn:Linear", "args": [3, 2]}, "loss": {"make": "torch.nn:MSELoss"}}
    for one in (plan, table):
        builder = fsdpx.ModelBuilder(one)
        assert isinstance(builder.make_model(), nn.Layer)
        assert np.isfinite(builder.build_trainer().step(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)))
    with pytest.raises(ConfigError, match=r"torch.optim.SGD: use fsdpx.optim.SGD"):
        fsdpx.ModelBuilder({**plan, "optimizer": torch.optim.SGD(plan["model"].parameters(), lr=0.1)}).build_trainer()
