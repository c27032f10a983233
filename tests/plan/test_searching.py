"""What is asked for: the quickest that fits, and errors where nothing does."""

import json
import re
import tomllib
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from commands import command, refused, shown
from steps import X, gpt, steps_of_a100s

import fsdpx
from fsdpx import Mesh, nn
from fsdpx.core.base.config import PRESETS_BY_MEMORY
from fsdpx.core.base.messages import format_bytes
from fsdpx.errors import ConfigError
from fsdpx.launch import plan as plan_command
from fsdpx.plan import Machine, NetworkLevel, predict, searching
from fsdpx.plan.lower_bound import compute_lower_bound_seconds
from fsdpx.plan.machine import DiskSpeed
from fsdpx.plan.max_depth import copy_model_with_block_count
from fsdpx.plan.prediction import predict_step_cost
from fsdpx.plan.printed import wrap_call_into_lines
from fsdpx.plan.result import MAX_SHOWN
from fsdpx.plan.searching import CLOSE_FACTOR
from fsdpx.plan.world_step import make_world_step

SIX = ((6, 6), "int64")
ETHERNET = Machine.load("ethernet-10g")
UNLIMITED = replace(ETHERNET, compute=replace(ETHERNET.compute, capacity=None))
"""Nothing is sought that is as large as its memory allows."""


def options_of(text):
    """The options that a plan has written in Python."""
    return eval(f"dict({text})", {"fsdpx": fsdpx})


def flat(plan):
    """What it prints, in one line."""
    return " ".join(str(plan).split())


@pytest.fixture(scope="module")
def found():
    return fsdpx.plan(gpt(), batch=(X, X), ranks=4, machine="ethernet-10g", memory="1GiB")


def test_the_quickest_comes_first_and_is_what_predict_says(found):
    seconds = [one.prediction.seconds for one in found.candidates]
    assert seconds == sorted(seconds)
    assert found.best_candidate.prediction.seconds == min(seconds)
    again = predict(gpt(), (X, X), ranks=4, machine="ethernet-10g", **found.best_candidate.options)
    assert again.seconds == pytest.approx(found.best_candidate.prediction.seconds)
    assert all(one.prediction.memory <= 1 << 30 for one in found.candidates)
    assert {one.options.get("recompute") for one in found.candidates} == {None, "all"}


def test_the_line_of_python_is_the_winner(found):
    assert options_of(found.best_candidate.python_text) == dict(found.best_candidate.options)
    assert found.python_line == (
        "trainer = model.as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(), "
        f"{found.best_candidate.python_text})"
    )


def test_the_lines_for_a_run_file_ask_for_the_same(found):
    wide = next(one for one in found.candidates if one.summary == "ddp + pipe")
    plan = tomllib.loads(replace(found, candidates=(wide,)).distribute_section_text)
    assert plan["distribute"] | {"mesh": Mesh.parse(plan["distribute"]["mesh"])} == dict(wide.options)
    other = replace(wide, options={"strategy": fsdpx.Sharding(), "recompute": 2})
    words = replace(found, candidates=(other,)).distribute_section_text
    assert words == f"[distribute]\n# strategy={fsdpx.Sharding()!r}\nrecompute = 2"


def test_what_it_prints(found):
    text = str(found)
    best = found.best_candidate
    held = f"{format_bytes(best.prediction.memory)} of 1.00 GiB per rank: it fits"
    assert text.startswith(f"{best.label} on 4 ranks: {best.prediction.seconds:.3g} s per step, {held}\nnot measured: ")
    assert "\nbatch of 16 samples on 4 ranks of ethernet-10g\n" in text
    assert "the fastest of each kind" in text
    assert "the largest that fits with these options: a global batch of" in text
    assert "\nsearched " in text
    assert found.distribute_section_text in text
    assert wrap_call_into_lines(found.python_line) in text
    assert {"ddp", "fsdp", "ddp + tensor", "ddp + pipe", "pipe"} <= found.best_by_kind.keys()
    real = best.prediction
    assert real.memory + (66 << 20) <= real.process_memory_bytes < real.memory * 17 // 16 + (67 << 20)
    assert "\nwith interpreter, libraries and MPI a process takes " in text
    assert json.loads(json.dumps(found.to_json()))["found"][0]["seconds"] == found.best_candidate.prediction.seconds


