# The commands of a developer; `make help` lists them. CI runs the same ones.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TASK ?= CartpoleBalance
ARGS ?=
WORKERS ?= 2
UV_PYTHON ?= 3.11
export UV_PYTHON

# A uv on PATH may be too old, or a shim with nothing behind it. `uv cache dir` fails in both
# cases, because it reads `required-version` from pyproject.toml.
UV := $(shell uv cache dir >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)
# Recipes come after `setup`, so they need not look at the environment again.
RUN := $(UV) run --no-sync
# Any Python that starts can make the environment that holds uv. Evaluated only if it is needed.
BOOTSTRAP_PYTHON = $(shell for python in python3.11 python3 python; do \
	$$python -c "" 2>/dev/null && echo $$python && break; done)

.PHONY: help setup format lint types layers docs test build wheels extension check train bench bump clean uv-path

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(filter .tools/bin/uv,$(UV)) ## Install uv if it is missing, then everything from the lock
	$(UV) sync --locked

.tools/bin/uv:
	$(BOOTSTRAP_PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet "uv>=0.9"

format: setup ## Format the code and apply safe lint fixes
	$(RUN) ruff check --fix-only --quiet
	$(RUN) ruff format

lint: setup ## Check format and lint rules
	$(RUN) ruff format --check
	$(RUN) ruff check

types: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1 # else it asks the index for a newer pyright
types: setup ## Check types
	$(RUN) pyright

layers: setup ## Check which package may import which
	$(RUN) lint-imports --no-cache

docs: setup ## Build the site into docs/_build/html; warnings are errors
	$(RUN) sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs docs/_build/html

test: setup ## Run all tests and docstring examples; pass options in ARGS
	$(RUN) pytest -n $(WORKERS) $(ARGS)

build: setup ## Build sdists and wheels of the five packages into dist/
	rm -rf dist
	$(UV) build --all-packages --no-sources --quiet

wheels: build ## Check each wheel alone in a fresh environment, and run its tests there
	$(RUN) python scripts/check_wheels.py --workers $(WORKERS)

extension: build ## Build the package in examples/ on our wheels alone; run its tests, train its task
	$(RUN) python scripts/check_extension.py

check: lint types layers docs test wheels extension ## Run all of the checks above

train: setup ## Train on TASK (default CartpoleBalance); pass options in ARGS
	$(RUN) nnxppo train $(TASK) $(ARGS)

bench: setup ## Measure speed, and save the table for docs/benchmarks.md; pass options in ARGS
	$(RUN) python benchmarks/bench.py $(ARGS)

bump: setup ## Set the version of all packages and their pins: make bump VERSION=0.2.0
	$(RUN) python scripts/bump.py "$(VERSION)"
	$(UV) lock

clean: ## Delete what the commands above made, apart from trained runs
	rm -rf .venv .venv-* .tools dist docs/_build .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

uv-path:
	@echo $(UV)
