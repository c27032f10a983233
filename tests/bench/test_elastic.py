"""The benchmark of elastic training: figures are medians with verdicts, failures have reasons, sizes as asked."""

import re
from pathlib import Path

import pytest


def test_rows_are_medians_with_verdicts_and_failures_have_reasons() -> None:
    from elastic import rows, tables

    fine = {
        "elastic": [[1.01, 1.01, 1.21]], "plain": [[1.0, 1.0, 1.0]], "commit": [0.0001], "take": [0.05], "every": 20,
    }  # fmt: skip
    bad = [{"failed": "no mpiexec"}]
    lost = {"bytes": 1 << 30, "heard": 0.02, "seconds": 0.9, "phases": {"shrink": 0.1, "copy": 0.8}}
    slow = lost | {"seconds": 3.0}
    found = rows("small", [fine], {1024: [lost, slow, slow], 0.5: [lost | {"bytes": 1 << 19}], 16: bad})
    assert found["cost"]["copy"] == pytest.approx(0.2)
    assert found["cost"]["share"] == pytest.approx(0.02)
    assert found["recovery"][0]["seconds"] == 3.0
    cost, lines = (text for _, text in tables(found))
    assert re.search(r"^small +1\.000 +1\.010 +0\.1 +200\.0 +50\.0 +20 +2\.0 % +(yes|no)$", cost, re.M)
    assert re.search(r"^1,024\.00 +20\.0 +3,000\.0 +1,000\.0 +no +100\.0 +800\.0$", lines, re.M)
    assert re.search(r"^0\.50 +20\.0 +900\.0 +100\.0 +no ", lines, re.M)
    assert re.search(r"^16 +no mpiexec$", lines, re.M)
    failed = dict(tables(rows("small", bad, {16: bad})))
    assert re.search(r"^small +no mpiexec$", failed["cost"], re.M)


@pytest.mark.parametrize("mib", [0.0625, 16, 256, 1024])
def test_chains_hold_as_much_state_as_asked(mib: float) -> None:
    from losing import chain

    model, width = chain(mib)
    state = 12 * sum(spec.size for layer in model.children().values() for spec in layer.specs().values())
    assert state == pytest.approx(mib * 2**20, rel=0.15)
    assert width >= 32


def test_steps_of_both_kinds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    import losing
    from workloads import MODELS, Model

    import fsdpx

    monkeypatch.setitem(MODELS, "least", Model(8, 2, rows=4))
    for found in fsdpx.spawn(losing.cost, 2, "least", 2, timeout=60):
        assert len(found["elastic"]) == len(found["plain"]) == 2
        assert len({len(steps) for kind in ("elastic", "plain") for steps in found[kind]}) == 1
        assert len(found["commit"]) == 2 * len(found["plain"][0])
        assert found["every"] >= 1


def test_without_open_mpi_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import elastic

    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr("sys.argv", ["elastic.py"])
    with pytest.raises(SystemExit, match=r"there is no \.venv-openmpi beside this interpreter: make test-elastic"):
        elastic.main()
