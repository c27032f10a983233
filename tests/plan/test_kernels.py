"""Rates of kernels: what is measured, what a call then takes, and what is done without."""

import re
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from fsdpx import nn
from fsdpx.core.array import shapes
from fsdpx.core.array.shapes.flop_counter import KernelPass, ProductCount, WorkCount, counting_work
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.errors import ConfigError
from fsdpx.ext.fields import kernels as windows
from fsdpx.plan import Compute, Machine, NetworkLevel, measuring, predict, probes
from fsdpx.plan.kernels import LONG, SHORT, KernelRates
from fsdpx.plan.machine import DiskSpeed
from fsdpx.plan.measuring import format_machine_file
from fsdpx.plan.prediction import dry_run_one_rank_per_group
from fsdpx.plan.time_model import compute_work_seconds

GRID = [[a, b, 3, n, 1e9 * a * b * (1 + (n > 64))] for a in (1, 16) for b in (1, 16) for n in (64, 4096)]
RATES = KernelRates(
    {
        "float32": {"elements": [8e9, 2e9], "relu": [4e9, 1e9], "copy": [8e9, 2e9]},
        "bf16": {"elements": [1e9, 1e9], "store": [2e9, 2e9]},
    },
    {"float32": {"correlate": GRID}},
)


def fields(*cells):
    return ((2, 3, *cells), "float32"), ((2, 2, *cells), "float32")


def machine(**compute):
    made = Compute(**{"flops": {"float32": 1e9}, "memory": 1e9} | compute)
    return Machine("one", (NetworkLevel("host", 0.0, 1e9),), made)


def count_work_of(call):
    with counting_work() as work:
        call()
    return work


@pytest.mark.parametrize(
    ("kernel", "name", "nbytes", "rate"),
    [
        ("relu", "float32", SHORT, 4e9), ("relu", "float32", LONG, 1e9), ("relu", "float32", 100 * LONG, 1e9),
        ("relu", "float32", 1, 4e9), ("relu", "float32", int((SHORT * LONG) ** 0.5), 2e9),
        ("other", "float32", SHORT, 8e9), ("relu", "bf16", SHORT, 1e9), ("relu", "float64", SHORT, 4e9),
        ("relu", "float16", LONG, 1e9),
    ],
)  # fmt: skip
def test_a_pass_goes_between_what_was_measured_short_and_long(kernel, name, nbytes, rate):
    assert RATES.get_bytes_per_second(KernelPass(kernel, 4, nbytes), name) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("point", "rate"),
    [((1, 1, 64), 1e9), ((16, 16, 4096), 512e9), ((4, 1, 64), 4e9), ((64, 1, 64), 16e9), ((1, 1, 512), 2**0.5 * 1e9)],
)
def test_a_kernel_of_products_goes_between_the_points_of_its_grid(point, rate):
    inner, rows, windows = point
    one = ProductCount(rows, inner, 640, 2, 4, "correlate", 3, windows)
    assert RATES.get_flops_per_second(one, "float32") == pytest.approx(rate)
    backward = ProductCount(rows, 640, inner, 2, 4, "correlate_backward_params", 3, windows)  # the cells are summed
    own = KernelRates({}, {"float32": {"correlate_backward_params": GRID}})
    assert own.get_flops_per_second(backward, "float32") == pytest.approx(rate)
    assert RATES.get_flops_per_second(one, "float64") is None
    assert RATES.get_flops_per_second(one._replace(itemsize=2), "bf16") == pytest.approx(rate)


def test_the_pass_of_a_kernel_is_a_part_of_its_products():
    compute = machine(kernels=RATES).compute
    one = ProductCount(16, 16, 4096, 1, 4, "correlate", 3, 4096.0)
    work = WorkCount(Counter({one: 2}), Counter({KernelPass("correlate", 4, SHORT): 1, KernelPass("relu", 4, LONG): 3}))
    assert compute_work_seconds(work, compute, "bf16") == pytest.approx(2 * one.flops / 512e9 + 3 * LONG / 1e9)
    plain = machine().compute
    assert compute_work_seconds(work, plain, "bf16") == pytest.approx(2 * one.flops / 1e9 + (SHORT + 3 * LONG) / 1e9)


