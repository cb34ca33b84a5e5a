# `make demo` and `make test` do all set-up themselves: a Python 3.11 and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
# Outside of .venv, so that nothing of what was installed is run. make venv only tells what it finds.
CHECK := $(PYTHON) -I tools/dependencies.py --check
# Two workers with one thread each: more threads than cores only wait for each other.
THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

.PHONY: demo docs test test-fast test-machines test-browser test-federation fuzz soak mutants lint \
	bench support-matrix format venv hashes clean

demo: .venv/ready
	$(BIN)/nafi demo

test: lint
	$(THREADS) $(PYTEST)

# The inner loop, under 90 seconds: all but the tests that are marked as slow. Every module is covered.
test-fast: .venv/ready-dev
	$(THREADS) $(PYTEST) -m 'not browser and not slow'

# All tests as other machines would run them: other kernels, threads and orders. Some 25 minutes.
test-machines: .venv/ready-dev
	PYTEST='$(PYTEST)' .ci/machines

# The documentation site, in build/site; its search needs a server: python -m http.server -d build/site
docs: .venv/ready-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in build/site/index.html"

# Looks at reports and the site in headless Chromium (Debian: apt-get install chromium).
test-browser: .venv/ready-dev
	$(BIN)/python -m pytest -q -m browser tests/test_browser.py

# 10,000 malformed files, messages and configurations for each reader; a quarter of an hour.
# Other ones each time: make fuzz SEED=... draws those of an earlier run.
fuzz: .venv/ready-dev
	@seed=$${SEED:-$$(date +%s)}; echo "make fuzz SEED=$$seed"; \
	NAFI_FUZZ_CASES=10000 $(THREADS) $(PYTEST) \
		--hypothesis-profile=random --hypothesis-seed=$$seed tests/fuzz

# 200 rounds in which clients fail and processes are killed, for each of two strategies, and the
# same runs undisturbed; less than a quarter of an hour.
soak: .venv/ready-dev
	$(THREADS) $(BIN)/python tools/soak.py

# How many small mistakes in the core the tests would notice: SAMPLE mutants of each part, half an hour.
mutants: .venv/ready-dev
	$(THREADS) $(BIN)/python tools/mutants.py --sample $(or $(SAMPLE),40)

# A federation over TLS with node keys, on this machine, through faults; some minutes.
test-federation: .venv/ready-dev
	$(BIN)/python examples/flower-deployment/run.py
	$(BIN)/python examples/flower-deployment/run.py --fault node
	$(BIN)/python examples/flower-deployment/run.py --fault server

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready-dev
	$(BIN)/python benchmarks/matching.py
	$(BIN)/python benchmarks/graph.py
	$(BIN)/python benchmarks/widths.py
	$(BIN)/python benchmarks/fusion.py
	$(BIN)/python benchmarks/refit.py
	$(BIN)/python benchmarks/gpts.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/federated.py

# 175 networks of other packages, and docs/support.md; an hour. ONLY='timm/*' examines some again,
# RESUME=--resume goes on after an interruption.
support-matrix: build/support/ready
	$(THREADS) $(BIN)/python -m tests.support --packages build/support --only '$(or $(ONLY),*)' $(RESUME)

format: .venv/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: .venv/ready-dev

# Whether what was installed is what was pinned, file by file; the gate asks.
hashes: .venv/ready-dev
	$(CHECK) .venv/ready.json .venv/ready-dev.json

clean:
	rm -rf .venv build/support

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nafi needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt --report $@.json --editable '.[ot,lab]'
	-$(CHECK) $@.json
	touch $@

.venv/ready-dev: .venv/ready
	$(PIP) install --quiet --constraint constraints.txt --report $@.json --editable '.[dev]'
	-$(CHECK) $@.json
	touch $@

build/support/ready: tests/support/requirements.txt .venv/ready-dev
	$(PIP) install --quiet --no-deps --upgrade --target build/support --requirement $<
	touch $@
