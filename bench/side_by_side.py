"""How fast is the main model beside PyTorch on the same cores? Prints one table, writes one JSON.

    python bench/side_by_side.py [--models tiny small] [--rounds 3]

Every competitor is a job of its own. Jobs take turns, round by round, so that all see the same machine; a figure is the
median over rounds of the median step. The batch is 8 x 256 tokens in all, AdamW in fp32, one thread per rank unless
said. Without PyTorch only our own rows are there.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = str(Path(__file__).with_name("gpt.py"))
TOKENS = 8 * 256


@dataclass(frozen=True)
class Job:
    library: str
    strategy: str
    ranks: int
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.library} {self.strategy}, {self.ranks} x {self.threads}"


JOBS = [
    Job("torch", "single", 1),
    Job("torch", "single", 1, 2),
    Job("torch", "ddp", 2),
    Job("torch", "fsdp", 2),
    Job("fsdpx", "ddp", 1),
    Job("fsdpx", "ddp", 1, 2),
    Job("fsdpx", "ddp", 2),
    Job("fsdpx", "zero1", 2),
    Job("fsdpx", "fsdp", 2),
]
AGAINST = {("ddp", 1, 1): ("single", 1, 1), ("ddp", 1, 2): ("single", 1, 2), ("ddp", 2, 1): ("ddp", 2, 1)}
AGAINST |= {("zero1", 2, 1): ("ddp", 2, 1), ("fsdp", 2, 1): ("fsdp", 2, 1)}


def run(job: Job, model: str, steps: int) -> dict[str, Any]:
    """One job from launch to end; raises if it fails."""
    threads = str(job.threads)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "BENCH_START": str(time.time()),
    }
    command = [sys.executable, WORKER, job.library, "--model", model, "--strategy", job.strategy]
    command += ["--steps", str(steps), "--threads", threads]
    if job.library == "fsdpx":
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        starts = [([str(mpiexec), "-n", str(job.ranks), *command], environ)]
    else:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": str(job.ranks)}
        starts = [(command, {**environ, **place, "RANK": str(r)}) for r in range(job.ranks)]
    running = [subprocess.Popen(c, env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c, e in starts]
    said = [p.communicate(timeout=900) for p in running]
    if any(p.returncode for p in running):
        raise RuntimeError(f"{job.name} failed:\n" + "\n".join(err for _, err in said))
    return json.loads(said[0][0].splitlines()[-1])


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def table(model: str, results: dict[Job, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    rates = {
        job: statistics.median(TOKENS / statistics.median(r["seconds"]) for r in rs) for job, rs in results.items()
    }
    for job, rounds in results.items():
        other = AGAINST.get((job.strategy, job.ranks, job.threads)) if job.library == "fsdpx" else None
        rival = next(
            (j for j in rates if other and j.library == "torch" and (j.strategy, j.ranks, j.threads) == other), None
        )
        rows.append(
            {
                "model": model,
                "job": job.name,
                "tokens_per_second": round(rates[job]),
                "ratio": round(rates[job] / rates[rival], 2) if rival else None,
                "against": rival.name if rival else None,
                "peak_rss_mib_per_rank": round(statistics.median(max(r["peaks"]) for r in rounds) / 2**20),
                "first_step_s": round(statistics.median(r["first"] for r in rounds), 1),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    head = f"{'model':6} {'ranks x threads':22} {'tokens/s':>9} {'ratio':>6}  {'against':22}"
    lines = [f"{head} {'RSS MiB':>8} {'first step s':>12}"]
    for r in rows:
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else ""
        lines.append(
            f"{r['model']:6} {r['job']:22} {r['tokens_per_second']:>9,} {ratio:>6}  {r['against'] or '':22} "
            f"{r['peak_rss_mib_per_rank']:>8,} {r['first_step_s']:>12}"
        )
    return "\n".join(lines)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--models", nargs="+", default=["tiny", "small"], choices=("tiny", "small"))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--json", default=str(Path(__file__).parent / "results" / "side_by_side.json"))
    args = p.parse_args()
    jobs = [j for j in JOBS if j.library == "fsdpx" or importlib.util.find_spec("torch")]
    rows = []
    for model in args.models:
        results: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
        for turn in range(args.rounds):
            for job in jobs:
                print(f"{model}, round {turn + 1} of {args.rounds}: {job.name}", file=sys.stderr, flush=True)
                results[job].append(run(job, model, args.steps if model == "tiny" else max(args.steps // 2, 3)))
        rows += table(model, results)
        print(show(rows), file=sys.stderr, flush=True)
    print(show(rows))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    Path(args.json).write_text(json.dumps({"machine": machine, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
