# One verb each. Every verb makes the environment by itself when it is missing or out of date.
# Needs python3 (3.11 or newer) and make. `make` alone lists the verbs.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.tiercache-ready
SEEDS ?= 200
ARGS ?=

# Bitwise comparisons need one order of summation, and every core counts on a small machine.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo serve check test-engines cover fmt fmt-check lint types tidy test replay bench sim docs clean always

help: ## List the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## Make the environment

demo: $(READY) ## Two engine processes share the state of real hybrid models, and survive kill -9
	$(PY) -m tiercache demo $(ARGS)

serve: $(READY) ## Run a node in the foreground
	$(PY) -m tiercache serve $(ARGS)

test: $(READY) ## Run every test, those of tidiness included
ifeq ($(ARGS),)
	@# Simulations only compute, and the others wait for processes: together they take the time of one.
	@nice $(PY) -m pytest tests/sim > $(VENV)/sim.log 2>&1 & sim=$$!; trap "kill $$sim" INT TERM; \
	$(PY) -m pytest tests --ignore=tests/sim; others=$$?; \
	wait $$sim; simulated=$$?; cat $(VENV)/sim.log; exit $$((others ? others : simulated))
else
	$(PY) -m pytest tests $(ARGS)
endif

test-engines: $(READY) ## Drive real vLLM and SGLang; each gets an environment outside the checkout, once
	tests/engines/run vllm $(ARGS)
	tests/engines/run sglang $(ARGS)

check: test cover fmt-check lint types test-engines ## All that CI runs

cover: $(READY) ## Is every branch of state, wire and core taken by its own tests?
	$(PY) -m pytest tests/unit tests/contract/test_policies.py -q \
	  -k "(core or state or wire or polic) and not device and not kernels" \
	  --cov=tiercache/state --cov=tiercache/wire --cov=tiercache/core --cov-branch --cov-fail-under=100 $(ARGS)

fmt: $(READY) ## Format the code
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix --select I .

fmt-check: $(READY) ## Is the code formatted?
	$(PY) -m ruff format --check .

lint: $(READY) ## Lint
	$(PY) -m ruff check .

types: $(READY) ## Check types
	$(PY) -m mypy

tidy: $(READY) ## Layers, sizes, bans, packaging, documents, ops: the quick part of `make test`
	$(PY) -m pytest tests/tidy $(ARGS)

sim: $(READY) ## Simulate SEEDS=200 histories with faults
	$(PY) -m tiercache.testing.sim --seeds $(SEEDS) $(ARGS)

replay: $(READY) ## Replay the traces of tests/data/traces, beside what should be reached
	$(PY) -m tests.bench.replay $(ARGS)

bench: $(READY) ## Measure against memcpy, files and other stores
	$(PY) -m tests.bench $(ARGS)

docs: $(READY) ## Write docs/config.md from the settings
	$(PY) -m tiercache.config > docs/config.md.new
	mv docs/config.md.new docs/config.md

clean: ## Remove what was made, but not the environment
	rm -rf build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# An environment that several checkouts share must be pointed at this one.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
$(READY): always
endif

$(READY): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'tiercache needs Python 3.11 or newer; name it: make PYTHON=python3.11'; exit 1; }
	@echo 'Making the environment in $(VENV); the first time takes some minutes.'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@echo '$(CURDIR)' > $@