def test_products_beyond_the_caches_take_as_much_longer_as_a_copy():
    """In 16 bits of twice the bytes, and with the casts to float32 and back."""
    compute_seconds = RATES.compute_memory_seconds_beyond_products
    times = {n: compute_seconds(KernelPass("correlate", 4, n), "float32") for n in (1, SHORT, LONG)}
    assert times == pytest.approx({1: 0.0, SHORT: 0.0, LONG: LONG / 2e9 - LONG / 8e9})
    half = compute_seconds(KernelPass("correlate", 2, LONG // 2), "bf16")
    assert half == pytest.approx(times[LONG] + 1.5 * LONG / 2e9)
    assert compute_seconds(KernelPass("relu", 4, LONG), "float32") is None
    assert compute_seconds(KernelPass("relu", 2, LONG), "bf16") is None


def test_weights_that_meet_few_cells_count():
    own = KernelRates({"float32": {"weights of correlate": [1e6, 1e6]}}, RATES.products)
    for cells in (1, 4096):
        one = ProductCount(16, 8, cells, 1, 4, "correlate", 3, 64.0)
        assert RATES.compute_product_seconds(one, "float32") == pytest.approx(one.flops / 128e9)
        assert own.compute_product_seconds(one, "float32") == pytest.approx(one.flops / 128e9 + 4 * 16 * 8 / 1e6)


def test_windows_of_short_rows_are_told_from_those_of_long_ones():
    """Beyond the ends of a row a window has fewer places: of rows of 8 and 64 the rate is another."""
    found = set()
    for cells, window in (((64, 8), 3), ((8, 64), 3), ((8, 64), 7)):
        with counting_work() as work:
            strides = nn.Conv2d(8, 8, window).window.make_window_strides((-(window // 2),) * 2)
            x, weight = shapes.ones((2, 8, *cells), np.float32), shapes.ones((8, 8, window, window), np.float32)
            windows.correlate(shapes, x, weight, None, strides, cells)
        found |= {one.windows for one in work.products}
        assert {one.kernel for one in work.products} == {"correlate"}
    assert found == {8 / 3, 64 / 3, 64 / 7}


FEW = {"batch_norm_scales_and_running_stats", "batch_norm_backward_factors"}
"""Of a number for each channel."""


def models():
    """Models, and batches, whose kernels must have been measured."""
    found = []
    for cells in ((64,), (16, 16), (8, 8, 8)):
        for norm, activation in (("batch", "relu"), ("group", "gelu"), (None, "silu")):
            found.append((nn.UNet(3, 2, len(cells), 8, 2, norm=norm, activation=activation), fields(*cells)))
    deep = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.AvgPool2d(1),
                    nn.Conv2d(32, 32, 3, padding=1), nn.Sigmoid(), nn.Conv2d(32, 2, 1))  # fmt: skip
    tokens = ((4, 16), "int64")
    texts = [(make(64, 32, 2, 2, 16), (tokens, tokens)) for make in (nn.GPT, nn.Llama)]
    return [*found, (deep, fields(32, 32)), *texts]


@pytest.mark.parametrize("name", ["float32", "bf16"])
def test_each_kernel_that_models_use_is_measured(name):
    calls = [*probes.make_calls_of_all_memory_bound_kernels(shapes, name, 1 << 12),
             *probes.iterate_matmul_calls(shapes, name), *probes.iterate_matmul_calls(shapes, "float32")]  # fmt: skip
    known = {one.kernel for work in map(count_work_of, calls) for one in (*work.passes, *work.products)}
    for model, batch in models():
        (run,) = dry_run_one_rank_per_group(model, batch, 1, False, precision=None if name == "float32" else name).runs
        used = {one.kernel for cost in run.costs.values() for one in (*cost.work.passes, *cost.work.products)}
        assert used - {""} - FEW <= known | {"update"}, model  # the update is of float32


def test_probes_are_calls_of_arrays_that_count_what_they_say():
    """The same calls, in the same order, of arrays as of shapes."""
    calls = (probes.make_calls_of_all_memory_bound_kernels(xp, "float32", 1 << 12) for xp in (np, shapes))
    for real, dry in zip(*calls, strict=True):
        assert len(count_work_of(dry).passes) == 1
        assert not count_work_of(real).passes


def test_machines_are_read_as_they_were_written(tmp_path):
    path, levels = tmp_path / "machine.toml", (NetworkLevel("host", 1e-6, 1e10, 4), NetworkLevel("system", 1e-5, 1e9))
    measured = replace(machine(kernels=RATES), levels=levels, measured=("compute", "links"))
    for plain in (*map(Machine.load, Machine.list_names()), measured):
        for made in (plain, replace(plain, disk=DiskSpeed(1e9, 2e9))):
            path.write_text(format_machine_file(made))
            assert Machine.load(path) == made


def test_rates_of_kernels_that_were_renamed_are_reported(tmp_path):
    path = tmp_path / "machine.toml"
    own = KernelRates({"float32": {**RATES.passes["float32"], "weights of correlate": [1e9, 1e9]}}, RATES.products)
    path.write_text(format_machine_file(machine(kernels=own)))
    Machine.load(path)
    path.write_text(path.read_text().replace("relu", "rectify").replace("correlate", "convolve"))
    message = rf"{path} has rates of convolve, rectify, which .*: mpiexec -n N python -m fsdpx measure-machine --output"
    with pytest.warns(RuntimeWarning, match=message):
        Machine.load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kernels = 3", "tables passes and products by format are needed"),
        ("kernels = {speeds = {}}", "tables passes and products by format are needed"),
        ("kernels = {passes = 3}", "passes are tables by format: bf16, float16, float32, float64"),
        ("kernels = {passes = {int8 = {}}}", "passes are tables by format"),
        ("kernels = {passes = {bf16 = {relu = [1e9]}}}", "passes of relu: rows of 2 numbers above 0 are needed"),
        ("kernels = {passes = {bf16 = {relu = [1e9, 0]}}}", "passes of relu: rows of 2 numbers above 0 are needed"),
        ("kernels = {products = {bf16 = {c = [[1, 1, 1, 1]]}}}", "products of c: rows of 5 numbers above 0 are needed"),
        ("kernels = {products = {bf16 = {c = [[1, 1, 1, 1, 9], [2, 2, 1, 1, 9]]}}}",
         "products of c: a full grid is needed, each point once"),
        ("measured = 'all'", "a list of compute and links is needed"),
        ("measured = ['disk']", "a list of compute and links is needed"),
    ],
)  # fmt: skip
def test_rates_that_are_none_are_named(text, says, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(f"{text}\n{format_machine_file(machine())}")
    with pytest.raises(ConfigError, match=re.escape(says)):
        Machine.load(path)


def test_convolutions_in_16_bits_are_not_priced_as_products_in_16_bits():
    """Processors compute them in float32, whatever the instructions for products are."""
    quick = machine(flops={"float32": 1e9, "bf16": 1e12}, memory=1e15)
    model = nn.Conv2d(3, 2, 3, padding=1)
    for step in (predict(model, fields(16, 16), ranks=1, machine=quick, precision=name) for name in (None, "bf16")):
        assert step.seconds == pytest.approx(predict(model, fields(16, 16), ranks=1, machine=quick).seconds, rel=1e-3)


def test_published_processors_price_16_bits_without_a_library_that_may_not_be_there():
    """Nothing says that oneDNN is installed on them; without it 16-bit operands are widened."""
    for name in ("xeon-200g", "epyc-100g", "ethernet-10g", "laptop"):
        batch, options = (((4096, 2048), "float32"),) * 2, {"ranks": 1, "machine": name}
        plain, half = (predict(nn.Linear(2048, 2048), batch, precision=p, **options) for p in (None, "bf16"))
        assert half.seconds > 0.8 * plain.seconds, name


WEIGHED = "correlate", "_input", "_params", "winograd"


def test_kernels_are_measured_one_by_one(monkeypatch):
    """Of calls that take a second, as long as nothing at all, a quarter is the kernel's own."""
    monkeypatch.setattr(
        measuring, "_measure_mean_call_seconds_over_ranks", lambda comm, call, of, long=0.0: call() is None or 1.0
    )
    monkeypatch.setattr(measuring, "KERNELS", ("float32",))
    monkeypatch.setattr(measuring, "SHORT", 1 << 14)
    monkeypatch.setattr(measuring, "LONG", 1 << 16)
    rates = measuring._measure_kernel_rates(make_single_rank_communicator(), measuring.Processors())
    calls = (probes.make_calls_of_all_memory_bound_kernels(shapes, "float32", nbytes) for nbytes in (1 << 14, 1 << 16))
    passes = [work for work in map(count_work_of, chain(*calls)) if "relu" in {one.kernel for one in work.passes}]
    relu = [4 * work.nbytes for work in passes]
    assert relu[0] < relu[1]
    assert rates.passes["float32"]["relu"] == pytest.approx(relu)
    assert {len(row) for rows in rates.products["float32"].values() for row in rows} == {5}
    weighed = {name for name in rates.passes["float32"] if name.startswith("weights of ")}
    assert weighed == {f"weights of {name}" for name in rates.products["float32"] if name.endswith(WEIGHED)}
