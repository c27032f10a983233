#!/usr/bin/env bats
# The scripts of launch/, with a stand-in for Python that says what it was called with. LAUNCH: their folder.

setup() {
  cd "$BATS_TEST_TMPDIR" || return
  mkdir -p .venv/bin bin
  echo "PATH=$PWD/bin:$PATH" > .venv/bin/activate
  stand_in bin/python 'echo "any: $*"'
  PATH="$PWD/bin:$PATH"
  unset PYTHON VIRTUAL_ENV
  export SLURM_NNODES=2 SLURM_NTASKS_PER_NODE=2 SLURM_JOB_ID=17
}

stand_in() {
  printf '#!/usr/bin/env bash\n%s\n' "$2" > "$1"
  chmod +x "$1"
}

# Start a batch script, and send it a signal when its ranks have begun.
interrupt() {
  stand_in bin/scontrol 'echo "$@" > requeued'
  stand_in bin/python 'trap "sleep 0.2; exit 85" USR1; touch begun; for i in {1..1000}; do sleep 0.05; done'
  bash "$LAUNCH/slurm/requeue.sbatch" train.py & job=$!
  until [[ -e begun ]]; do sleep 0.02; done
  kill "-$1" $job
  status=0
  wait $job || status=$?
}

@test "without arguments the usage is printed" {
  run bash "$LAUNCH/run_distributed.sh"
  [[ $status == 2 ]]
  [[ $output == *"run_distributed.sh -n RANKS [options of fsdpx run] script.py [arguments]"* ]]
}

@test "the environment of the folder is taken where none is active, and PYTHON before it" {
  stand_in .venv/bin/python 'echo "own: $*"'
  [[ $(bash "$LAUNCH/run_distributed.sh" -n 2 train.py "a b") == "own: -m fsdpx run -n 2 train.py a b" ]]
  [[ $(VIRTUAL_ENV=x bash "$LAUNCH/run_distributed.sh" -n 2 train.py) == "any: -m fsdpx run -n 2 train.py" ]]
  stand_in named 'echo "named: $*"'
  [[ $(PYTHON=./named bash "$LAUNCH/run_distributed.sh" -n 2 train.py) == "named: -m fsdpx run -n 2 train.py" ]]
}

@test "ranks have no standard input, and their status is the script's" {
  stand_in bin/python 'read -r && exit 9; exit 3'
  run bash "$LAUNCH/run_distributed.sh" -n 2 train.py <<< "a line"
  [[ $status == 3 ]]
}

@test "before the time limit the ranks save, and the job is queued again" {
  interrupt USR1
  [[ $status == 85 && $(< requeued) == "requeue 17" ]]
}

@test "a job that is cancelled saves, and is not queued again" {
  interrupt TERM
  [[ $status == 85 && ! -e requeued ]]
}
