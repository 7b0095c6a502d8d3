# Everything runs in a virtual environment of its own, made on first use: Python >= 3.11, pip and make are all one needs.
PYTHON ?= python3
VENV ?= .venv
# Ranks are processes; with one thread each they share the cores instead of fighting over them.
export OMP_NUM_THREADS ?= 1
# Test files are shared out among this many processes, each with ranks of its own (1 to 4 at a time).
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.dpzoo-installed
SOURCES := dpzoo tests $(wildcard benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit lint format conformance bench natten clean

help: ## Print the targets.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# torch and torchvision (timm imports it) only fit each other in exact pairs, so they go first, alone, and pip then keeps
# them while it resolves the rest. natten, whose build imports torch, finds it there too.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "dpzoo needs Python >= 3.11, this is " + sys.version)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

setup: $(STAMP) ## Make the environment (the other targets do it by themselves).

demo: $(STAMP) ## Train a small ViT on real weather fields on 1 and 2 ranks and compare.
	$(BIN)/python -m dpzoo.cli demo

test: lint unit ## Lint, types, import arrows, then all tests.

unit: $(STAMP) ## The tests alone; make unit ARGS="-k conv".
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

lint: $(STAMP) ## Formatting, lint, import arrows, types.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(STAMP) ## Rewrite the sources in the house format and apply safe fixes.
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

conformance: $(STAMP) ## Walk torch's own op database (hours; it resumes where it stopped).
	$(BIN)/python -m tests.conformance $(ARGS)

bench: $(STAMP) ## Microseconds per op against plain torch and DTensor.
	$(BIN)/python benchmarks/overhead.py $(ARGS)

natten: $(STAMP) ## Optional, for CUDA: neighborhood attention kernels (their build imports torch).
	$(BIN)/python -m pip install --no-build-isolation --editable '.[natten]'

clean: ## Remove the environment and every cache (the record of `make conformance` in build/ stays).
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
