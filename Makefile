# `make` lists the targets. Root work (containers, a bridge) happens only in targets that say so.
PYTHON := .venv/bin/python
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -E)
LAB := $(AS_ROOT) $(PYTHON) -m lab
PYINFRA := .venv/bin/pyinfra
PYTEST := $(PYTHON) -m pytest

# The state machine makes thousands of durable writes: in memory they cost nothing.
FAST_TMP := $(firstword $(wildcard /dev/shm) /tmp)

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-clean lint types
.PHONY: test test-fast test-integration test-lab
.PHONY: lock lock-tools lock-models lock-check engine-tables rendered
.PHONY: bench-deploy bench-draft bench-settings bench-weights
.PHONY: wheelhouse wheelhouse-verify wheelhouse-prune

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 18

venv: .venv/stamp ## make .venv from requirements.lock (installs python3-venv when missing)

.venv/stamp: requirements.lock pyproject.toml lab/venv.sh
	@bash lab/venv.sh

demo: venv ## from a bare node to the real engine's answer (root)
	$(LAB) up node1
	$(PYINFRA) inventories/lab.py deploy.py -y
	$(PYTHON) -m lab demo-summary

demo-clean: venv ## destroy the lab; add PURGE=1 to drop its cached image and wheels too (root)
	$(LAB) down $(if $(PURGE),--purge)

test: test-fast test-integration test-lab ## everything: lint, types, unit, plan, integration, lab (root)

test-fast: lint types ## lint, types, unit and plan tests; seconds, no root
	PYTEST_DEBUG_TEMPROOT=$(FAST_TMP) $(PYTEST) -n 2 tests/unit tests/plan

test-integration: venv ## real ssh and real pyinfra against stubs of LXC and PVE; a minute, no root
	$(PYTEST) -n 2 tests/integration

test-lab: venv ## tests in real containers (root)
	$(AS_ROOT) $(PYTEST) -n 2 --no-loadscope-reorder tests/lab

lint: venv ## ruff: rules and format
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: venv ## mypy, strict
	$(PYTHON) -m mypy

lock: venv ## resolve a stack anew: make lock STACK=cuda128
	@test -n "$(STACK)" || { echo "which stack? make lock STACK=NAME, one of: $(notdir $(wildcard stacks/*))"; exit 2; }
	$(PYTHON) -m gpubox.devtools.lock $(STACK)

UV_COMPILE := .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate

lock-tools: venv ## resolve the locks of the controller and of the box's tools anew
	$(UV_COMPILE) --custom-compile-command "make lock-tools" tools/requirements.in -o tools/requirements.lock
	$(UV_COMPILE) --custom-compile-command "make lock-tools" requirements.in -o requirements.lock

lock-models: venv ## resolve the locks of the models anew
	for model in models/*/; do $(UV_COMPILE) --no-deps --only-binary :all: --custom-compile-command "make lock-models" \
		$${model}requirements.in -o $${model}requirements.lock || exit 1; done

lock-check: venv ## prove that the committed locks fit their requirements.in
	$(PYTHON) -m gpubox.devtools.lock --check

engine-tables: venv ## read the argument tables of engines/ anew from the engines' wheels, and show what changed
	$(PYTHON) -m gpubox.devtools.engine_table

rendered: venv ## write what every profile comes to on every stack (tests/fixtures/rendered), and show what changed
	$(PYTHON) -m tests.rendered

bench-settings: venv ## time rendering and validating the settings of 1,000 boxes
	$(PYTHON) -m bench.settings

DIR ?= wheelhouse
WHEELHOUSE := $(PYTHON) -m gpubox.devtools.wheelhouse

wheelhouse: venv ## gather all that boxes need for a stack: make wheelhouse STACK=cuda128 [DIR=...] [MODEL=...] [ARGS=...]
	@test -n "$(STACK)" || { echo "which stack? make wheelhouse STACK=NAME, one of: $(notdir $(wildcard stacks/*))"; exit 2; }
	$(WHEELHOUSE) gather $(STACK) --dir $(DIR) $(MODEL:%=--model %) $(ARGS)

wheelhouse-verify: venv ## compare a wheelhouse with its manifests: make wheelhouse-verify [DIR=...]
	$(WHEELHOUSE) verify --dir $(DIR)

wheelhouse-prune: venv ## show what no manifest names any more; ARGS=--yes removes it
	$(WHEELHOUSE) prune --dir $(DIR) $(ARGS)

bench-weights: venv ## time weights verify beside sha256sum, over random files in SCRATCH (default: a few GB below /var/tmp)
	$(PYTHON) -m bench.weights $(or $(SCRATCH),/var/tmp)

bench-deploy: venv ## time deploys and rollbacks in the lab (root)
	$(AS_ROOT) $(PYTHON) -m bench.deploy

bench-draft: venv ## time `gpubox draft check` on headers of Kimi-K2.5's size; no root, no GPU
	$(PYTHON) -m bench.draft
