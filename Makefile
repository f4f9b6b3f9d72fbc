# The two commands of the README, and what developers run. Everything is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
JOBS ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo test soak check format unit docs bench clean

help:            ## show this
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(VENV)/demo.stamp  ## serve a real pipeline and send it real files; ONCE=1 stops after the answers
	@$(BIN)/python -m examples.filetypes.demo $(if $(ONCE),--once)

test: $(VENV)/dev.stamp  ## run every test
	$(BIN)/python -m pytest tests --numprocesses $(JOBS) --no-loadscope-reorder

soak: $(VENV)/dev.stamp  ## measure the figures of docs/reliability.md, half an hour; QUICK=1 takes minutes
	$(BIN)/python -m tests.soak $(if $(QUICK),--quick)

check: $(VENV)/dev.stamp  ## formatting, lint, types, floors, unit and house tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit tests/house -m "not slow" --numprocesses $(JOBS)

format: $(VENV)/dev.stamp  ## format, and fix what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/dev.stamp  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(VENV)/dev.stamp  ## compare with peers on this machine; needs wrk
	$(BIN)/python -m benchmarks

clean:           ## remove what was built
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing servekit and the demo's model into $(VENV) …"
	@$(PIP) --editable '.[demo,onnx]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@
