# make demo    train the demo: about a minute after the first installation; ENGINE=sglang or vllm: on a server
# make test    install what the tests need and run them
# make test-engines  install SGLang and vLLM, once, and ask the servers what make test asks their doubles
# make check   ruff, ruff format, mypy
# make soak    fifty runs through random kills, and a thousand seeds of the simulator; an hour
# make clean   remove what the other targets made; runs/ stays
#
# PYTHON chooses the interpreter for .venv, VENV an environment that exists already.

PYTHON ?= python3
VENV ?= .venv
ENGINE ?= embedded
# The build of a server without CUDA; with a GPU: ENGINE_BUILD=
ENGINE_BUILD ?= --cpu
# Heads of 32: vLLM has no narrower ones on a CPU.
ENGINE_MODEL := $(if $(filter vllm,$(ENGINE)),model.heads=2)
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PATHS := streamrl queue agents producers learners tests bench examples

.PHONY: demo setup test test-engines check simulate soak clean engine-embedded engine-sglang engine-vllm

demo: $(VENV)/.train engine-$(ENGINE)
	$(BIN)/streamrl launch engine.kind=$(ENGINE) $(ENGINE_MODEL)

engine-embedded:

engine-sglang engine-vllm: $(VENV)/.train
	$(BIN)/streamrl engines install $(@:engine-%=%) $(ENGINE_BUILD)

setup: $(VENV)/.train $(VENV)/.dev

test: setup
	$(BIN)/python -m pytest

test-engines: setup engine-sglang engine-vllm
	$(BIN)/python -m pytest -m engines

check: setup
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy

simulate: setup
	$(BIN)/streamrl simulate --seed 0:1000 --jobs 2

soak: simulate
	$(BIN)/python bench/kills.py --runs 50

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	find $(PATHS) -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamrl needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)

# A stamp each, so that the second `make demo` starts at once.
$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV); the first time takes a few minutes"
	$(INSTALL) --editable '.[train,engines]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[train,engines,dev]'
	@touch $@
