# Everything that is done with this repository. `make help` lists it.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
BENCHMARKS ?= step loss loader checkpoint recover startup
IMAGE ?= pretrain
DEVICE ?= cpu
BUILDER ?= $(shell command -v docker || command -v podman || echo buildah)

.PHONY: help install quickstart quickstart-translation test test-cluster check bench docs image clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /|/' | while IFS='|' read -r name text; do \
	  printf '  make %-23s %s\n' "$$name" "$$text"; done

install: $(STAMP)  ## make .venv with everything in it; does nothing when it is up to date

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: PYTHON=$(PYTHON) is missing or older than 3.11. Set PYTHON: make install PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "== install: packages into $(VENV) (one to five minutes)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

quickstart: $(STAMP)  ## real text to a trained model on this machine, 4 to 10 minutes
	@$(BIN)/python -m launch.quickstart

quickstart-translation: $(STAMP)  ## messages of programs, English to German: pairs, training, translations, BLEU
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[translation]' -c constraints.txt
	@$(BIN)/python -m launch.quickstart_translation

test: check  ## format, lint, types, contracts, then every test
	@tests/system_packages
	@echo "== tests"
	@$(BIN)/python -m pytest -n $(WORKERS)

test-cluster: $(STAMP)  ## the slow tests only: campaigns over nodes and faults
	@echo "== slow tests"
	@$(BIN)/python -m pytest -m slow --timeout 1800

check: $(STAMP)  ## format, lint, types and import contracts, under a minute
	@echo "== format";    $(BIN)/ruff format --check .
	@echo "== lint";      $(BIN)/ruff check .
	@echo "== types";     $(BIN)/mypy
	@echo "== contracts"; $(BIN)/lint-imports --no-cache --no-logo

bench: $(STAMP)  ## measure: BENCHMARKS="step loss" QUICK=1 choose what and how long
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks $$name $(if $(QUICK),--quick); done

docs: $(STAMP)  ## README, configs and command list against the code
	@$(BIN)/python -m pytest tests/project

image: ## container image; DEVICE=cuda for GPUs
	$(BUILDER) build -f docker/Dockerfile --target $(DEVICE) $(if $(BASE),--build-arg BASE=$(BASE)) -t $(IMAGE):$(DEVICE) .

clean: ## remove what quickstart, tests and tools left; keeps .venv and runs/
	rm -rf quickstart translation build dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
