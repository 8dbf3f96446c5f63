# make train      trains the default GPT on a ring of ranks, from random weights.
# make test       runs the quick tests of every module: at most 5 minutes on two cores, no GPU needed.
# make test-slow  runs only the tests that `make test` leaves out.
# make test-all   runs every test.
# make lint       checks the style and the types of the code.
# WORKERS is the number of pytest processes. The tests of one file run in the same process, and the files start in alphabetical
# order. By default, pytest-xdist starts the files with few tests last, and would then wait for a single process that compiles.
# ARGS adds Hydra overrides or pytest arguments: make train ARGS="trainer.steps=500", make test ARGS="-k mask".

PYTHON ?= python3
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
WORKERS ?= 2
RANKS ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

.PHONY: setup train test test-slow test-all lint

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/torchrun --nproc_per_node=$(RANKS) train/run.py $(ARGS)

test: setup
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup
	$(PYTEST) -m slow $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
