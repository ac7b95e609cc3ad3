# Two commands from a bare clone: `make demo` and `make test`.
#
# Everything is installed into .venv from the package registry; nothing else is fetched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUTPUT ?= results/demo
DEMO_FLAGS ?=
# A machine can have more cores than it lends; two suffice for everything here. Each worker has one
# thread: small decompositions crawl when threads outnumber cores. Workers take neighbouring tests,
# so that a module's fixtures are made once, and steal from one another at the end.
PYTEST_WORKERS ?= 2

.PHONY: demo test checks lint imports types fast-tests slow-tests readme wheel clean

demo: $(VENV)/.demo
	$(BIN)/tscompress run recipes/demo.yaml --output $(DEMO_OUTPUT) --force $(DEMO_FLAGS)

# Checks run beside the tests: one core is idle while pytest starts its workers.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs=2 lint imports types fast-tests

# All that reads the code and does not run it, side by side.
checks: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs=2 types imports lint

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Which folder may import which: the contracts in pyproject.toml.
imports: $(VENV)/.dev
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then $(BIN)/lint-imports --no-cache; \
	else echo "imports: import-linter needs Python 3.11; not checked"; fi

types: $(VENV)/.dev
	$(BIN)/mypy

# Where Python writes no bytecode, as in CI, rewriting every assert so that it shows its operands takes
# each worker as long as importing torch; what failed is run again with that.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
fast-tests: $(VENV)/.dev
	$(PYTEST) -n $(PYTEST_WORKERS) --dist worksteal --durations=20 --assert=plain || { code=$$?; \
	if [ $$code -eq 1 ]; then echo "What failed, again, with the operands of its asserts:"; \
	$(PYTEST) --last-failed --last-failed-no-failures=none --maxfail=20; fi; exit $$code; }

slow-tests: $(VENV)/.dev
	$(BIN)/pytest -m "slow and not network and not gpu"

# The Python blocks of the pages, run as they stand there.
readme: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/run_readme.py --processes $(PYTEST_WORKERS) README.md \
		recipes/fine-tuning.md tscompress/training/README.md tscompress/checkpoints/README.md \
		tscompress/exporting/README.md tscompress/workflows/README.md tscompress/data/README.md

# Source archive and wheel into dist/; tests/package/test_supply.py checks what is in them.
wheel: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e ".[eval]"
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) results/demo results/ci-demo .pytest_cache .mypy_cache .ruff_cache dist
