# `make demo` and `make test` work on a fresh machine with Python 3.11 or later; both create .venv once.

PYTHON ?= python3
# One PyTorch for everybody. On Linux the default index ships CUDA builds; 2.11 to 2.13 are tested.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN = $(VENV)/bin
DEMO_RUN ?= runs/demo

export NO_MKDOCS_2_WARNING = 1

.PHONY: demo test test-long gpu docs pythons quotes record soak soak-ranks lint clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check --upgrade pip
	$(BIN)/pip install -qq --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -qq --disable-pip-version-check -e ".[dev]"
	@touch $@

# The same public verbs that the README teaches, one after another.
demo: $(VENV)/installed
	@IRONLAW=$(BIN)/ironlaw sh scripts/demo.sh $(DEMO_RUN)

# A process per core, each with one thread (tests/conftest.py); what one has left the others take.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

# Minutes long: run when they matter, before a release or after a change of the loop.
test-long: $(VENV)/installed
	$(BIN)/python -m pytest -m long

# One machine with one GPU, no network: tests, speed and memory beside the plans in under 8 minutes. Installs nothing.
gpu:
	$(PYTHON) benchmarks/gpu.py $(GPU)

# The site into build/site, strict: a dead link is an error. `make docs SERVE=1` shows it while you write.
docs: $(VENV)/installed
	$(BIN)/pip install -qq --disable-pip-version-check -e ".[docs]"
	$(BIN)/python -m mkdocs $(if $(SERVE),serve,build -q)

# What the README and the site quote of commands, written again: `record` after `make demo` on an idle machine.
quotes: $(VENV)/installed
	$(BIN)/python scripts/quotes.py

record: $(VENV)/installed
	IRONLAW=$(BIN)/ironlaw PYTHON=$(BIN)/python sh scripts/record.sh

# The wheel in a clean environment of each Python that is here.
pythons:
	PYTHON=$(PYTHON) TORCH="$(TORCH)" sh scripts/check_pythons.sh

# 100 runs killed at random moments and resumed, each to the bit the run that nobody killed: some minutes.
soak: $(VENV)/installed
	$(BIN)/python benchmarks/soak.py --runs 100 --out benchmarks/results/soak.md

# One run on 4 ranks, one of which is killed 30 times: some minutes.
soak-ranks: $(VENV)/installed
	$(BIN)/python benchmarks/soak_ranks.py --kills 30 --out benchmarks/results/soak_ranks.md

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