def test_the_largest_batch_is_found_by_doubling(found):
    assert found.largest_batch == 16 * 64  # where it stops


def test_a_model_without_a_longest_sequence_says_how_long_they_may_be():
    """Doubled until they do not fit; a GPT has positions of its own."""
    llama, options = nn.Llama(64, 32, 1, 2, 8), {"strategy": "fsdp", "mesh": None, "microbatches": 2}
    made = fsdpx.plan(llama, batch=(X, X), ranks=2, machine="laptop", memory="1MiB", **options)
    (length,) = made.longest
    assert 8 <= length < 8 * 64
    by = options_of(made.limits["size"])
    for chosen, lengths in ((by, (length, 2 * length)), (made.best_candidate.options, (2 * length,))):
        more = {**chosen, "ranks": 2, "machine": "laptop"}
        fits = [predict(llama, (((16, n), "int64"),) * 2, **more).memory <= 1 << 20 for n in lengths]
        assert fits == [True, False][-len(lengths) :]
    assert f"sequences of {length}" in flat(made)
    assert f"a global batch of {made.largest_batch} samples" in flat(made)
    assert fsdpx.plan(gpt(1), batch=(X, X), ranks=2, machine="laptop", most=1, **options).longest == ()


def test_time_and_memory_against_ranks(found):
    ranks = [one.mesh.size for one in found.scaling]
    assert ranks == [1, 2, 4, 8, 16]  # as many as there are samples
    assert found.best_candidate.prediction in found.scaling
    options = {name: value for name, value in found.best_candidate.options.items() if name != "mesh"}
    eight = predict(gpt(), (X, X), ranks=8, machine="ethernet-10g", **options)
    assert found.scaling[3].seconds == eight.seconds
    assert found.scaling[3].memory == eight.memory
    row = next(line for line in str(found).splitlines() if line.startswith("8  "))
    assert row.split()[1:3] == [f"{eight.seconds:.4g}", "s"]
    assert f"{found.scaling[0].seconds / eight.seconds / 8:.0%}" in row
    assert [one["ranks"] for one in found.to_json()["scaling"]] == ranks


def test_bounds_rule_out_what_would_change_nothing(monkeypatch):
    """What is shown, and all that is close to it, is that of a search without bounds; none takes less than its own."""
    x, model = ((4, 8), "int64"), gpt()
    options = {"batch": (x, x), "ranks": 2, "machine": UNLIMITED, "strategy": "zero1"}
    made = fsdpx.plan(model, **options)
    monkeypatch.setattr(searching._Search, "_compute_step_time_limit_to_show", lambda *_: inf)
    whole = fsdpx.plan(model, **options)

    def close(plan):
        far = CLOSE_FACTOR * plan.best_candidate.prediction.seconds
        shown = [one for at, one in enumerate(plan.candidates) if at < MAX_SHOWN or one.prediction.seconds <= far]
        return {one.python_text: ((of := one.prediction).seconds, of.memory, of.bytes_sent) for one in shown}

    assert close(made) == close(whole)
    assert not whole.slow
    for one in whole.candidates:
        step = make_world_step(model, (x, x), 2, False, one.options)
        assert 0 < compute_lower_bound_seconds(step, UNLIMITED) <= one.prediction.seconds
    seconds = {one.python_text: one.prediction.seconds for one in whole.candidates}
    assert all(least <= seconds.get(words, inf) for words, least in made.slow)
    assert {words.partition("schedule=")[2] for words, _ in made.slow} == {"", "'interleaved'", "'zb-h1'"}
    counts = list(map(int, re.findall(r"\d+(?= configurations:| predicted,| ruled out by| cannot run)", flat(made))))
    assert counts[0] == sum(counts[1:])
    assert counts[1:] == [counts[1], len(made.slow), len(made.rejected)]
    assert f"ruled out, since their layers alone take longer: {len(made.slow)}, such as strategy=" in flat(made)
    assert made.to_json()["slow"] == [list(one) for one in made.slow]


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("1f1b", None), ("gpipe", None), ("interleaved", None), ("zb-h1", None), ("zb-h2", None), ("zbv", None),
     ("1f1b", "all"), ("interleaved", "all"), ("zb-h1", "all"), ("zbv", "all")],
)  # fmt: skip
def test_a_bound_of_a_pipe_counts_the_way_through_it(schedule, recompute):
    """Where messages take no time, and layers take unequal ones, it is nearly the step."""
    x, laptop = ((32, 128), "int64"), Machine.load("laptop")
    machine = replace(laptop, levels=(NetworkLevel("host", 0.0, 1e30),))
    options = {"mesh": Mesh(replica=1, pipe=4), "microbatches": 8, "strategy": "ddp", "schedule": schedule}
    step = make_world_step(nn.GPT(64, 64, 10, 2, 128), (x, x), 4, False, options | {"recompute": recompute})
    assert 0.85 < compute_lower_bound_seconds(step, machine) / predict_step_cost(step, machine).seconds <= 1


