# Every target sets itself up: all that a fresh machine needs is Python with venv, pip, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-full lint bench format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(READY)  ## train a small GPT on real text, pipelined over two local ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

test: lint  ## lint, types, and tests over every pair of values
	$(BIN)/python -m pytest -m "not full"

test-full: lint  ## lint, types, and tests over every combination of values
	$(BIN)/python -m pytest

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## what an action, a split backward, a plan, ZeRO and tracing cost, beside torch's
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/split.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zero.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/tracing.py

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and the caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Touched last, so that a set-up that broke off starts over.
$(READY): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@
