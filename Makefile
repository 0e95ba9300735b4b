# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone with only Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo picture test test-quick check coverage format generate bench docs mutants lock clean

help:
	@echo "make setup       create $(VENV) and install the locked dependencies"
	@echo "make demo        an application end to end: publish, fold on Spark and live, crash, replay, rebuild, redrive"
	@echo "make test        the whole test suite (test-quick leaves out what is marked slow)"
	@echo "make check       ruff, format check, the generated half of the blocking driver, mypy strict, the layer test"
	@echo "make coverage    which lines the tests without Spark run, by module; writes docs/evidence/coverage.md"
	@echo "make generate    write the blocking driver's twins of asyncio modules"
	@echo "make bench       our numbers next to our peers', in one interleaved run"
	@echo "make mutants     plant mistakes in the pure modules, and list those no unit test notices"
	@echo "make picture     run the demo in a terminal, and write docs/demo.svg, the picture in the README"
	@echo "make docs        regenerate the generated pages and run every example"

setup: $(READY)

# The stamp is younger than the lockfile exactly when the environment matches it, so a second run starts at once.
# Python compiles what is imported, once; pip would compile five thousand modules, of which most are never imported.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("JetSpark needs Python 3.11 or newer, and %s is %s. Try: make PYTHON=python3.12 %s" % (sys.executable, sys.version.split()[0], "setup") if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (once)..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

# The archive of Spark's Java classes halves what Java does until the first batch is folded. It is written once for all
# demos and benchmarks; without Java these say what to install.
WITH_ARCHIVE := SPARK_SUBMIT_OPTS="$$($(BIN)/python tools/class_archive.py)"

demo: setup
	@$(WITH_ARCHIVE) $(BIN)/jetspark demo

picture: setup
	@$(BIN)/python tools/demo_picture.py

# Three processes for each core, since most tests wait for servers: tests/support/packing.py says what goes first.
PYTEST := $(BIN)/python -m pytest -n auto

# A test that fails while everything runs at once is run once more, alone and with the same seeds: a defect fails again; a
# test that needed a less busy machine is named in the last line and is a test to repair. Tests that a process with an
# internal error left undone (pytest's exit code 3) are run again too.
FAILED := import json, pathlib; print(*json.loads(pathlib.Path(".pytest_cache/v/cache/lastfailed").read_text()), sep=", ")

test: setup
	@seed=$${JETSPARK_FRESH_SEED:-$$($(BIN)/python -c 'import random; print(random.randrange(10**6, 10**9))')}; \
	export JETSPARK_FRESH_SEED=$$seed; \
	$(PYTEST); case $$? in \
	0) ;; \
	1 | 3) failed=$$($(BIN)/python -c '$(FAILED)'); \
	  $(BIN)/python -m pytest --last-failed --last-failed-no-failures=none; status=$$?; \
	  echo "Needed a second try: $$failed"; exit $$status ;; \
	*) exit 1 ;; esac

test-quick: setup
	$(PYTEST) -m "not slow"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/unasync.py --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layers.py

# Spark runs our code in processes of its own, which nobody measures: its tests are left out. A test that fails fails this
# target, but not before the table is made.
WITHOUT_SPARK := tests/unit tests/conformance tests/simulation tests/integration \
	--ignore-glob='*/integration/test_spark_*' --ignore=tests/integration/test_demo.py --ignore=tests/integration/test_docs.py

coverage: setup
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -n auto -q $(WITHOUT_SPARK) -o timeout=600; status=$$?; \
	$(BIN)/coverage combine -q && $(BIN)/coverage json -q -o coverage.json && $(BIN)/python tools/coverage_page.py coverage.json \
	&& exit $$status

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup
	$(BIN)/python tools/unasync.py

# `make bench ARGS="core-subscribe --repeats 7"` passes arguments on.
bench: setup
	PYTHONPATH=. $(WITH_ARCHIVE) $(BIN)/python -m benchmarks $(ARGS)

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest -q tests/integration/test_docs.py

mutants: setup
	$(BIN)/python tools/mutants.py

# Needs uv. Hashes pin every file; no index address is recorded, so any mirror serves.
lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --all-extras --group dev pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
