"""Fields in plans: bytes and memory of ranks that hold parts of one, and which grid to cut it over."""

import json
import re
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from commands import refused, shown
from steps import demand_equal_on_parts, observed, place_on_data_axis

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.array import shapes
from fsdpx.core.array.random import Random
from fsdpx.core.array.shapes.flop_counter import counting_work
from fsdpx.core.comm.mesh import make_single_rank_axes
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import LayerContext
from fsdpx.plan import Compute, Machine, NetworkLevel, predict

OPTIONS = {"loss": nn.RelativeL2(), "optimizer": optim.AdamW()}
CONVOLUTIONS = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))


def network_of(attention):
    block = nn.Residual(attention)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), block, nn.ChannelLayerNorm(8), nn.Conv2d(8, 2, 1))


MODELS = {
    "unet": nn.UNet(2, 2, 2, 4, 2),
    "unet with attention": nn.UNet(2, 2, 2, 4, 1, attention=2),
    "fno": nn.FNO(2, 2, (4, 4), 4, 2),
    "slices": network_of(nn.PhysicsAttention(8, 2, 4, 3)),
    "neighbors": network_of(nn.NeighborhoodAttention(8, 2, 5, (True, False))),
    "ring": network_of(nn.GlobalAttention(8, 2)),
}


def fields(samples, *cells):
    return (((samples, 2, *cells), "float32"),) * 2


@pytest.mark.parametrize(
    ("model", "ranks", "domain", "samples", "chosen"),
    [
        ("unet", 4, (2, 2), 1, {"strategy": "fsdp"}),
        ("unet", 3, (3, 1), 2, {"strategy": "ddp", "microbatches": 2}),
        ("unet", 6, (1, 3), 3, {"strategy": "zero2"}),
        ("unet", 4, (2, 1), 2, {"strategy": "zero1", "mesh": fsdpx.Mesh(pipe=2), "microbatches": 2}),
        ("fno", 4, (2, 2), 2, {"strategy": "zero1", "recompute": "all"}),
        ("fno", 3, (3, 1), 2, {"strategy": "ddp", "loss": nn.RelativeH1() + 0.1 * nn.SpectrumRMSE()}),
        ("unet with attention", 4, (4, 1), 1, {"strategy": "ddp", "loss": nn.SpectrumRMSE(2)}),
        ("slices", 3, (1, 3), 2, {"strategy": "fsdp"}),
        ("slices", 4, (2, 2), 2, {"strategy": "ddp", "recompute": "attention"}),
        ("neighbors", 3, (3, 1), 2, {"strategy": "zero2"}),
        ("neighbors", 4, (2, 2), 2, {"strategy": "fsdp", "recompute": "attention"}),
        ("ring", 3, (3, 1), 2, {"strategy": "fsdp"}),
        ("ring", 4, (2, 2), 2, {"strategy": "ddp", "recompute": "attention"}),
    ],
)
def test_predicted_bytes_calls_and_memory_are_those_of_ranks(model, ranks, domain, samples, chosen):
    cells, chosen = (16, 20), OPTIONS | chosen
    found = predict(MODELS[model], fields(samples, *cells), ranks=ranks, machine="epyc-100g", domain=domain, **chosen)

    def run(comm):
        data = found.mesh.ranks_along(found.mesh.coordinates_of(comm.rank), ("replica", "shard"))
        _, part, rows = place_on_data_axis(found, comm.rank, prod(domain), samples)
        own = fsdpx.Grid.from_shape(cells, domain, part).local_shape
        grid = fsdpx.Grid(comm if data == [*range(ranks)] else comm.subgroup(data), own, dims=domain, layout="cyx")
        made = MODELS[model].as_distributed(comm=comm, domain=grid, **chosen)
        return observed(made, *(np.ones((rows, 2, *own), "f4") for _ in range(2)))

    demand_equal_on_parts(found, fsdpx.spawn(run, ranks))