def test_many_configurations_are_ranked_by_few_predictions(found):
    predicted = int(re.search(r"; (\d+) predicted, \d+ ruled out by a bound, \d+ cannot run; ", found.search_space)[1])
    assert predicted >= len(found.candidates)
    assert int(found.search_space.split()[0]) >= 180 > 4 * predicted


def test_at_most_so_many_are_predicted():
    made = fsdpx.plan(gpt(1), batch=(X, X), ranks=2, machine=UNLIMITED, mesh=None, most=3)
    assert len(made.candidates) == 3
    assert "most=3 others were predicted before it" in dict(made.rejected).values()


@pytest.mark.parametrize("make", [nn.GPT, nn.Llama])
def test_the_deepest_model_that_fits(make):
    """As the model that is made with so many layers; one more does not fit."""
    options = {"ranks": 4, "machine": "laptop", "strategy": "fsdp", "mesh": None, "microbatches": 2}
    made = fsdpx.plan(make(64, 32, 2, 2, 8), batch=(X, X), memory="1MiB", **options)
    blocks, count = made.deepest
    assert 2 < blocks < 32
    models, by = [make(64, 32, n, 2, 8) for n in (blocks, blocks + 1)], options_of(made.limits["depth"])
    assert [predict(model, (X, X), **options | by).memory <= 1 << 20 for model in models] == [True, False]
    assert predict(models[1], (X, X), **options | made.best_candidate.options).memory > 1 << 20
    assert count == sum(spec.size for spec in models[0].specs().values())
    assert f"{blocks} blocks of this width ({count:,} parameters)" in flat(made)
    assert made.to_json()["deepest"] == {"blocks": blocks, "parameters": count}


def test_the_largest_is_sought_with_all_strategies_and_recomputing():
    """Not only as the quickest trains: no other choice takes a block more."""
    options = {"ranks": 4, "machine": "ethernet-10g", "mesh": None}
    made = fsdpx.plan(gpt(), batch=(X, X), memory="600KiB", **options)
    by, quick = options_of(made.limits["depth"]), made.best_candidate.options
    assert by["recompute"] == "all" != quick.get("recompute")

    def memory(blocks, chosen):
        return predict(copy_model_with_block_count(gpt(), blocks), (X, X), **options | chosen).memory

    assert memory(made.deepest[0], by) <= 600 << 10 < memory(made.deepest[0], quick)
    for strategy in PRESETS_BY_MEMORY:
        most = {"strategy": strategy, "recompute": "all", "microbatches": 4}
        assert memory(made.deepest[0] + 1, most) > 600 << 10
    assert "the largest that fits with other options:" in str(made)
    assert f"{made.deepest[0]} blocks of this width" in str(made)
    assert made.to_json()["limits"]["depth"] == made.limits["depth"]


def test_widths_are_all_divisors_and_what_is_not_searched_is_said():
    options = {"strategy": "fsdp", "recompute": None, "microbatches": 3, "schedule": "1f1b"}
    made = fsdpx.plan(nn.GPT(36, 36, 3, 6, 6), batch=(SIX, SIX), ranks=6, machine=UNLIMITED, **options)
    meshes = [one.prediction.mesh for one in made.candidates]
    assert {(3, 1), (1, 3), (1, 6), (3, 2)} <= {(mesh.width_of("tensor"), mesh.width_of("pipe")) for mesh in meshes}
    assert "; not searched: sequence='ulysses' and 'ring', stages=" in flat(made)
    assert "and the schedules gpipe, zb-h2, zbv" in flat(made)


