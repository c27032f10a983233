#!/usr/bin/env bash
#flux: --job-name=fsdpx
#flux: --nodes=2
#flux: --exclusive
#flux: --time-limit=1h
#flux: --output=fsdpx-{{id}}.out
#
#   flux batch launch/flux/several_hosts.sh 8 train.py --steps 100
set -euo pipefail

# Relative to the folder from which flux batch was called; it must be there on all nodes.
source .venv/bin/activate

# The batch job is a Flux instance of its own, in which fsdpx run takes flux run.
ranks=$1
shift
exec python -m fsdpx run -n "$ranks" --nodes 2 "$@"
