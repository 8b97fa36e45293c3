# `make demo` and `make test` need nothing before them but the clone. They share .venv, which scripts/set_up.py makes.
#
#   make setup PYTHON=/path/to/python3.12     with that Python
#   make setup ACCELERATOR=cpu|cuda           instead of what is found
#   make setup CHROMIUM=1                     also Chromium by apt-get, as root, for the tests of the pages
#   make setup BUBBLEWRAP=1                   also bubblewrap, likewise, for local sandboxes
#   make setup MEGATRON=1                     also megatron-core, for train_backend: megatron
#   make test CHROMIUM=0 BUBBLEWRAP=0         never installs these (by default as root, where apt-get is)
#   make demo ARGS="--seed 1"                 with other settings of the run

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint types test-unit test-reference test-integration test-dashboard test-pages e2e dashboard site image image-cpu doctor pin clean

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
# Processes of tests. Each takes the next file when it has finished one: tests/conftest.py.
JOBS := 2
BY_FILE := --dist loadfile --no-loadscope-reorder
PARALLEL := -n $(JOBS) $(BY_FILE)
# Tests below e2e wait for child processes a third of the time: three processes for two cores.
OVERSUBSCRIBED := -n $(shell expr $(JOBS) \* 3 / 2) $(BY_FILE)
# Tests of the pages wait for the browser, and for pages to settle, more than half the time.
PAGES := -n $(shell expr $(JOBS) \* 2) $(BY_FILE)
# tests/conftest.py puts the longest first.
E2E := tests/integration/weights tests/e2e
SLOW := tests/e2e/stack tests/integration tests/e2e
WITHOUT = $(shell $(PY) -m tests.browser > /dev/null || echo and not browser; command -v bwrap > /dev/null || echo and not sandbox)
# Whether network namespaces can be made, which stand for machines in tests.
WITHOUT += $(shell name=probe-$$$$; ip netns add $$name 2> /dev/null && ip netns del $$name || echo and not namespaces)
# Bytecode that is not kept would be compiled again by every process of every run.
unexport PYTHONDONTWRITEBYTECODE

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv: torch, vLLM and Ray for this machine (a few minutes the first time)
	@PYTHON="$(PYTHON)" ACCELERATOR="$(ACCELERATOR)" CHROMIUM="$(CHROMIUM)" BUBBLEWRAP="$(BUBBLEWRAP)" MEGATRON="$(MEGATRON)" scripts/set_up.sh

# On a GPU: vLLM's build for GPUs has no CPU engine, and kernels want attention heads of 64 numbers.
demo: setup  ## watch a small language model learn arithmetic on this machine (10 minutes, no GPU needed)
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  model=models/tiny-countdown-gpu; heads="--num-heads 2 --num-kv-heads 1"; \
	  where="--device cuda --share_gpus true --inference_num_workers 1 --trainer_num_workers 1"; \
	else \
	  model=models/tiny-countdown; heads=; where=; \
	fi; \
	echo "== the model: about a million parameters, made and warm-started here (kept in models/)"; \
	$(PY) -m telescope tiny-model --output $$model $$heads > /dev/null || exit; \
	echo "== the run"; \
	exec $(PY) train.py --config configs/examples/demo_countdown.yaml --model $$model $$where $(ARGS)

test test-all test-pages: export CHROMIUM ?= auto
test test-all test-unit test-integration e2e: export BUBBLEWRAP ?= auto
test test-all test-integration e2e: export MEGATRON ?= 1

