# Outrider. Every target sets up its own virtual environment when there is none.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-all coverage check format lock wheels clean gpu-test gpu-figures

# The contract core: the shape of the code, the proofs of the rules, every method on a tiny model, and the first minutes of a user.
FAST := tests/arch tests/contract/test_rules_exact.py tests/contract/test_rules_vectorised.py tests/contract/test_tree_rules.py \
	tests/contract/test_methods.py tests/contract/test_copying.py tests/unit/test_api.py tests/unit/test_mistakes.py \
	tests/unit/test_native_isa.py tests/unit/test_wrapped_target.py tests/unit/test_prebuilt.py

# One thread a test, as many tests as cores; compiled modules are kept, also where the shell says otherwise.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(READY): pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh

demo: $(READY)  ## the bundled pair continues a prompt, plain and speculative side by side
	@$(BIN)/outrider demo

test: $(READY)  ## run the tests, as many at a time as there are cores
	$(PYTEST)

test-all: $(READY)  ## the tests and the exhaustive products of which `make test` runs a part
	$(PYTEST) -m ""

test-fast: $(READY)  ## the contract core alone, for every change
	$(PYTEST) $(FAST)

coverage: $(READY)  ## run the tests and count the lines they reach, by folder (TESTS=... for some of them)
	$(BIN)/python -m pip --disable-pip-version-check --quiet install coverage
	$(BIN)/python scripts/test_costs.py --coverage build/coverage.json $(TESTS)
	$(BIN)/python scripts/coverage_table.py build/coverage.json
	$(BIN)/python scripts/tables.py

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

format: $(READY)  ## fix what can be fixed by a tool
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

lock: $(READY)  ## write the versions of this environment to requirements-dev.lock
	$(BIN)/python scripts/lock.py

wheels: $(READY)  ## wheels with the native pass inside, for x86-64 and aarch64, each checked without a compiler
	$(BIN)/python scripts/wheels.py --machine x86_64 aarch64
	for wheel in dist/*-manylinux_*.whl; do $(BIN)/python scripts/check_wheel.py $$wheel; done

gpu-test:  ## the tests that need a CUDA device, with the Python that is there (no set-up)
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

gpu-figures:  ## measure again what the pages say about GPUs (ARGS="--call 2 --out DIR", or --dry-run for the plan)
	PYTHONPATH=src $(PYTHON) scripts/gpu_figures.py $(ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist src/*.egg-info
