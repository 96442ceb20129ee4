# Everything runs in a virtual environment that the first target makes; scripts/install says how.
#   make bench RUN="timing.repeats=50"     overrides for the main job
#   make test PYTHON=python3.12 VENV=/tmp/venv
#   make install TORCH=cpu                 cpu | cuda | auto: which build of torch
PYTHON ?= python3
VENV ?= .venv
TORCH ?= auto
RUN ?=
PY := $(VENV)/bin/python

.PHONY: install bench test test-gpu check lint types figures clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml scripts/install
	@TORCH=$(TORCH) scripts/install "$(VENV)" "$(PYTHON)"
	@touch $@

bench: install  ## the main job: a sweep, its table and its figures
	@$(PY) -m experiments.bench +experiment=quick $(RUN)

figures: install  ## every figure from the committed rows
	@$(PY) -m experiments.figures figure=all $(RUN)

test: install  ## the whole suite; no GPU needed
	@$(PY) -m pytest -n 2

test-gpu: install  ## the tests marked gpu, in a process of their own
	@$(PY) -m pytest -m gpu

lint: install
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types: install
	@$(VENV)/bin/mypy

check: lint types test  ## what CI runs

clean:
	rm -rf "$(VENV)" .pytest_cache .mypy_cache .ruff_cache
