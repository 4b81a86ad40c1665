# make demo     train, kill and resume a model, look into its checkpoint (ARGS=--s3, ARGS="--tp 2 --async", ...)
# make test     all tests (ARGS="-k name" for some)
# make test-readers  tests that need no torch, with newer zarr, in .venv-readers (PYTHON=python3.13, constraints-readers.txt)
# make test-integrations  tests with frameworks, schedulers' scripts and monitoring tools, in .venv-integrations
# make test-gpu  tests on this machine's GPU or other accelerator, and a table of speeds; a few minutes, not in 'make test'
# make zarrita  install the requirements of tests marked "node" with npm; without them 'make test' skips these tests
# make lint     ruff, mypy and import-linter
# make docs     the documentation as a site, into build/docs; warnings are errors
# make mutants  mutation tests of _commit, _plan, _save and _load, hours for all (ARGS=_commit.attempts for one module)
# make bench    speed of this and other libraries, into docs/explanation/speed.md (ARGS="--only local s3", ARGS=--quick, ...)
# make dist     the source distribution and the wheel, into dist, checked by twine
# make test-wheel  install that wheel into fresh environments and use it there (ARGS=newest: also oldest, torch)
# make clean    remove all of these results
#
# Each command installs its requirements into .venv first, and again if pyproject.toml or constraints.txt have changed.
# Required are Python 3.11 or newer with its venv module (default python3; make PYTHON=python3.12 for another one) and
# network access. PIP_ARGS are arguments for pip, for example --extra-index-url https://download.pytorch.org/whl/cpu for
# torch without CUDA.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install -qq $(PIP_ARGS) -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start dozens of processes. If this is set, each of them compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Tests of reading checkpoints and of the modules below, without those that need servers.
READERS := $(addprefix tests/,read/test_readers.py $(addprefix format/test_,dtypes.py codec.py names.py) $(addprefix store/test_,store.py store_fsspec.py store_local.py))

.PHONY: demo test test-gpu test-readers test-integrations zarrita lint docs mutants bench dist test-wheel clean
.DEFAULT_GOAL := demo

demo: .venv/.demo
	$(BIN)/python examples/train_fsdp2.py $(ARGS)

# Four workers on two cores: tests with servers and killed ranks mostly wait. Threads of torch would wait for each other.
# Saves wait for the disk at each fsync. So temporary files are in memory, if 8 GB of it are free.
IN_MEMORY = $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'END {print $$4}')" -ge 8000000 ] 2>/dev/null && echo TMPDIR=/dev/shm)

test: .venv/.dev
	$(IN_MEMORY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: .venv/.dev
	$(IN_MEMORY) $(BIN)/python -m pytest -v tests/gpu $(ARGS)

test-readers: .venv-readers/.installed
	.venv-readers/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -k "not moto and not ceph and not hub" $(READERS) $(ARGS)

test-integrations: .venv-integrations/.installed
	.venv-integrations/bin/python -m pytest -n 2 --dist loadfile tests/integrations $(ARGS)

zarrita: tests/zarrita/node_modules/.installed

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs build/docs
	@echo "The documentation: build/docs/index.html"

mutants: .venv/.mutants
	$(BIN)/python tools/mutants.py $(ARGS)

bench: .venv/.bench
	$(BIN)/python -m benchmarks $(ARGS)

dist: .venv/.dist
	rm -rf dist
	$(BIN)/python -m build --dependency-constraints-txt constraints.txt
	$(BIN)/python -m twine check --strict dist/*

test-wheel: dist
	PIP_ARGS="$(PIP_ARGS)" $(PYTHON) tools/check_wheel.py $(ARGS)

clean:
	rm -rf .venv .venv-readers .venv-integrations tests/zarrita/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("zarrckpt needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/.demo .venv/.dev .venv/.dist .venv/.docs .venv/.mutants .venv/.bench: .venv/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what 'make $(MAKECMDGOALS)' needs into .venv; the first time takes a few minutes"
	@$(INSTALL) -e '.[$*]'
	@touch $@

.venv-readers/.installed: pyproject.toml constraints-readers.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 12) or sys.exit("zarr 3.4 needs Python 3.12 or newer; this is " + sys.version.split()[0] + ": make PYTHON=python3.13 test-readers")'
	@[ -x .venv-readers/bin/python ] || $(PYTHON) -m venv .venv-readers || { rm -rf .venv-readers; exit 1; }
	@echo "Installing what 'make test-readers' needs into .venv-readers"
	@.venv-readers/bin/python -m pip install -qq $(PIP_ARGS) -c constraints-readers.txt -e '.[test-readers]'
	@touch $@

.venv-integrations/.installed: pyproject.toml constraints-integrations.txt
	@[ -x .venv-integrations/bin/python ] || $(PYTHON) -m venv .venv-integrations || { rm -rf .venv-integrations; exit 1; }
	@echo "Installing what 'make test-integrations' needs into .venv-integrations"
	@.venv-integrations/bin/python -m pip install -qq $(PIP_ARGS) -c constraints-integrations.txt -e '.[test-integrations]'
	@touch $@

tests/zarrita/node_modules/.installed: tests/zarrita/package.json tests/zarrita/package-lock.json
	@echo "Installing zarrita into tests/zarrita/node_modules"
	@cd tests/zarrita && npm ci --silent --ignore-scripts --no-audit --no-fund --fetch-timeout=30000 --fetch-retries=1
	@touch $@
