PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
RUN ?=

.PHONY: install bench test test-gpu check lint types figures clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -e ".[test,dev]"
	touch $@

install: $(VENV)/.installed

bench: install  ## the main job: a sweep, its table and its figures
	$(PY) -m experiments.bench +experiment=quick $(RUN)

test: install  ## the whole suite, no GPU needed
	$(PY) -m pytest -n 2

test-gpu: install  ## the tests marked gpu, in their own process
	$(PY) -m pytest -m gpu

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: install
	$(VENV)/bin/mypy

check: lint types test

figures: install  ## every figure from the committed rows
	$(PY) -m experiments.figures figure=all

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
