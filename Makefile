# Everything runs in the virtual environment .venv, which is made when it is first needed.
PYTHON ?= python3
VENV ?= .venv
# Six processes, each with files of its own, because tests wait for a third of their time. Tests
# on a GPU are chosen without them.
PYTEST_ARGS ?= -m "not soak and not long" -n 6 --dist loadfile
BENCH_ARGS ?=
# `make wheel` builds a wheel for each of these interpreters, for this platform (Ubuntu 22.04's).
WHEEL_PYTHONS ?= $(BIN)/python
WHEEL_PLAT ?= manylinux_2_35_$(shell uname -m)

BIN := $(VENV)/bin
# With this variable, each test process would compile all test modules in each run.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles modules when it imports them; pip would compile all of torch.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
EDITABLE := $(PIP_INSTALL) --no-build-isolation --editable
# Prints a message for a step that is otherwise silent and runs once: $(call say,Installing ...). The
# message contains no comma.
say = @echo "$(1) (once, some minutes)"
# The folders that tests import from, as in pyproject.toml and tests/support/repository.py.
TEST_PROGRAM := PYTHONPATH=tests:tests/support $(BIN)/python -m
BUILD_FILES := pyproject.toml setup.py build_support/native.py build_support/artefacts.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help
help:  ## Show this help
	@echo "Usage: make [target] [PYTHON=python3] [PYTEST_ARGS=...] [BENCH_ARGS=...] [ARGS=...]"
	@echo
	@awk 'BEGIN {FS = ":.*##"} /^[a-z-]+:.*##/ {printf "  %-12s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: build  ## Show what memsaver does, on the GPU or on the simulated driver
	@if [ -e /dev/nvidiactl ] && ! $(BIN)/python -c "import torch" 2>/dev/null; then \
	  echo "Installing torch, as there is a GPU (once, some minutes)"; \
	  $(PIP_INSTALL) "torch>=2.6"; fi
	$(BIN)/memsaver demo

.PHONY: build
build: $(VENV)/.installed  ## Build the libraries into memsaver/, only what changed
	@echo "Building the libraries (a minute or two at first, then only what changed)"
	$(BIN)/python setup.py --quiet build_ext --inplace

.PHONY: test
test: $(VENV)/.installed-test build $(VENV)/.compiled  ## Run the tests (PYTEST_ARGS to choose)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test-long
test-long: $(VENV)/.installed-test $(VENV)/.installed-wheel build  ## Run the longer tests: every failing call, processes' lives, limits
	@# Only the files with such tests: to collect all of them takes as long as some of these tests.
	$(BIN)/python -m pytest -m long -n 3 --dist loadfile $$(grep -rl --include='test_*.py' 'mark\.long' tests)

.PHONY: faults
faults: ARGS ?= --every 11
faults: $(VENV)/.installed-test build  ## Fail the calls to the driver and the system (ARGS to choose)
	@$(TEST_PROGRAM) faults $(ARGS)

.PHONY: model
model: $(VENV)/.installed-test build  ## Do random calls beside a model (ARGS to choose)
	@$(TEST_PROGRAM) model $(ARGS)

.PHONY: walks
walks: $(VENV)/.installed-test build  ## Walk at random through threads, damaged backups and ranks (ARGS to choose)
	@$(TEST_PROGRAM) walks $(ARGS)

.PHONY: mutation
mutation: $(VENV)/.installed-mutation build  ## Change lines at random, count what the tests detect (ARGS="--count 20")
	@$(TEST_PROGRAM) mutation $(ARGS)

.PHONY: sanitize
sanitize: $(VENV)/.installed-test  ## Run the native code under sanitizers (ARGS to choose)
	@$(TEST_PROGRAM) sanitizers $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.installed-fuzz  ## Fuzz the C ABI and the options (ARGS="--seconds 600" for longer)
	@$(TEST_PROGRAM) fuzz $(ARGS)

.PHONY: recipes
recipes: $(VENV)/.installed-test build  ## Run engines' own modules on the simulated driver (ARGS="--engine vllm 0.26.0")
	@$(TEST_PROGRAM) recipes $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-lint build  ## Check style and types, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/stubtest memsaver._C --mypy-config-file pyproject.toml --allowlist build_support/stubtest_allowlist.txt
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	find csrc integrations tests/native -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' | xargs $(BIN)/clang-format --dry-run -Werror

