#!/usr/bin/env bash
# Ranks on this machine, or on the hosts of a hostfile, with whichever mpiexec comes first.
#
#   launch/mpiexec.sh -n 4 train.py --steps 100
#   HOSTFILE=hosts launch/mpiexec.sh -n 8 train.py      # the same paths on every host, ssh without a password
set -euo pipefail

PYTHON=${PYTHON:-python}
HOSTFILE=${HOSTFILE:-}

if [[ ${1:-} != -n || $# -lt 3 ]]; then
  echo "usage: $0 -n RANKS script.py [arguments]" >&2
  exit 2
fi
ranks=$2
shift 2

# The mpiexec beside this Python belongs to the MPI that mpi4py loads from a wheel. Another one would start
# ranks that do not find each other.
bin=$(dirname "$("$PYTHON" -c 'import sys; print(sys.executable)')")
mpiexec=mpiexec
[[ -x $bin/mpiexec ]] && mpiexec=$bin/mpiexec

flags=()
if "$mpiexec" --version 2>&1 | grep -qiE 'open ?mpi|openrte|prte'; then
  # Open MPI refuses more ranks than cores, and binds each rank to one core, which leaves BLAS no threads.
  flags+=(--map-by :OVERSUBSCRIBE --bind-to none)
  # Over ssh it forwards only the variables that are named.
  flags+=(-x FSDPX_EXPECT_SIZE)
  [[ -n $HOSTFILE ]] && flags+=(--hostfile "$HOSTFILE")
else
  [[ -n $HOSTFILE ]] && flags+=(-f "$HOSTFILE")
fi

export FSDPX_EXPECT_SIZE=$ranks
# No standard input: with some launchers it never ends, and a rank that reads it waits for ever.
exec "$mpiexec" "${flags[@]}" -n "$ranks" "$PYTHON" -m mpi4py "$@" </dev/null
