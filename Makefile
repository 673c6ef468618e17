SHELL := /bin/bash
PYTHON ?= python3
SGLANG := sglang==0.5.19
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := $(shell command -v uv || echo .tools/bin/uv)
SOURCES := $(wildcard python test benchmark demo)

.PHONY: demo test lint clean

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

clean:
	rm -rf $(VENV) .tools

$(STAMP): pyproject.toml Makefile | $(UV)
	test -x $(BIN)/python || $(UV) venv --python $(PYTHON) $(VENV)
	$(UV) pip install --python $(BIN)/python --editable '.[dev]' '$(SGLANG)'
	touch $@

# Debian's own Python takes no packages, so uv gets a small environment to itself.
.tools/bin/uv:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet uv
