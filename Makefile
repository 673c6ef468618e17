SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
SGLANG := sglang==0.5.19
VENV := .venv
BIN := $(VENV)/bin
# Another PYTHON asks for another environment.
STAMP := $(VENV)/.installed-$(notdir $(PYTHON))
UV := $(shell command -v uv || echo .tools/bin/uv)
SOURCES := $(wildcard python test benchmark demo)
GPU_TESTS := test/registered/spec
GPU_CONFIGS := page1_combined page16_per_step page128_no_front page1_eight_steps \
    wide_groups banded banded_per_step switched_off \
    triton_page1_combined triton_page16_per_step triton_no_front \
    triton_no_front_switched_off
RELEASE ?=

.PHONY: demo test lint diff drift gpu test-gpu clean

demo: $(STAMP)
	$(BIN)/inkling-mtp-staging apply
	$(BIN)/python demo/run.py

test: $(STAMP)
	$(BIN)/inkling-mtp-staging apply
	$(BIN)/python -m pytest -n 2 --dist loadfile test

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

# Upstream's cases on both sides, the hazard suite, a process a configuration, and whole
# engines side against side.
test-gpu: gpu
	$(BIN)/inkling-mtp-staging revert
	$(BIN)/python -m pytest test/upstream
	$(BIN)/inkling-mtp-staging apply
	$(BIN)/python -m pytest test/upstream
	for config in $(GPU_CONFIGS); do \
	    STAGING_LAB_CONFIG=$$config \
	        $(BIN)/python $(GPU_TESTS)/test_inkling_draft_extend_staging.py || exit 1; \
	done
	$(BIN)/python $(GPU_TESTS)/test_inkling_mtp_end_to_end.py

# JSON files, a table and a figure in dist/: what a step costs, steady decoding, serving
# under churn, on FlashAttention and on the backend that SGLang picks.
include benchmark/benchmark.mk

clean:
	rm -rf $(VENV) .tools .drift dist

$(STAMP): pyproject.toml Makefile | $(UV)
	test -e $@ || ! test -e $(VENV) || { \
	    echo "$(VENV) is not finished or not for PYTHON=$(PYTHON): make clean" >&2; exit 1; }
	test -e $@ || $(UV) venv --python $(PYTHON) $(VENV)
	$(UV) pip install --python $(BIN)/python --editable '.[dev]' '$(SGLANG)'
	touch $@

# Debian's own Python takes no packages, so uv gets a small environment to itself.
.tools/bin/uv:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet uv