@pytest.mark.parametrize(
    ("attention", "tokens"),
    [
        (nn.GlobalAttention(8, 2), 240 * 240 * 8 * 2),
        (nn.NeighborhoodAttention(8, 2, 5, (False, True)), (8 * 10 + 4 * 6) * (8 * 12 + 8 * 12 + 4 * 8) * 8 * 2),
        (nn.PhysicsAttention(8, 2, 6), 240 * 6 * (8 * 3 + 2) + 2 * 6 * 6 * 8 + 3 * 6 * 8 * 4),
    ],
)
def test_the_multiplications_of_attention_are_counted(attention, tokens):
    """Those of projections, and those with tiles of keys or with slices, of 12 x 20 cells."""
    with counting_work() as work:
        parameters = {name: shapes.ShapeArray(spec.shape, np.dtype("f4")) for name, spec in attention.specs().items()}
        context = LayerContext(shapes, make_single_rank_axes(), Random(0))
        attention.forward(context, parameters, shapes.ShapeArray((1, 8, 12, 20), np.dtype("f4")))
    projections = 3 if isinstance(attention, nn.PhysicsAttention) else 4
    assert work.flops == 2 * (240 * projections * 8 * 8 + tokens)


def test_a_grid_with_ghost_cells_is_planned_in_its_layout():
    grid = fsdpx.Grid.from_shape((16, 16), (2, 2), layout="yxc", ghosts=1)
    whole = (((1, 16, 16, 2), "float32"),) * 2
    found = predict(MODELS["unet"], whole, ranks=4, machine="laptop", domain=grid, **OPTIONS)
    x, y = (((1, n, n, 2), "float32") for n in (10, 8))
    dry = fsdpx.dry_run(MODELS["unet"], x, y, ranks=4, strategy="ddp", domain=grid, **OPTIONS)
    assert found.worst_class.memory["activations"] == dry.peak_heap_bytes
    without = predict(MODELS["unet"], fields(1, 16, 16), ranks=4, machine="laptop", domain=(2, 2), **OPTIONS)
    assert found.bytes_sent["domain"] < without.bytes_sent["domain"]


def test_halos_go_to_neighbors():
    """Cut along the first dim over hosts, one rank of each host speaks with another host; along the last, all do."""
    hosts = (NetworkLevel("host", 1e-6, 1e9, ranks=2), NetworkLevel("system", 1e-3, 1e9, contention=1.0))
    machine = Machine("two hosts", hosts, Compute({"float32": 1e12}, 1e12))
    seconds = {
        space: predict(nn.Conv2d(2, 2, 3, padding=1), fields(1, 64, 64), ranks=4, machine=machine, domain=space)
        for space in ((4, 1), (2, 2))
    }
    (calls, nbytes), face = seconds[4, 1].classes[-1].traffic["domain", "send"], 64 * 2 * 4
    assert nbytes == calls * face
    assert seconds[4, 1].parts["domain"] == pytest.approx(calls * (1e-3 + face / 1e9))
    # of a rank's two faces one stays on its host; two ranks of a host share the link for the other
    (calls, nbytes), face = seconds[2, 2].classes[-1].traffic["domain", "send"], 32 * 2 * 4
    inside, beyond = 1e-6 + nbytes / calls / 1e9, 1e-3 + nbytes / calls / 0.5e9
    assert seconds[2, 2].parts["domain"] == pytest.approx(calls * (inside + beyond) / 2)
    assert seconds[2, 2].bytes_sent["domain"] == nbytes


