# `make demo` trains a real model with the fused loss, `make test` runs the tests. Both need nothing
# but Python 3.10 or newer: they create $(VENV) on first use and install the pinned versions there.

PYTHON ?= python3
VENV ?= .venv
# Extra options for pip; --extra-index-url https://download.pytorch.org/whl/cpu gives Linux the CPU torch.
PIP_ARGS ?=
TRAIN_ARGS ?=
PYTEST_ARGS ?=
# Tests run in a process per core, up to four, since some start ranks of their own, and whole files at
# a time: what the tests of a file share, such as those ranks, is made once. PYTEST_ARGS='-n 0': in one.
PYTEST_WORKERS ?= -n logical --maxprocesses 4 --dist loadfile
BENCH_ARGS ?=
GATE_ARGS ?= --check
FUZZ_ARGS ?= --minutes 20

BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

# A stamp is named after the content of what it installed (and the folder, which an editable install
# records), so that neither a touched file nor a new clone of the same versions reinstalls anything.
key = $(shell (pwd; cat pyproject.toml $(1)) | cksum | cut -d' ' -f1)
DEV := $(VENV)/.dev-$(call key,requirements-dev.lock requirements-model.lock)
BENCH := $(VENV)/.bench-$(call key,requirements-dev.lock requirements-bench.lock)
AUDIT := $(VENV)/.audit-$(call key,requirements-audit.lock)
DOCS := $(VENV)/.docs-$(call key,requirements-dev.lock requirements-docs.lock)

# Of `make gpu`: PYTHON as it is, with its own torch and Triton, and nothing installed.
GPU = PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(PYTHON)

.PHONY: help install demo test coverage lint format docs bench bench-regression fuzz audit gate gpu clean distclean

help:
	@echo "make install    fill $(VENV), which the others do first"
	@echo "make demo       train SmolLM2-135M with the fused loss     (TRAIN_ARGS='--steps 8')"
	@echo "make test       run the tests                              (PYTEST_ARGS='-k trainer -n 0')"
	@echo "make coverage   run them and count the lines that they reach, at least 95 % of each package"
	@echo "make lint       ruff and mypy;  make format: let ruff fix what it can"
	@echo "make docs       build the site of docs/ into site/, strictly"
	@echo "make bench      compare with eager code and the peers      (BENCH_ARGS='--help')"
	@echo "make bench-regression   time ours, and compare with the last time"
	@echo "make fuzz       draw cases for the property tests          (FUZZ_ARGS='--minutes 20 --seed 1')"
	@echo "make audit      look up the locked packages among known vulnerabilities"
	@echo "make gate       compile all kernels for all chips, without a GPU (GATE_ARGS='--check')"
	@echo "make gpu        on a GPU: doctor, tests and benchmark, with PYTHON as it is"
	@echo "make clean      remove caches and build output;  make distclean: $(VENV) as well"

install: $(DEV)

$(DEV):
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) \
	    and "Python 3.10 or newer is needed, $(PYTHON) is " + v + ": pass PYTHON=...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); torch is large, so the first time takes minutes."
	$(PIP) -r requirements-dev.lock
	$(PIP) --no-deps -r requirements-model.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.dev-* && touch $@

$(BENCH): $(DEV)
	$(PIP) -r requirements-bench.lock
	$(PIP) --no-deps --upgrade --target $(VENV)/verl verl==0.9.1
	@rm -f $(VENV)/.bench-* && touch $@

$(DOCS): $(DEV)
	$(PIP) -r requirements-docs.lock
	@rm -f $(VENV)/.docs-* && touch $@

demo: $(DEV)
	$(BIN)/fused-grpo train $(TRAIN_ARGS)

test: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Of the ranks, command lines and interpreted kernels as well, which run in processes of their own.
coverage: $(DEV)
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine --quiet
	@status=0; for package in fused_grpo kernels; do \
	    $(BIN)/python -m coverage report --skip-covered --fail-under=95 --include="$$package/*" || status=1; \
	done; exit $$status

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mkdocs-material would print an announcement of its makers in front of the warnings
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(BENCH)
	VERL_PATH=$(VENV)/verl $(BIN)/python -m benchmarks.report $(BENCH_ARGS)

# Each run is saved in .benchmarks/ and compared with the one before, if there is one.
bench-regression: $(BENCH)
	$(BIN)/python -m pytest benchmarks/test_regression.py --benchmark-autosave --benchmark-compare $(PYTEST_ARGS)

# One thread: the cases are small. It says how many it tried, and with which seeds.
fuzz: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py $(FUZZ_ARGS)

# In a folder of its own, for its packages are none of ours. Where nobody can be asked, it says so and passes.
audit: $(DEV)
	@$(BIN)/python scripts/audit.py --packages $(VENV)/audit --stamp $(AUDIT)

gate: $(DEV)
	$(BIN)/python -m fused_grpo_kernels.gate $(GATE_ARGS)

# All three run, whatever the first ones say; installs nothing, as such machines are often offline.
gpu:
	@status=0; \
	$(GPU) -m fused_grpo.cli doctor || status=1; \
	$(GPU) -m pytest -m gpu tests/test_gpu.py $(PYTEST_ARGS) || status=1; \
	$(GPU) -m benchmarks.report --device cuda $(BENCH_ARGS) || status=1; \
	exit $$status

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
