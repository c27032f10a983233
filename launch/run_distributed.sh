#!/usr/bin/env bash
# Ranks on this machine, on hosts over ssh, or in an allocation, with the launcher that is there: all else is `fsdpx run`.
#
#   launch/run_distributed.sh -n 4 train.py --steps 100
#   launch/run_distributed.sh -n 8 --hostfile hosts train.py   # the same paths on every host, ssh without a password
#   PYTHON=/opt/python/bin/python launch/run_distributed.sh -n 4 train.py
set -euo pipefail

if (( $# == 0 )); then
  echo "usage: $0 -n RANKS [options of fsdpx run] script.py [arguments]" >&2
  exit 2
fi

# The environment of this folder, if it has one and none is active.
if [[ -z ${PYTHON:-} && -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]]; then
  PYTHON=.venv/bin/python
fi

# A shell between would not hand on TERM: exec leaves none. Ranks have no standard input: it may never end.
exec "${PYTHON:-python}" -m fsdpx run "$@" </dev/null
