# Everything here works on a machine that has only Python 3.11 and pip: what a target needs is installed into .venv
# first, once, and again when pyproject.toml, constraints.txt or requirements/ change.
#
#   make demo    the example, start to end (light: no peers)
#   make test    all checks, cheapest first
#   make lint    ruff, layers, groups         make bench   the benchmarks, minutes and GB
#   make types   mypy                         make clean   removes .venv, caches and build output
#
#   make e2e-refit       a Megatron and an FSDP2 trainer into a real vLLM on this CPU, ten versions each (half an hour)
#   make e2e-refit-tp8   64 query heads, 2 KV heads, TP8 into TP8: sixteen processes, 8 GB of memory
#
# Variables: PYTHON (the interpreter that makes .venv), TORCH_ARGS (extra arguments of `pip install torch`, for
# example --index-url of the build for your machine), PYTEST_ARGS (for example "-k qkv -x"), WORKERS (how many files
# of tests run side by side; 0 for one process, as --pdb wants it), BENCH_ARGS (for example --tiny: small models,
# seconds), E2E_ARGS (for example "--versions 2").

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
E2E_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check
PINS := pyproject.toml constraints.txt
PEERS := requirements/peers.txt requirements/peers-needs.txt

# vLLM pins what the peers need otherwise, so it has an environment of its own.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --quiet --disable-pip-version-check
VLLM_PINS := requirements/vllm.txt requirements/vllm-needs.txt requirements/vllm-constraints.txt

# Hundreds of processes import the same modules: they compile them once, whatever a container says.
unexport PYTHONDONTWRITEBYTECODE

# deepspeed chooses its accelerator when it is built and again when it is imported.
export DS_ACCELERATOR := cpu
export DS_BUILD_OPS := 0

.PHONY: help demo test lint types bench e2e-refit e2e-refit-tp8 clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^#\( \|$$\)//p' Makefile

demo: $(VENV)/.base
	$(PY) examples/demo.py

test: lint types
	$(PY) -m pytest --require-peers --numprocesses=$(WORKERS) --max-worker-restart=0 $(PYTEST_ARGS)

lint: $(VENV)/.full
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/lint-imports
	$(PY) -m shardweave lint groups --no-cache src/shardweave

types: $(VENV)/.full
	$(PY) -m mypy

bench: $(VENV)/.full
	for script in benchmarks/[!_]*.py; do echo "== $$script"; $(PY) "$$script" $(BENCH_ARGS); done

e2e-refit: $(VENV)/.full $(VLLM)/.done
	$(PY) tests/e2e/run.py $(E2E_ARGS)

e2e-refit-tp8: $(VENV)/.full $(VLLM)/.done
	$(PY) tests/e2e/run.py --case qwen3-tp8 $(E2E_ARGS)

# torch goes in first, alone: anything else that depends on it could choose another build.
$(VENV)/.base: $(PINS)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[transformers]'
	touch $@

# deepspeed asks for torch while it is built, so it is built with this environment's.
$(VENV)/.full: $(VENV)/.base $(PEERS)
	$(PIP) -c constraints.txt -e '.[dev]' -r requirements/peers-needs.txt
	$(PIP) --no-deps --no-build-isolation --use-pep517 -r requirements/peers.txt
	touch $@

$(VLLM)/.done: pyproject.toml constraints.txt $(VLLM_PINS)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(VLLM_PIP) -c requirements/vllm-constraints.txt -r requirements/vllm-needs.txt -e .
	$(VLLM_PIP) --no-deps -r requirements/vllm.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
