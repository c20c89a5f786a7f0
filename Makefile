# Outrider. Every target sets up its own virtual environment when there is none.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test check format clean gpu-test

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(READY): pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh

demo: $(READY)  ## the bundled pair continues a prompt, plain and speculative side by side
	@$(BIN)/outrider generate "Once upon a time, there was a little fox who" --max-tokens 120 --show --compare

test: $(READY)  ## run the tests, as many at a time as there are cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

format: $(READY)  ## fix what can be fixed by a tool
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

gpu-test:  ## the tests that need a CUDA device, with the Python that is there (no set-up)
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist src/*.egg-info
