# Every target makes the environment it needs: a virtual environment in $(VENV), which nothing else uses.
#
#   make test                   in ./.venv, made if it is not there
#   make test VENV=~/envs/tt    in another folder
#   make test ACTIVE=1          in the environment that is active now; nothing is installed into it
#   make test TORCH=torch==2.12.0   another torch than the default (any pip requirement)

PYTHON ?= python3
VENV ?= .venv
# One exact version: a range may resolve to a build with gigabytes of GPU libraries. An installed torch is left alone.
TORCH ?= torch==2.13.0
EXTRAS = train,peft,trl,dev
PYTEST_ARGS ?=
# A process per core and one thread in each: the tests' models are too small for more.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal

ifdef ACTIVE
PY := $(shell command -v python || command -v python3)
READY = active-environment
else
PY = $(abspath $(VENV))/bin/python
READY = $(VENV)/.installed
endif

.PHONY: help demo test test-full pytest-fast pytest-all test-verl test-axolotl bench lint clean-venv active-environment
.DEFAULT_GOAL := help

help:
	@echo "make demo       train the built-in model on branching data, as a tree and linearly; a table and a page"
	@echo "make test       lint, types and all tests but the slow ones"
	@echo "make test-full  lint, types and all tests"
	@echo "make test-verl  verl's engine with and without trees, in an environment of its own"
	@echo "make test-axolotl  Axolotl's trainer with and without the plugin, in an environment of its own"
	@echo "make bench      run all benchmarks, write their rows to benchmarks/results, write BENCHMARKS.md"
	@echo "make lint       ruff and pyright alone"
	@echo "variables: VENV=folder, ACTIVE=1 (the active environment), PYTHON=python3.12, TORCH=torch==2.13.0, PYTEST_ARGS=..."

demo: $(READY)
	$(PY) -m examples.demo.demo

# Lint and types run beside the tests: pyright alone would leave all cores but one idle.
test:
	$(MAKE) -j2 --no-print-directory lint pytest-fast

test-full:
	$(MAKE) -j2 --no-print-directory lint pytest-all

pytest-fast: $(READY)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

pytest-all: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

# verl wants an older transformers, so it has an environment of its own.
test-verl: VENV = .venv-verl
test-verl:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q verl==0.9.1 transformers==5.10.4 fastapi uvicorn pytest beartype -e .
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_verl.py

# Axolotl's own requirements hold much that its trainer does not need.
AXOLOTL = transformers==5.16.1 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 trl==1.9.0 evaluate==0.4.1 triton \
	addict fire art colorama einops numba pillow scipy typer python-dotenv schedulefree posthog wandb nvidia-ml-py lm_eval==0.4.11
test-axolotl: VENV = .venv-axolotl
test-axolotl:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q $(AXOLOTL) pytest beartype -e .
	$(VENV)/bin/python -m pip install -q --no-deps axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_axolotl.py

bench: $(READY)
	$(PY) benchmarks/run_all.py

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY) src

$(VENV)/.installed: pyproject.toml Makefile
	@$(PYTHON) -c "import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f'treetrain needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; name another: make ... PYTHON=python3.12')"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install "$(TORCH)"
	$(PY) -m pip install -e ".[$(EXTRAS)]"
	@touch $@

active-environment:
	@$(PY) -c "import treetrain, torch, transformers, peft, pytest, xdist, hypothesis, jaxtyping, beartype" || { \
	  echo "the active environment ($(PY)) lacks what is named above: pip install $(TORCH), then pip install -e '.[$(EXTRAS)]'"; exit 1; }

clean-venv:
	rm -rf $(VENV)