def test_grids_are_searched():
    options = OPTIONS | {"domain": "any", "strategy": "ddp", "microbatches": 1, "recompute": None}
    found = fsdpx.plan(CONVOLUTIONS, batch=fields(1, 256, 256), ranks=4, machine="laptop", memory="16MiB", **options)
    assert {(4, 1), (1, 4), (2, 2)} <= {one.options.get("domain") for one in found.candidates}
    domains = {one.prediction.mesh.domain for one in found.candidates if "domain" in one.summary}
    assert {(4, 1), (1, 4), (2, 2)} <= domains
    assert found.best_candidate.summary.endswith(" + domain")
    assert "grids of fields, " in found.search_space
    dims = found.best_candidate.options["domain"]
    own = tuple(n // width for n, width in zip((256, 256), dims, strict=True))
    begin = "trainer = model.as_distributed(loss=nn.RelativeL2(), optimizer=optim.AdamW(), strategy="
    assert found.python_line.startswith(begin)
    assert f"domain=fsdpx.Grid(fsdpx.init(), {own}, dims={dims}, layout='cyx')" in found.python_line
    assert f"# domain={dims}" in found.distribute_section_text


def test_the_line_for_parts_that_differ_cuts_them_evenly():
    options = OPTIONS | {"domain": (3, 1), "strategy": "fsdp", "microbatches": 1, "recompute": None}
    found = fsdpx.plan(CONVOLUTIONS, batch=fields(1, 16, 20), ranks=3, machine="laptop", memory="1MiB", **options)
    assert {one.options["domain"] for one in found.candidates} == {(3, 1)}

    def run(comm):
        words = found.python_line.partition("domain=")[2].partition("layout='cyx')")[0] + "layout='cyx')"
        here = SimpleNamespace(init=lambda: comm, rank=lambda: comm.rank, Grid=fsdpx.Grid)
        grid = eval(words, {"fsdpx": here})
        return grid.shape, grid.local_shape

    assert fsdpx.spawn(run, 3) == [((16, 20), (5, 20)), ((16, 20), (5, 20)), ((16, 20), (6, 20))]


def test_ranks_of_a_grid_plan_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(comm):
        grid = fsdpx.Grid(comm, (8, 16), dims=(2, 1), layout="cyx")
        options = OPTIONS | {"strategy": "auto", "batch": fields(1, 16, 16), "memory": "1MiB", "recompute": None}
        made = CONVOLUTIONS.as_distributed(domain=grid, **options)
        made.step(*(np.ones((1, 2, 8, 16), "f4") for _ in range(2)))
        return made.report().planned

    words = fsdpx.spawn(run, 2)
    assert words[0] == words[1]
    assert re.match(r"strategy='\w+', domain=grid, microbatches=1; predicted: ", words[0])


def test_what_is_no_field_is_named():
    text = ((8, 8), "int64")
    with pytest.raises(ConfigError, match=r"^domain='any': inputs of shape \(8, 8\) are no fields: samples, channels"):
        fsdpx.plan(nn.GPT(32, 16, 2, 2, 8), batch=(text, text), ranks=2, machine="laptop", domain="any")
    for ranks, domain, says in (
        (2, (2,), r"^domain=\(2,\): inputs of shape \(1, 2, 16, 16\), and samples, channels a"),
        (4, (3, 1), r"^domain=\(3, 1\): a sample is on 3 ranks, and the data axis of .* has 4: th"),
    ):
        with pytest.raises(ConfigError, match=says):
            predict(MODELS["unet"], fields(1, 16, 16), ranks=ranks, machine="laptop", domain=domain)


def test_the_command_line_names_a_grid():
    words = "plan fno2d --ranks 2 --machine laptop --field 32,32 --strategy fsdp --most 1 --recompute all"
    assert re.search(r"^fsdp \+ domain 1x2 .* yes ", shown(f"{words} --mesh shard=2 --memory 36MiB"), re.MULTILINE)
    err = refused("plan gpt-tiny --ranks 2 --machine laptop --domain 2,1")
    assert "--domain and --field: gpt-tiny takes no fields; unet2d, unet3d, fno2d do" in err


def test_a_model_of_ones_own_is_cut_over_a_grid(tmp_path, monkeypatch):
    (tmp_path / "own_fields.py").write_text(
        "from fsdpx import nn\n"
        "def make(): return nn.UNet(2, 1, 2, 4, 1), nn.RelativeL2()\n"
        "def classes(): return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(784, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = "plan own_fields:make --ranks 4 --machine laptop --most 4 --strategy ddp --microbatches 1 --memory 1MiB"
    words += " --recompute all --json --batch 1x2x64x64"
    found = json.loads(shown(f"{words} --domain 2,2"))["found"]
    assert {one["options"]["domain"] for one in found} == {"(2, 2)"}
    assert any("domain" in one["options"] for one in json.loads(shown(f"{words} --field 32,128"))["found"])
    assert "32 x 32 cells" in shown("show own_fields:make --ranks 4 --batch 1x2x64x64 --domain 2,2")
    err = refused("plan own_fields:classes --batch 1x2x16x16 --ranks 4 --machine laptop --domain 2,2")
    assert "say --batch with samples, channels and cells, as many as it gives" in err