.PHONY: format
format: $(VENV)/.installed-lint  ## Bring the sources into the style that lint checks
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	find csrc integrations tests/native -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' | xargs $(BIN)/clang-format -i

.PHONY: kernels
kernels: $(VENV)/.requirements  ## Compile the device code, after a change of csrc/kernels
	$(BIN)/python build_support/kernels.py

.PHONY: bench
bench: build  ## Measure pause and resume (BENCH_ARGS to choose)
	$(BIN)/python benchmarks/pause_resume.py $(BENCH_ARGS)

.PHONY: pages
pages: build  ## Write what is generated: tables of figures and of names, the command line's page
	$(BIN)/python benchmarks/readme_table.py
	$(BIN)/python benchmarks/readme_picture.py
	$(BIN)/python benchmarks/measured_page.py
	$(BIN)/python benchmarks/sglang_kinds_page.py
	$(BIN)/python benchmarks/framework_calls_page.py
	$(BIN)/python benchmarks/take_over_page.py
	$(BIN)/memsaver trace benchmarks/results/shared_gpu.json --picture docs/assets/shared_gpu.png
	$(BIN)/typer memsaver.cli.app utils docs --name memsaver --title "Command line" --output docs/reference/cli.md
	$(BIN)/python build_support/reference_tables.py
	$(BIN)/python build_support/version_tables.py

.PHONY: docs
docs: $(VENV)/.installed-docs  ## Build the documentation's site into build/site
	@# Not --quiet: warnings would then neither be shown nor fail it.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

.PHONY: sdist
sdist: $(VENV)/.installed-wheel  ## Build the sdist into dist/
	$(BIN)/python build_support/wheels.py --sdist-only

.PHONY: wheel
wheel: $(VENV)/.installed-wheel  ## Build sdist and wheels, checked, into dist/ (WHEEL_PYTHONS to choose)
	$(BIN)/python build_support/wheels.py --plat $(WHEEL_PLAT) $(WHEEL_PYTHONS)

.PHONY: clean
clean:  ## Remove what was built; the environment stays
	rm -rf build dist *.egg-info memsaver/*.so memsaver/include \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf
	rm -f $(VENV)/.installed* $(VENV)/.compiled

.PHONY: distclean
distclean: clean  ## Remove the environment too
	rm -rf $(VENV)

$(VENV)/.made: build_support/make_venv.py
	$(call say,Making the virtual environment $(VENV))
	"$(PYTHON)" build_support/make_venv.py $(VENV)
	@touch $@

$(VENV)/.requirements: $(VENV)/.made pyproject.toml build_support/requires.py
	$(call say,Installing what the build needs)
	$(PIP_INSTALL) "tomli>=2; python_version < '3.11'"
	$(BIN)/python build_support/requires.py > $(VENV)/requirements.txt
	$(PIP_INSTALL) --requirement $(VENV)/requirements.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements $(BUILD_FILES)
	$(call say,Building and installing memsaver)
	$(EDITABLE) .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.requirements $(BUILD_FILES)
	$(call say,Building memsaver and installing what its tests need)
	$(EDITABLE) ".[$$(cat $(VENV)/test-extra)]"
	@touch $@ $(VENV)/.installed

# Python compiles a module at its first import. Test processes that start together would each
# compile all of torch's and the tests' modules, so one process imports them first.
$(VENV)/.compiled: $(VENV)/.installed-test | build
	@echo "Compiling the modules that the tests import (once)"
	@OMP_NUM_THREADS=1 $(TEST_PROGRAM) fork_server torch </dev/null || true
	@$(BIN)/python -m pytest --quiet --collect-only >/dev/null || true
	@touch $@

# Without memsaver itself: these build it, or read its sources.
$(VENV)/.installed-docs $(VENV)/.installed-wheel: $(VENV)/.installed-%: $(VENV)/.requirements
	$(call say,Installing what make $* needs)
	$(BIN)/python build_support/requires.py $* > $(VENV)/requirements-$*.txt
	$(PIP_INSTALL) --requirement $(VENV)/requirements-$*.txt
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.requirements $(BUILD_FILES)
	$(call say,Building memsaver and installing what fuzzing needs)
	$(EDITABLE) ".[fuzz]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-mutation: $(VENV)/.installed-test
	$(call say,Installing universalmutator)
	$(EDITABLE) ".[mutation]"
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.requirements $(BUILD_FILES)
	$(call say,Building memsaver and installing what lint needs)
	$(EDITABLE) ".[lint]"
	@touch $@ $(VENV)/.installed
