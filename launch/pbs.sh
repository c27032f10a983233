#!/usr/bin/env bash
#PBS -N fsdpx
#PBS -l select=2:ncpus=32:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe
#
#   qsub -v SCRIPT=train.py launch/pbs.sh
#   qsub -v SCRIPT=train.py,ARGS="--steps 100" launch/pbs.sh
set -euo pipefail

# PBS starts a job in the home folder.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate

# One line per rank: mpiprocs lines for each node.
ranks=$(wc -l <"$PBS_NODEFILE")
export FSDPX_EXPECT_SIZE=$ranks

# Hydra (MPICH, Intel MPI) reads the node file; an mpiexec that was built for PBS finds the nodes itself.
# With Open MPI write: mpiexec --hostfile "$PBS_NODEFILE" --bind-to none -x FSDPX_EXPECT_SIZE -n ...
# ARGS is split at spaces on purpose: qsub passes one string.
# shellcheck disable=SC2086
exec mpiexec -f "$PBS_NODEFILE" -n "$ranks" python -m mpi4py "$SCRIPT" ${ARGS:-} </dev/null