def test_depths_that_cannot_run_end_the_search(monkeypatch):
    def upto(model, layers):
        if layers > 5:
            raise ConfigError("too deep")
        return copy_model_with_block_count(model, layers)

    monkeypatch.setattr(searching, "copy_model_with_block_count", upto)
    options = {"strategy": "ddp", "mesh": None, "microbatches": 1, "most": 1}
    assert fsdpx.plan(gpt(), batch=(X, X), ranks=2, machine="laptop", memory="1GiB", **options).deepest[0] == 5


def test_a_model_that_repeats_no_block_has_no_deepest():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ((4, 8), "float32")
    made = fsdpx.plan(model, batch=(x, x), ranks=1, machine="laptop", memory="1GiB")
    assert made.deepest == (0, 0)
    assert "blocks of this width" not in flat(made)
    assert made.to_json()["deepest"] is None


def test_group_bytes_and_the_codecs_that_are_allowed_are_tried():
    model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), ((64, 256), "float32")
    options = {"ranks": 4, "machine": UNLIMITED, "strategy": "ddp", "mesh": None, "microbatches": 1}
    made = fsdpx.plan(model, batch=(x, x), codecs=("bf16", "int8"), **options)
    assert {None, 256 << 10, 4 << 20} <= {one.options.get("group_bytes") for one in made.candidates}
    assert made.best_candidate.options["compression"] == "int8"
    assert {"ddp", "ddp + bf16", "ddp + int8"} <= made.best_by_kind.keys()
    assert "schedules and group_bytes, codec 'bf16', codec 'int8'" in made.search_space
    plain = fsdpx.plan(model, batch=(x, x), **options)
    assert not any("codec" in one.options for one in plain.candidates)
    assert "codec" not in plain.search_space


def test_offload_is_tried_where_nothing_else_fits():
    model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)]), ((64, 256), "float32")
    slow = replace(UNLIMITED, disk=DiskSpeed(write=1e9, read=2e9, total=1e9))
    options = {"batch": (x, x), "ranks": 2, "machine": slow, "strategy": "fsdp", "mesh": Mesh()}
    options |= {"microbatches": 1, "recompute": "all"}
    least = min(one.prediction.memory for one in fsdpx.plan(model, **options).candidates)
    made = fsdpx.plan(model, memory=least - 4096, **options)
    assert all(one.summary.endswith("offload") for one in made.candidates)
    assert "schedules and group_bytes, offload, with" in made.search_space
    assert made.best_candidate.prediction.parts["disk"] > 0
    quick = predict(model, (x, x), ranks=2, machine=replace(slow, disk=None), **made.best_candidate.options)
    moved = sum(n for (axis, _), (_, n) in quick.worst_class.traffic.items() if axis == "disk")
    assert quick.seconds < made.best_candidate.prediction.seconds <= quick.seconds + moved / 0.5e9
    assert "offload=fsdpx.OffloadConfig('/local/disk', " in made.python_line
    assert options_of(made.best_candidate.python_text) == dict(made.best_candidate.options)
    with pytest.raises(ConfigError, match="nothing fits"):
        fsdpx.plan(model, memory=least - 4096, offload=None, **options)


def test_options_that_are_given_are_not_searched():
    options = {"strategy": "fsdp", "mesh": Mesh(tensor=2)}
    made = fsdpx.plan(gpt(1), batch=(X, X), hosts=1, machine="laptop", recompute=None, **options)
    assert {one.summary for one in made.candidates} == {"fsdp + tensor"}
    assert ", with strategy='fsdp', mesh=fsdpx.Mesh(tensor=2); " in made.search_space
    assert made.rank_count == 4


