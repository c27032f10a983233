"""Elastic training under random kills of real ranks. `python chaos_elastic.py 60 [--first SEED] [--jobs 1]`.

A line per seed, then how long it took to hear of deaths and to go on. The status is the number of seeds that failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs_ulfm import unable
from trials_elastic import Trial, calm, demand, drawn, run, summary


def one(seed: int) -> Trial | None:
    """Prints what became of it; None if something that must hold does not."""
    plan, begin = drawn(seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-elastic-") as folder:
        try:
            trial = run(plan, Path(folder))
            demand(trial)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            detail = error.stderr or "" if isinstance(error, subprocess.TimeoutExpired) else ""
            print(f"seed {seed}: {plan}: FAILED\n{traceback.format_exc()}{detail}", flush=True)
            return None
    happened = "; ".join(trial.results[0]["recoveries"]) or "nothing happened"
    print(f"seed {seed}: {plan}: {happened} ({time.monotonic() - begin:.0f} s)", flush=True)
    return trial


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("seeds", type=int)
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--jobs", type=int, default=1, help="at once")
    args = p.parse_args()
    if reason := unable():
        sys.exit(f"chaos needs ranks that survive each other: {reason}; use make chaos-elastic")
    os.environ["FSDPX_TUNE"] = "0"  # as in the jobs: another BLAS library has other bits
    calm()
    seeds = range(args.first, args.first + args.seeds)
    for seed in seeds:
        drawn(seed)  # its undisturbed run is made here: thread ranks of two runs at once would get in each other's way
    with ThreadPoolExecutor(args.jobs) as pool:
        trials = list(pool.map(one, seeds))
    good = [trial for trial in trials if trial is not None]
    print(summary("deaths heard of", [s for trial in good for s in trial.detections]))
    print(summary("recoveries", [s for trial in good for s in trial.recoveries]))
    replayed = [r for trial in good for r in trial.results[0]["recoveries"] if "made again" in r]
    print(f"{len(replayed)} recoveries made steps again; {len(trials) - len(good)} of {len(trials)} seeds failed")
    return len(trials) - len(good)


if __name__ == "__main__":
    sys.exit(main())
