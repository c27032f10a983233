"""Real elastic jobs whose ranks are killed or stopped on purpose, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from jobs_threads import ROWS, make
from jobs_ulfm import Done, job
from trials import none_left

from fsdpx import ElasticConfig, init, spawn
from fsdpx.errors import CheckpointError
from fsdpx.testing.chaos import StepLog

__all__ = ["BEGINS", "POINTS", "Death", "Plan", "Trial", "demand", "drawn", "run"]

STEPS = 10
rng = np.random.default_rng(1)
BATCHES = [(rng.standard_normal((ROWS, 6)), rng.integers(0, 3, ROWS)) for _ in range(STEPS)]
BEGINS, SAVING = "recovery: begins", "saving"
POINTS = (
    BEGINS, "recovery: the others are found", "recovery: all ranks have said what they hold",
    "recovery: the new trainer is there", "recovery: state has moved", "recovery: there are copies again",
)  # fmt: skip
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from trials_elastic import main
main()
"""


@dataclass(frozen=True)
class Death:
    """What rank `rank` (as they were numbered when the job began) does to itself `after` seconds after its action
    number `at`, from 1, or the first time that the text `at` is announced. kind: kill, stop, leave (sys.exit), end
    (os._exit) or loop (for ever)."""

    rank: int
    at: int | str
    after: float = 0.0
    kind: str = "kill"

    def __str__(self) -> str:
        later = f" + {1000 * self.after:.1f} ms" if self.after else ""
        return f"{self.kind} {self.rank}@{self.at}{later}"


@dataclass(frozen=True)
class Plan:
    """A job: STEPS steps, a checkpoint before step number `save`, from 0."""

    ranks: int
    strategy: str = "fsdp"
    every: int = 2
    save: int = STEPS // 2
    background: bool = False
    deaths: tuple[Death, ...] = ()

    def __str__(self) -> str:
        how = "background" if self.background else "foreground"
        deaths = ", ".join(map(str, self.deaths))
        return f"{self.ranks} x {self.strategy}, every {self.every}, {how} save at {self.save}; {deaths}"


@dataclass(frozen=True)
class Trial:
    """What became of a plan. Of each rank that lived to the end, `Result` as JSON. died: rank -> when, seconds since
    1970. ledger: rank -> (step, loss) of what it returned to its caller, also of ranks that died."""

    plan: Plan
    done: Done
    results: list[dict[str, Any]]
    died: dict[int, float]
    ledger: dict[int, list[tuple[int, str]]]
    folder: Path
    left: bool

    @property
    def detections(self) -> list[float]:
        """Seconds from each death to the moment when the first rank heard of it; deaths during recoveries left out."""
        heard = sorted(when for result in self.results for when in result["begins"])
        spans = [(b, e) for result in self.results for b, e in result["spans"]]
        calm = [d for d in self.died.values() if not any(b <= d <= e for b, e in spans)]
        return [min(h for h in heard if h > d) - d for d in calm if any(h > d for h in heard)]

    @property
    def recoveries(self) -> list[float]:
        """Seconds, the most of all ranks."""
        return [max(some) for some in zip(*(result["seconds"] for result in self.results), strict=True)]


# -- the job ---------------------------------------------------------------------------------------------------------


class Doom:
    """An observer: carries out the deaths of its rank, and keeps the time of what is announced."""

    def __init__(self, born: int, deaths: tuple[Death, ...]) -> None:
        self.born, self.deaths = born, [death for death in deaths if death.rank == born]
        self.actions = 0
        self.said: list[tuple[str, float]] = []

    def __call__(self, action: object) -> None:
        at: int | str
        if isinstance(action, str):
            self.said.append((action, time.time()))
            at = action
        else:
            self.actions += 1
            at = self.actions
        for death in [death for death in self.deaths if death.at == at]:
            self.deaths.remove(death)
            if death.after:
                later = threading.Timer(death.after, self.carry_out, [death])
                later.daemon = True
                later.start()
            else:
                self.carry_out(death)

    def carry_out(self, death: Death) -> None:
        note = Path(f"dies-{self.born}")
        note.write_text(str(time.time()))
        note.rename(f"died-{self.born}")
        if death.kind == "leave":
            sys.exit(0)
        if death.kind == "end":
            os._exit(0)
        while death.kind == "loop":
            pass
        os.kill(os.getpid(), signal.SIGKILL if death.kind == "kill" else signal.SIGSTOP)


def train(comm: Any, plan: Plan, folder: Path) -> dict[str, Any]:
    """What each rank does, a process or a thread."""
    born = comm.rank
    trainer = make(comm, plan.strategy, elastic=ElasticConfig(every=plan.every, copies=plan.ranks - 1))
    doom = Doom(born, plan.deaths)
    trainer.inspect.engine.add_observer(doom)
    ledger, before = StepLog(folder / "ledger"), 0
    for step, (x, y) in enumerate(BATCHES):
        if step == plan.save:
            trainer.save(folder / "saved", background=plan.background)
            before = len(trainer.call_runner.recoveries)
        ledger.record_step(0, born, step, trainer.step(x, y))
    try:
        trainer.call_runner.wait_for_background_save()
    except CheckpointError as error:
        if "given up when a rank died" not in str(error):
            raise
    seconds = [happened.seconds for happened in trainer.call_runner.recoveries]
    begins = [when for text, when in doom.said if text == BEGINS]
    result = {
        "born": born, "fingerprint": trainer.inspect.compute_fingerprint(), "steps": trainer.global_step,
        "actions": doom.actions, "recoveries": [str(r) for r in trainer.call_runner.recoveries],
        "lost": [r.lost for r in trainer.call_runner.recoveries], "seconds": seconds, "begins": begins,
        "spans": [(b, b + s) for b, s in zip(begins, seconds, strict=True)],
        "undisturbed save": before == len(trainer.call_runner.recoveries), "said": doom.said,
    }  # fmt: skip
    trainer.close()
    return result