def test_where_nothing_fits_the_ranks_that_would_are_named():
    options = {"machine": "ethernet-10g", "strategy": "fsdp", "recompute": "all", "batch": (X, X)}
    options |= {"microbatches": 1, "mesh": None}
    with pytest.raises(ConfigError) as error:
        fsdpx.plan(gpt(), ranks=1, memory="500KiB", **options)
    ranks = int(re.search(r"; (\d+) ranks of it would fit, or ", str(error.value))[1])
    assert fsdpx.plan(gpt(), ranks=ranks, memory="500KiB", **options).best_candidate.prediction.memory <= 500 << 10


def test_a_machine_with_too_few_ranks_is_reported_once():
    narrow = replace(ETHERNET, levels=(NetworkLevel("host", 1e-6, 1e9, ranks=2),))
    with pytest.raises(ConfigError) as error:
        fsdpx.plan(gpt(), batch=(X, X), ranks=4, machine=narrow, most=8, strategy="fsdp", recompute=None)
    assert str(error.value).count("holds 2 ranks, and the job has 4: run measure-machine on two hosts") == 1


UNBOUNDED = replace(Machine.load("laptop"), name="flat", levels=(NetworkLevel("host", 0.0, 1e9),))
"""A machine that does not say how many ranks a host has."""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 2, "hosts": 1}, "ranks=2, hosts=1: say one of them"),
        ({"ranks": 0}, "^ranks=0: a whole number, 1 or more$"),
        ({"ranks": 2.5}, r"^ranks=2\.5: a whole number, 1 or more$"),
        ({"ranks": True}, "^ranks=True: a whole number, 1 or more$"),
        ({"hosts": -1}, "^hosts=-1: a whole number, 1 or more$"),
        ({"hosts": 2, "machine": UNBOUNDED},
         "^hosts=2: machine 'flat' does not say how many ranks a host has; say ranks=$"),
        ({"most": "few"}, "^most='few': a whole number, 1 or more$"),
        ({"domain": "some"}, "^domain='some': a fsdpx.Grid or fsdpx.Partition is needed"),
        ({"mesh": Mesh(pipe=3)}, "^mesh pipe=3 needs a multiple of 3 ranks, but the world has 2: "),
        ({"mesh": "pipe=2"}, r"^mesh='pipe=2': fsdpx\.Mesh\(\.\.\.\) is needed"),
        ({"codecs": 5}, r"^codecs=5: a list of codecs is needed, such as \('bf16', 'int8'\)$"),
        ({"codecs": ("bf16", "int9")}, r"^unknown codec 'int9': choose one of plain, "),
        ({"compression": "int9"}, r"^unknown codec 'int9': choose one of plain, "),
        ({"ranks": 11, "batch": (((2, 8), "int64"),) * 2, "machine": "ethernet-10g"},
         r"^no configuration of 11 ranks can run: more data ranks than the 2 samples"),
        ({"machine": "ethernet-10g", "memory": "64KiB", "strategy": "fsdp", "mesh": None},
         r"^nothing fits into 64\.00 KiB per rank: on 2 the least is .* each, with strategy='fsdp', .*; take more"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be_are_refused(options, says):
    """Names of codecs before anything is predicted."""
    given = {"batch": (X, X), "machine": "laptop", **({} if "hosts" in options else {"ranks": 2}), **options}
    with pytest.raises(ConfigError, match=says):
        fsdpx.plan(gpt(), **given)


def test_what_can_never_fit_is_not_tried_again():
    """Neither other schedules nor microbatches of what is too large with each."""
    words = r"the least of (\d+) configurations"
    with pytest.raises(ConfigError, match=words) as caught:
        fsdpx.plan(gpt(1), batch=(X, X), ranks=2, machine="ethernet-10g", memory="64KiB", offload=None)
    assert int(re.search(words, str(caught.value))[1]) < 30


def test_one_codec_may_be_given_alone():
    made = fsdpx.plan(gpt(), batch=(X, X), ranks=2, machine=UNLIMITED, strategy="ddp", mesh=None, codecs="bf16")
    assert made.best_by_kind.keys() == {"ddp", "ddp + bf16"}


class Odd(nn.Layer):
    """A layer of which forward or backward is a call of another library's. Messages name it without arguments, since no
    attribute has their names."""

    def __init__(self, where, call):
        self.calls = {"forward": lambda xp, x: x + 1, "backward": call, where: call}

    def forward(self, env, p, x):
        return self.calls["forward"](env.xp, x), ()

    def backward_input(self, env, p, saved, dy):
        return self.calls["backward"](env.xp, dy), ()


OF_NAMESPACE = lambda xp, x: xp.linalg.svd(x)[1], r"calls env\.xp\.linalg\.svd, which shape-only arrays do"
OF_ARRAY = lambda xp, x: x.nonzero()[0], "calls nonzero of an array, which shape-only arrays do"


@pytest.mark.parametrize(
    ("where", "call", "says"),
    [("forward", lambda xp, x: np.sort(x), "calls numpy itself"), ("forward", *OF_NAMESPACE),
     ("backward", *OF_NAMESPACE), ("forward", *OF_ARRAY), ("backward", *OF_ARRAY)],
)  # fmt: skip
def test_a_function_that_dry_runs_do_not_know_is_named_with_its_layer(where, call, says):
    x, model = ((4, 8), "float32"), nn.Sequential(nn.Linear(8, 8), Odd(where, call), nn.Linear(8, 8))
    with pytest.raises(ConfigError, match=rf"layer '1' Odd\(\) .*{says}"):
        fsdpx.plan(model, batch=(x, x), ranks=1, machine="laptop")


def test_the_command_line(tmp_path, monkeypatch):
    words = "plan gpt-tiny --ranks 2 --machine laptop --memory 60MiB --batch 4 --most 2 --strategy fsdp".split()
    words += ["--microbatches", "1", "--mesh", "shard=2"]
    text = shown(words)
    assert re.match(r"fsdp on 2 ranks: \S+ s per step, \S+ MiB of 60\.00 MiB per rank: it fits\n", text)
    assert "\ngpt-tiny: GPT" in text
    assert "trainer = model.as_distributed(" in text
    assert json.loads(shown([*words, "--json"]))["ranks"] == 2
    monkeypatch.chdir(tmp_path)
    assert "machine.toml: there is no such file" in refused("plan gpt-tiny --ranks 2")
    assert "machine='nowhere' is none of" in refused("plan gpt-tiny --ranks 2 --machine nowhere")


def test_the_command_line_draws_time_and_memory_against_ranks(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    path, step = tmp_path / "ranks.png", tmp_path / "step.png"
    words = "plan gpt-tiny --ranks 2 --machine laptop --batch 4 --most 1 --strategy fsdp --mesh shard=2".split()
    words += ["--memory", "60MiB"]
    status, _, drawn = command([*words, "--ranks-png", str(path), "--png", str(step)])
    assert status == 0, drawn
    assert f"drawn: {path}" in drawn
    assert str(step) in drawn
    assert {file.read_bytes()[:4] for file in (path, step)} == {b"\x89PNG"}
    monkeypatch.setattr(plan_command.plan, "search", None)  # it is not asked
    for option, wrong, says in (
        ("--ranks-png", path / "x.png", "there is no folder"),
        ("--png", tmp_path / "x.foo", "foo is no format of pictures"),
        ("--png", tmp_path, "no file can be written there"),
    ):
        assert f"fsdpx plan: {option} {wrong}: {says}" in refused([*words, option, str(wrong)])
    assert "x.json cannot be written" in refused(["show", "mlp", "--trace", str(path / "x.json")])


def test_pipes_have_no_more_ranks_than_the_model_has_layers():
    """The schedule of hundreds of ranks is long, and would be refused."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), ((4, 16), "float32")
    options = {"strategy": "ddp", "microbatches": 2, "recompute": None}
    made = fsdpx.plan(model, batch=(x, x), ranks=4, machine=UNLIMITED, **options)
    assert max(one.prediction.mesh.width_of("pipe") for one in made.candidates) == 2
    assert not [words for words, _ in made.rejected if "pipe=4" in words]


# -- measured steps -------------------------------------------------------------------------------------------------


def test_steps_of_a100s_are_predicted():
    """A few of the 720; docs/planning.md has all errors."""
    off = [abs(predicted / measured - 1) for predicted, measured in steps_of_a100s(60)]
    assert len(off) == 12
    assert sum(off) / len(off) < 0.13