# One recipe, so that the tiers run in this order whatever -j says, and the first that fails ends it.
test: setup  ## before every change lands: lint, types and all tests but the slow ones (about 24 minutes on two free cores)
	@echo "== lint";        $(MAKE) --no-print-directory run-lint
	@echo "== types";       $(MAKE) --no-print-directory run-types
	@echo "== dashboard";    $(MAKE) --no-print-directory run-dashboard
	@echo "== pages in a browser"; $(MAKE) --no-print-directory run-pages
	@echo "== integration"
	@$(PYTEST) -m "not e2e and not slow $(WITHOUT)" $(OVERSUBSCRIBED) tests/integration
	@echo "== unit, reference"
	@$(PYTEST) -m "not e2e and not slow $(WITHOUT)" $(OVERSUBSCRIBED) tests/reference tests/unit
	@echo "== e2e: Ray, vLLM and the trainer, for real"
	@$(PYTEST) -m "e2e and not slow $(WITHOUT)" $(PARALLEL) $(E2E)

test-all: test  ## also the slow tests, which rarely fail
	@echo "== slow"
	@$(PYTEST) -m "slow $(WITHOUT)" $(PARALLEL) $(SLOW)

lint: setup run-lint  ## ruff
types: setup run-types  ## mypy
test-unit: setup  ## unit tests (ARGS="-k name" for some)
	@$(PYTEST) -m "not slow $(WITHOUT)" $(PARALLEL) tests/unit $(ARGS)
test-reference: setup  ## every algorithm against loops written from the papers
	@$(PYTEST) tests/reference $(ARGS)
test-integration: setup  ## tests with a fake engine
	@$(PYTEST) -m "not e2e and not slow $(WITHOUT)" $(OVERSUBSCRIBED) tests/integration $(ARGS)
test-dashboard: setup run-dashboard  ## types and tests of the pages of `telescope ui`
test-pages: setup run-pages  ## the pages in Chromium (root on Debian: installs it)
e2e: setup  ## tests with Ray, vLLM and the trainer
	@$(PYTEST) -m "e2e and not slow $(WITHOUT)" $(PARALLEL) $(E2E) $(ARGS)

dashboard:  ## build the pages of `telescope ui` (without Node.js: download those of the newest release)
	@$(or $(PYTHON),python3) scripts/build_dashboard.py

IMAGE := telescope
DOCKER_BUILD = docker build --build-arg SOURCE_COMMIT=$(shell git rev-parse HEAD)
image:  ## build the Docker image for NVIDIA GPUs: docs/docker.md
	$(DOCKER_BUILD) --file docker/Dockerfile --build-arg MAX_JOBS=$(shell nproc) --tag $(IMAGE) .
image-cpu:  ## build the Docker image for machines without a GPU
	$(DOCKER_BUILD) --file docker/Dockerfile.cpu --build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL) --tag $(IMAGE):cpu .

site:  ## build the documentation site into site/, with links checked
	@[ -x .cache/site/bin/mkdocs ] || { $(or $(PYTHON),python3) -m venv .cache/site && .cache/site/bin/pip install -qU pip && .cache/site/bin/pip install -q --group docs; }
	@NO_MKDOCS_2_WARNING=1 .cache/site/bin/mkdocs build -q --strict

doctor: setup  ## what works on this machine, and what is missing
	@$(PY) -m telescope doctor

pin:  ## resolve requirements/*.txt anew
	@scripts/pin_requirements.sh

clean:  ## remove caches and builds; runs/ and .venv stay
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: run-lint run-types run-dashboard run-pages
run-lint:
	@$(PY) -m ruff check .
run-types:
	@$(PY) -m mypy
	@MYPYPATH=src:benchmarks:scripts $(PY) -m mypy benchmarks/*.py scripts/*.py
run-dashboard:
	@if [ -d dashboard/node_modules ]; then cd dashboard && npx --no-install tsc --noEmit && npx --no-install vitest run --silent --reporter=dot; \
	else echo "no Node.js: the tests of the dashboard are left out"; fi
# In processes of their own: Playwright's event loop would be in the way of asynchronous tests.
run-pages:
	@if [ ! -f src/telescope/dashboard/static/index.html ]; then echo "the pages are not built (make dashboard): their tests are left out"; \
	elif $(PY) -m tests.browser; then $(PYTEST) $(PAGES) tests/pages $(ARGS); \
	else echo "the tests of the pages in a browser are left out"; fi
