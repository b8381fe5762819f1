# `make setup` makes the environment; every other target does so by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
WITH_TOOLS := $(VENV)/.with-tools

.PHONY: setup run dist test test-full test-gpu test-peers lint docs bench bench-attacks clean
setup: $(WITH_TOOLS)

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard src/ell0/ops/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(WITH_TOOLS): $(INSTALLED)
	$(INSTALL) -e '.[dev]'
	touch $@

run: $(INSTALLED)  ## the main job: digits classifiers trained, attacked and shown on a page
	$(BIN)/ell0 run

dist: $(INSTALLED)  ## an sdist, and the wheel that is built from it
	$(INSTALL) build
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# mkdocs-material is kept up until May 2027, as it says at each build unless told not to; the pages are plain Markdown.
docs: setup  ## the manual, as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# worksteal: a process without tests takes some from the other, so that no core waits for a long file.
test: lint  ## lint, types, tests
	$(BIN)/python -m pytest -n auto --dist worksteal

test-full: lint  ## with new cases and ten times as many of them
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n auto --dist worksteal

test-gpu:  ## the Triton kernels and training on a GPU; needs torch and Triton alone, no pytest
	PYTHONPATH=src $(PYTHON) tests/gpu_checks.py
	PYTHONPATH=src $(PYTHON) tests/gpu_train_checks.py

# Without their dependencies: some want torchvision, which nothing here uses.
test-peers:  ## the adapters on the libraries themselves, at the versions of peers.txt; not part of CI
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . pytest hypothesis
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r peers.txt
	ELL0_PEERS=1 $(PEERS)/bin/python -m pytest tests/test_adapters.py tests/test_pointwise.py

bench: setup  ## times of the truncated layer on this machine
	$(BIN)/python benchmarks/layer.py --require-mnist --threads 2 --out results/bench-layer-cpu.json
	$(BIN)/python tools/tables.py
	$(BIN)/python tools/figures.py

bench-attacks: setup  ## the attacks beside their peers; REFERENCE=rs_attacks.py of the authors of Sparse-RS
	$(INSTALL) -e '.[foolbox]'
	$(BIN)/python benchmarks/attacks.py --require-mnist --threads 2 $(if $(REFERENCE),--reference "$(REFERENCE)") --out results/bench-attacks-cpu.json
	$(BIN)/python tools/tables.py
	$(BIN)/python tools/figures.py

clean:
	rm -rf $(VENV) $(PEERS) build dist src/*.egg-info src/ell0/ops/_kernel*.so