def main() -> None:
    """The job's `python`: the plan is in plan.json of the working directory, the result of each rank will be."""
    said = json.loads(Path("plan.json").read_text())
    plan = Plan(**said | {"deaths": tuple(Death(**death) for death in said["deaths"])})
    result = train(init(), plan, Path())
    Path(f"result-{result['born']}").write_text(json.dumps(result))


# -- the oracle ------------------------------------------------------------------------------------------------------


@cache
def calm(ranks: int = 1, strategy: str = "fsdp") -> dict[str, Any]:
    """An undisturbed run on thread ranks. Its bits are those of every plan: `reproducible_chunks` is fixed."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        first = spawn(train, ranks, Plan(ranks, strategy), Path(place), survive=True)[0]
        return first | {"losses": StepLog(Path(place, "ledger")).read_starts()[0][0]}


def drawn(seed: int) -> Plan:
    """A function of the seed: up to ranks - 1 deaths at any action, at any point of a recovery, beside a save."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    strategy = draw.choice(["ddp", "zero1", "fsdp", *(["hybrid"] if ranks == 4 else [])])
    actions = calm(ranks, strategy)["actions"]
    deaths = []
    for rank in draw.sample(range(ranks), draw.randint(1, ranks - 1)):
        at = draw.choice([draw.randint(1, actions), draw.choice([*POINTS, SAVING]) if deaths else SAVING])
        if isinstance(at, str) and not deaths and draw.random() < 0.5:
            at = draw.randint(1, actions)
        after = draw.choice([0.0, draw.random() * (0.03 if at == SAVING else 0.003)])
        deaths.append(Death(rank, at, after))
    every, background = draw.randint(1, 3), draw.random() < 0.5
    return Plan(ranks, strategy, every, draw.randrange(1, STEPS), background, tuple(deaths))


def run(plan: Plan, folder: Path, seconds: float = 180.0, **variables: str) -> Trial:
    """Start the job and wait for its end; subprocess.TimeoutExpired if it hangs."""
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    done = job(folder, PROGRAM, plan.ranks, seconds=seconds, TMPDIR=str(folder / "tmp"), **variables)
    left = not none_left(folder)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*"))]
    died = {int(path.name.partition("-")[2]): float(path.read_text()) for path in folder.glob("died-*")}
    ledger = StepLog(folder / "ledger").read_starts().get(0, {})
    return Trial(plan, done, results, died, ledger, folder, left)


def demand(trial: Trial) -> None:
    """AssertionError unless all that lived ended well, with the bits of an undisturbed run."""
    plan, wanted, done = trial.plan, calm(), trial.done
    assert done.status == 0, f"status {done.status}\n{done.err}"
    assert "Traceback" not in done.err, done.err
    assert not trial.left, "processes are left over"
    assert {result["born"] for result in trial.results} == set(range(plan.ranks)) - set(trial.died), done.err
    for result in trial.results:
        assert result["steps"] == STEPS
        assert result["fingerprint"] == wanted["fingerprint"], f"rank {result['born']} has other bits"
    for rank, entries in trial.ledger.items():
        assert entries == wanted["losses"][: len(entries)], f"rank {rank}: {entries}"
        assert len(entries) == STEPS or rank in trial.died, f"rank {rank} made {len(entries)} steps"
    assert len({json.dumps(result["lost"]) for result in trial.results}) == 1, "they tell different stories"
    heard_of = {rank for lost in trial.results[0]["lost"] for rank in lost}
    records = [path for pattern in ("fsdpx-*", "fsdpx-*/*") for path in trial.folder.glob(f"tmp/{pattern}")]
    assert records == [] or heard_of < set(trial.died), f"records are left over: {records}"
    _demand_checkpoint(trial)


def _demand_checkpoint(trial: Trial) -> None:
    """What is there can be gone on from, to the same end; it is there unless a death came in between."""
    saved = trial.folder / "saved"
    must = not trial.plan.background or trial.results[0]["undisturbed save"]
    assert saved.exists() or not must, "there is no checkpoint"
    if saved.exists():
        assert spawn(_gone_on, 1, trial.plan.save, saved)[0] == calm()["fingerprint"], "the checkpoint has other bits"


def _gone_on(comm: Any, step: int, saved: Path) -> str:
    trainer = make(comm, elastic=False)
    trainer.load(saved)
    assert trainer.global_step == step
    for x, y in BATCHES[step:]:
        trainer.step(x, y)
    return str(trainer.inspect.compute_fingerprint())


def summary(what: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{what}: none"
    p95 = sorted(seconds)[int(0.95 * len(seconds))]
    middle, late, last = (1000 * s for s in (median(seconds), p95, max(seconds)))
    return f"{what}: {len(seconds)}, median {middle:.0f} ms, p95 {late:.0f} ms, most {last:.0f} ms"
