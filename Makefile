SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
SGLANG := sglang==0.5.19
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := $(shell command -v uv || echo .tools/bin/uv)
SOURCES := $(wildcard python test benchmark demo)
GPU_TEST := test/registered/spec/test_inkling_draft_extend_staging.py
GPU_CONFIGS := page1_combined page16_per_step page128_no_front page1_eight_steps \
    banded banded_per_step switched_off
BENCHMARK := PYTHONPATH=benchmark/fence_probe $(BIN)/python benchmark/engine_steps.py
BOOTS ?= 3
RELEASE ?=

.PHONY: demo test lint diff drift gpu test-gpu benchmark clean

demo: $(STAMP)
	$(BIN)/inkling-mtp-staging apply
	$(BIN)/python demo/run.py

test: $(STAMP)
	$(BIN)/inkling-mtp-staging apply
	$(BIN)/python -m pytest test

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/isort --check $(SOURCES)
	$(BIN)/python test/tool/lint_composed.py

# The patch for an upstream checkout.
diff: $(STAMP)
	mkdir -p dist
	$(BIN)/inkling-mtp-staging diff > dist/draft-extend-staging.patch
	git apply --numstat dist/draft-extend-staging.patch

# How far a release (RELEASE='==X.Y.Z', default: the newest) is from the edits' base.
drift: | $(UV)
	rm -rf .drift
	$(UV) pip install --quiet --python $(PYTHON) --no-deps --target .drift 'sglang$(RELEASE)'
	$(UV) run --quiet --no-project --python $(PYTHON) --with . python test/tool/drift.py .drift

# Without a GPU its tests skip; here that is a failure.
gpu: $(STAMP)
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "no GPU"'

# The hazard suite, a process a configuration, between two runs of upstream's cases.
test-gpu: gpu
	$(BIN)/inkling-mtp-staging revert
	$(BIN)/python -m pytest test/upstream
	$(BIN)/inkling-mtp-staging apply
	$(BIN)/python -m pytest test/upstream
	for config in $(GPU_CONFIGS); do \
	    STAGING_LAB_CONFIG=$$config $(BIN)/python $(GPU_TEST) || exit 1; \
	done

# A JSON line a boot, the two sides in turn.
benchmark: gpu
	mkdir -p dist
	: > dist/benchmark.jsonl
	for boot in $$(seq $(BOOTS)); do \
	    $(BIN)/inkling-mtp-staging revert && \
	    $(BENCHMARK) --side released | tee -a dist/benchmark.jsonl && \
	    $(BIN)/inkling-mtp-staging apply && \
	    $(BENCHMARK) --side patched | tee -a dist/benchmark.jsonl || exit 1; \
	done

clean:
	rm -rf $(VENV) .tools .drift dist

$(STAMP): pyproject.toml Makefile | $(UV)
	test -x $(BIN)/python || $(UV) venv --python $(PYTHON) $(VENV)
	$(UV) pip install --python $(BIN)/python --editable '.[dev]' '$(SGLANG)'
	touch $@

# Debian's own Python takes no packages, so uv gets a small environment to itself.
.tools/bin/uv:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet uv
