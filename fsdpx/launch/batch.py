"""`fsdpx run --print-sbatch`: a batch file for Slurm that starts the same job, and again when its time is over."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from fsdpx.errors import LaunchError
from fsdpx.launch.options import LaunchConfig

__all__ = ["sbatch"]

_NOTICE = 60
"""Slurm may send the signal this many seconds early, never late; added to the time to save in."""
_TEXT = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
{threads}#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out --open-mode=append
#SBATCH --signal=B:USR1@{notice} --requeue
set -uo pipefail

# Slurm sends USR1 to this shell {notice} s before the time limit, and TERM when it cancels the job or needs its nodes.
# The ranks save, and the job ends with 85. After USR1 it is queued again here, after TERM by Slurm if it is to be.
python -m fsdpx {words} & job=$!
requeue=
trap 'requeue=yes; heard=yes; kill -USR1 $job' USR1
trap 'heard=yes; kill -USR1 $job' TERM
heard=yes
while [[ $heard ]]; do heard=; wait $job; status=$?; done  # a trap interrupts wait
[[ $requeue ]] && (( status == 85 )) && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""


def sbatch(config: LaunchConfig, program: Sequence[str]) -> str:
    """The text of the file; LaunchError for a word with a line break: a scheduler could read what is after it."""
    nodes, per_node = config.spread(config.ranks) or (1, config.ranks)
    threads = "" if config.threads is None else f"#SBATCH --cpus-per-task={config.threads}\n"
    name = _name(program)
    return _TEXT.format(
        name=name, nodes=nodes, per_node=per_node, threads=threads, notice=math.ceil(config.grace) + _NOTICE,
        words=shlex.join(_of_one_line(["run", *_options(config), *program])),
    )  # fmt: skip


def _name(program: Sequence[str]) -> str:
    """Of the job: its script's, in characters that mean nothing to a shell or a scheduler."""
    return re.sub(r"[^\w.+-]", "_", Path(next(word for word in program if word != "-m")).stem)


def _of_one_line(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if any(not char.isprintable() for char in word):
            raise LaunchError(f"{word!r} has a line break or another control character: a batch file cannot hold it")
    return words


def _options(config: LaunchConfig) -> Iterator[str]:
    """Those of `fsdpx run` that say the same."""
    for one in fields(config):
        value = getattr(config, one.name)
        if value != one.default:
            yield "--nproc-per-node" if one.name == "per_node" else f"--{one.name.replace('_', '-')}"
            yield from [] if value is True else [str(value)]
