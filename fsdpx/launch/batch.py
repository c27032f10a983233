"""`fsdpx run --print-batch`: print a batch script that starts the job under Slurm, PBS or LSF. The Slurm script
requeues a job that reaches its time limit."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsdpx.core.base import environment
from fsdpx.core.base.dataclass import dataclass, fields, replace
from fsdpx.core.base.messages import format_count
from fsdpx.errors import LaunchError
from fsdpx.launch.options import LaunchConfig

__all__ = ["BATCH_TEMPLATES", "NodeCores", "find_cores_per_node", "make_batch_script"]

_NOTICE_SECONDS = 60
"""Seconds added to the grace period. Slurm may send its signal up to this many seconds earlier than requested, but
never later."""
_SLURM = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --cpus-per-task={cores}
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out --open-mode=append
#SBATCH --signal=B:USR1@{notice} --requeue
##SBATCH --account=... --partition=... --mem=...
{about}set -uo pipefail

{environment}# Newer versions of srun do not take it from sbatch.
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-{cores}}}

# Slurm sends USR1 to this shell {notice} s before the time limit, and TERM when it
# cancels the job or needs its nodes. The ranks save, and the job ends with 85.
# After USR1 it is queued again here, after TERM by Slurm if it is to be.
requeue=
trap 'requeue=yes; heard=yes; kill -USR1 $!' USR1
trap 'heard=yes; kill -USR1 $!' TERM
{python} -m fsdpx {words} &
heard=yes
while [[ $heard ]]; do heard=; wait $!; status=$?; done  # a trap interrupts wait
[[ $requeue ]] && (( status == 85 )) && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
"""
_PBS = """\
#!/usr/bin/env bash
#PBS -N {name}
#PBS -l select={nodes}:ncpus={all_cores}:mpiprocs={per_node}
#PBS -l walltime=01:00:00
#PBS -j oe
{about}set -euo pipefail

# PBS starts a job in the home folder.
cd "$PBS_O_WORKDIR"
{environment}# At qdel and at the time limit ranks get TERM, and save if PBS waits long enough
# (kill_delay).
exec {python} -m fsdpx {words}
"""
_LSF = """\
#!/usr/bin/env bash
#BSUB -J {name}
#BSUB -n {ranks}
#BSUB -R "span[ptile={per_node}] affinity[core({cores})]"
#BSUB -W 01:00
#BSUB -wa USR1 -wt {minutes}
#BSUB -o {name}-%J.out
{about}set -euo pipefail

{environment}# LSF sends USR1 {minutes} min before the time limit, and the ranks save.
# Submit with: bsub < this file
exec {python} -m fsdpx {words}
"""
BATCH_TEMPLATES = {"slurm": (_SLURM, ""), "pbs": (_PBS, "$PBS_NODEFILE"), "lsf": (_LSF, "$LSB_DJOB_HOSTFILE")}
"""Batch system -> template of its batch script, and the environment variable that contains the path of the job's
hostfile ("" for Slurm, which needs no hostfile)."""


@dataclass(frozen=True)
class NodeCores:
    """Number of cores of a node, and where the number comes from.

    Attributes
    ----------
    cores : number of cores
    source : where the number comes from, as a phrase that can end a sentence, such as "as this machine has"
    """

    cores: int
    source: str


