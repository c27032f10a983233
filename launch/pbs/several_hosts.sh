#!/usr/bin/env bash
#PBS -N fsdpx
#PBS -l select=2:ncpus=32:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe
#
#   qsub -v SCRIPT=train.py launch/pbs/several_hosts.sh
#   qsub -v SCRIPT=train.py,ARGS="--steps 100" launch/pbs/several_hosts.sh
set -euo pipefail

# PBS starts a job in the home folder.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate

# One line for each rank: mpiprocs lines for each node.
ranks=$(wc -l <"$PBS_NODEFILE")

# ARGS is split at spaces on purpose: qsub passes one string.
# shellcheck disable=SC2086
exec python -m fsdpx run -n "$ranks" --hostfile "$PBS_NODEFILE" "$SCRIPT" ${ARGS:-}
