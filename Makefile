# make train: train the default GPT on a ring, from nothing.   make test: everything the tests hold.
# ARGS adds Hydra overrides or pytest arguments: make train ARGS="trainer.steps=500", make test ARGS="-k mask".

PYTHON ?= python3
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
RANKS ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
BIN := .venv/bin

.PHONY: setup train test lint

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/torchrun --nproc_per_node=$(RANKS) train/run.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
