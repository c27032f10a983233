"""`bench comm` measures every verb, says what carried it, and refuses what it cannot measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from amount import few

from fsdpx import spawn
from fsdpx.__main__ import main
from fsdpx.launch.bench import VERBS, _groups, _text, measure


def test_every_verb_has_its_time_and_what_it_moved() -> None:
    reports = spawn(lambda comm: measure(comm, [64, 30_000], seconds=0.0), 3)
    assert reports[0] == reports[1] == reports[2]
    json.dumps(reports[0])
    (level,) = reports[0]["levels"]
    assert (level["level"], level["ranks"]) == ("all ranks", 3)
    rows = {(row["verb"], row["bytes"]): row for row in level["rows"]}
    assert set(rows) == {(verb, size) for verb in VERBS for size in (72, 30_000) if verb != "barrier"} | {
        ("barrier", 0)
    }
    assert all(row["seconds"] > 0 and row["by"] == "threads" and row["raw_seconds"] is None for row in rows.values())
    shares = {
        verb: rows[verb, 30_000]["bus_bandwidth"] / rows[verb, 30_000]["bandwidth"]
        for verb in VERBS
        if verb != "barrier"
    }
    moved = {"send": 1, "broadcast": 1, "reduce": 1, "all_reduce": 4 / 3, "all_reduce ring": 4 / 3}
    assert shares == pytest.approx({verb: moved.get(verb, 2 / 3) for verb in shares})
    assert level["latency"] == rows["send", 72]["seconds"]
    assert level["bandwidth"] == max(rows["send", size]["bandwidth"] for size in (72, 30_000))
    text = _text(reports[0])
    assert "all ranks, 3 ranks; a message takes " in text
    assert [line.split()[0] for line in text.splitlines() if line.endswith(" threads")] == [
        row["verb"].split()[0] for row in level["rows"]
    ]


def test_pictures_are_drawn_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "comm", "--plot", "x.png"])
    said = capsys.readouterr().err
    assert "unrecognized arguments: --plot x.png; --plot is no longer in fsdpx: use bench comm --json FILE" in said


def test_the_levels_are_those_of_the_machine() -> None:
    def run(hosts: dict[str, list[int]]) -> Any:
        def sizes(comm: Any) -> list[tuple[str, int]]:
            return [(name, group.size if group is not None else 0) for name, group in _groups(comm, hosts)]

        return spawn(sizes, sum(map(len, hosts.values())))

    inside, between, whole = "inside a host", "between hosts", "all ranks"
    assert run({"n1": [0, 1]}) == [[(whole, 2)]] * 2
    assert run({"n1": [0], "n2": [1]}) == [[(whole, 2)]] * 2
    first, other = [(inside, 2), (between, 2), (whole, 3)], [(inside, 2), (between, 0), (whole, 3)]
    assert run({"n1": [0, 1], "n2": [2]}) == [first, other, [(inside, 0), (between, 2), (whole, 3)]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "fsdpx bench: one rank has no other to talk to: mpiexec -n 2 python -m fsdpx bench comm"),
        (["--verbs", "send,allreduce"], "fsdpx bench: --verbs allreduce: there are send, all_gather, "),
        (["--sizes", "4KiB,many"], "fsdpx bench: --sizes='many': a number of bytes is needed"),
        (["--json", "missing/found.json"], "fsdpx bench: --json missing/found.json cannot be written (ENOENT)"),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "comm", *words]) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.jobs
@pytest.mark.parametrize("messages", few([False, True], 1))
def test_under_mpiexec(tmp_path: Path, messages: bool) -> None:
    from trials import job

    words = ["bench", "comm", "--sizes", "64,64KiB", "--seconds", "0.002", "--json", "found.json"]
    program = f"import sys\nfrom fsdpx.__main__ import main\nsys.exit(main({words}))"
    done = job(tmp_path, program, ranks=2, **({"FSDPX_NODE": "0"} if messages else {}))
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["backend"] == ("mpi" if messages else "node")
    assert done.out.startswith(f"{report['backend']}, {report['library']}; ")
    (level,) = report["levels"]
    by = {row["verb"]: row["by"] for row in level["rows"]}
    ours = {"all_gather", "reduce_scatter", "all_reduce", "barrier"}
    assert {verb for verb, way in by.items() if way == "shared memory, compiled"} == (set() if messages else ours)
    assert {verb for verb, way in by.items() if way == "shared memory"} == (
        set() if messages else {"broadcast", "all_to_all"}
    )
    assert by["all_reduce ring"] == "ring of MPI messages"
    assert (by["send"], by["gather"]) == ("MPI", "MPI messages")
    assert all(row["raw_seconds"] > 0 for row in level["rows"] if row["verb"] != "all_reduce ring")