def find_cores_per_node() -> NodeCores:
    """Return the number of cores per node: the cores of the smallest Slurm node or, if Slurm is not installed, of this
    machine."""
    if sinfo := shutil.which("sinfo"):
        done = subprocess.run([sinfo, "-h", "-o", "%c"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if counts := [int(count) for count in re.findall(r"^(\d+)\+?$", done.stdout, re.M)]:
            return NodeCores(min(counts), "as Slurm's smallest node has (sinfo)")
    return NodeCores(os.cpu_count() or 1, "as this machine has")


def make_batch_script(
    system: str,
    config: LaunchConfig,
    program: Sequence[str],
    node_cores: NodeCores,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a batch script that starts `program` under the batch system "slurm", "pbs" or "lsf".

    `variables` are additional environment variables of the ranks. Raise LaunchError if an argument contains a line
    break, because a scheduler could interpret the text after it as a directive."""
    if config.hostfile is not None:
        raise LaunchError("a batch system chooses the hosts itself: leave --hostfile out")
    nodes, per_node = _choose_nodes_and_ranks_per_node(config, node_cores)
    cores = config.threads or max(1, node_cores.cores // per_node)
    text, hosts = BATCH_TEMPLATES[system]
    if config.backend != "gloo":
        config = replace(config, nodes=None if hosts else nodes, per_node=None)
    there = f' --hostfile "{hosts}"' if hosts and nodes > 1 else ""
    options = shlex.join(_require_no_control_characters(["run", *_iterate_nondefault_cli_options(config)]))
    words = f"{options}{there} {shlex.join(_require_no_control_characters(program))}"
    return text.format(
        name=_make_job_name(program), ranks=config.ranks, nodes=nodes, per_node=per_node, cores=cores,
        all_cores=per_node * cores, about=_make_request_comment(nodes, per_node, cores, node_cores), words=words,
        notice=math.ceil(config.grace) + _NOTICE_SECONDS, minutes=math.ceil((config.grace + _NOTICE_SECONDS) / 60),
        python=shlex.quote(sys.executable),
        environment="".join(
            f"{line}\n" for line in _require_no_control_characters([*_iterate_environment_lines(variables or {})])
        ),
    )  # fmt: skip


def _choose_nodes_and_ranks_per_node(config: LaunchConfig, node_cores: NodeCores) -> tuple[int, int]:
    """Return the number of nodes to request, and the number of ranks per node. If these numbers are not configured,
    choose the smallest number of nodes that provides one core for each thread."""
    if config.backend == "gloo":
        return config.count_hosts_and_ranks_per_host(config.ranks) or (1, config.ranks)
    most = max(1, node_cores.cores // (config.threads or 1))
    nodes, per_node = config.count_hosts_and_ranks_per_host(config.ranks) or (math.ceil(config.ranks / most), most)
    return nodes, min(per_node, math.ceil(config.ranks / nodes)) if config.per_node is None else per_node


def _make_request_comment(nodes: int, per_node: int, cores: int, node_cores: NodeCores) -> str:
    """Return a shell comment that states the requested ranks and cores, and the number of cores per node that was
    assumed."""
    where = "one node" if nodes == 1 else f"each of {nodes} nodes"
    asked = f"{format_count(per_node, 'rank')} on {where}, with {format_count(cores, 'core')} per rank"
    more = "" if per_node * cores <= node_cores.cores else f": {per_node * cores} cores, more than a node has"
    return f"# {asked}{more}.\n# Assumed: {format_count(node_cores.cores, 'core')} per node, {node_cores.source}.\n"


def _iterate_environment_lines(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield shell lines that recreate the current environment in the batch job: environment modules, the virtual
    environment and `variables`."""
    modules = environment.list_environment_modules()
    yield f"# module load {' '.join(modules)}" if modules else "# module load ...  (none is loaded here)"
    activate = Path(sys.prefix, "bin", "activate")
    if sys.prefix != sys.base_prefix and activate.exists():
        yield f"source {shlex.quote(str(activate))}"
    for name, value in variables.items():
        yield f"export {name}={shlex.quote(value)}"


def _make_job_name(program: Sequence[str]) -> str:
    """Return a job name: the name of the script or module, in which "_" replaces characters that a shell or scheduler
    could interpret."""
    name = program[1] if program[0] == "-m" else Path(program[0]).stem
    return re.sub(r"[^\w.+-]", "_", name)


def _require_no_control_characters(words: Sequence[str]) -> Sequence[str]:
    """Return `words`. Raise LaunchError if a word contains a line break or another control character, which could
    inject commands into the batch script."""
    for word in words:
        if any(not char.isprintable() for char in word):
            raise LaunchError(f"{word!r} has a line break or another control character: a batch file cannot hold it")
    return words


def _iterate_nondefault_cli_options(config: LaunchConfig) -> Iterator[str]:
    """Yield the command-line options of `fsdpx run` for the fields of `config` that differ from their defaults."""
    for one in fields(config):
        value = getattr(config, one.name)
        if value != one.default:
            yield "--nproc-per-node" if one.name == "per_node" else f"--{one.name.replace('_', '-')}"
            yield from [] if value is True else [str(value)]
