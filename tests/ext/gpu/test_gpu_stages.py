"""The script of `make test-gpu` and `make bench-gpu`: limits of time, the summary, and what stages compute, on the
stand-in."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from stand_in import Cublas, Cupy

from fsdpx import spawn
from fsdpx.ext.gpu import gemm


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import gpu

    Cupy().install(monkeypatch)
    library = gemm.CublasLibrary(Cublas())
    monkeypatch.setattr(gemm, "_load_cublas_library", lambda: library)
    return gpu


def test_ranks_are_compared_with_the_host(script: Any) -> None:
    """Here the ranks are threads without NCCL: the comparison is right, and finds what is wrong."""

    def run(comm: Any) -> None:
        for call in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
            script._compare_collective(comm, call, "bfloat16")
        script._compare_training(comm, comm, {"strategy": "fsdp"}, layers=1)
        comm.all_reduce = lambda array: comm.broadcast(array, 0)
        with pytest.raises(AssertionError):
            script._compare_collective(comm, "all_reduce", "float32")

    spawn(run, 2)


def test_models_take_turns(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import workloads

    monkeypatch.setitem(workloads.MODELS, "small", workloads.Model(8, 2, rows=4))
    for kind in (torch.nn.Module, torch.Tensor):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    found = script.turns("small", quick=True)
    assert found["same bits"]
    assert found["graphs MiB"] > 0
    assert found["not recorded"] == []
    assert found["ms"].keys() == found["host ms"].keys() == {"fsdpx", "replay", "PyTorch"}


def test_the_summary_has_forty_lines_at_most(script: Any) -> None:
    times = {"fsdpx": 3.0, "replay": 1.5, "PyTorch": 3.0}
    found: dict[str, Any] = {
        "products": {"peak": 800.0},
        "fsdpx": {"tokens": 400_000.0, "memory": 8 << 30},
        "turns of unet2d": {"ms": times, "host ms": times, "graphs MiB": 5.0, "same bits": True},
        "NCCL, 2 ranks": {"nccl": 23007, "checks": ["a", "b"], "wrong": {"b": "ValueError: x"}},
        "PyTorch": {"failed": "no result after 58 s"},
    }
    text = script.summarize(found)
    assert text[1].split() == ["fsdpx", "400,000", "37%", "8.0"]
    assert text[3].split()[-4:] == ["3.00", "5", "2.00", "yes"]
    assert "NCCL, 2 ranks: NCCL 23007, 2 checks, wrong: b: ValueError: x" in text
    assert "PyTorch: failed no result after 58 s" in text
    long = script.summarize({**found, **{f"stage {n}": {"failed": "x" * 500} for n in range(60)}})
    assert len(long) == 40
    assert max(map(len, long)) <= 200
    assert long[-1] == "... 28 lines more in the JSON file"


def test_stages_end_in_time_and_leave_their_reason(script, monkeypatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(script, "device", dict)
    monkeypatch.setattr(script, "run_stage", lambda name, _, seconds: {"failed": f"{name} within {seconds:.0f} s"})
    options = argparse.Namespace(stages=["products", "kernels"], seconds=20, quick=True, out=tmp_path, nccl=None)
    assert script.measure(options) == 0
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [parts[name]["failed"] for name in options.stages] == ["products within 20 s", "kernels within 20 s"]
    options.seconds = 5
    assert script.measure(options) == 0
    assert "kernels: failed did not begin within 5 s" in capsys.readouterr().out.splitlines()
