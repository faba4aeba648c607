PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install -q -c constraints.txt
# The torch that was tested on this kind of machine (its CPU builds do not bring their triton along);
# `make TORCH=torch train` takes the newest.
TORCH ?= $(if $(shell nvidia-smi --list-gpus 2>/dev/null),torch==2.11.0,torch==2.13.0 triton==3.7.1)

.PHONY: train test lint

train: $(VENV)/.installed
	scripts/launch.sh $(ARGS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "moe_titan needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	       "Name another with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than what they were installed from, so that a second call installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) $(TORCH)
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@
