# `make setup` makes the environment; every other target does so by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
# What the lock files name and nothing else: wheels alone, so that no package runs code while it is installed.
LOCKED := -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r

.PHONY: setup run dist test test-full test-gpu test-peers lint docs bench bench-attacks lock clean
.SECONDARY:
setup: $(VENV)/.installed

# PyTorch's CPU build where pip finds it, or else the registry's, which brings CUDA along on Linux.
%/.locked: requirements.lock torch-cpu.lock torch.lock
	$(PYTHON) -m venv --clear $*
	$*/bin/python $(LOCKED) torch-cpu.lock || $*/bin/python $(LOCKED) torch.lock
	$*/bin/python $(LOCKED) requirements.lock
	cat requirements.lock > $@

%/.installed: %/.locked pyproject.toml setup.py $(wildcard src/ell0/ops/csrc/*)
	$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$*/bin/python -m pip check
	touch $@

$(PEERS)/.peers: $(PEERS)/.installed peers.lock
	$(PEERS)/bin/python $(LOCKED) peers.lock
	touch $@

lock:  ## pins and hashes anew, by uv, which must be on the path
	$(PYTHON) tools/lock.py

run: setup  ## the main job: digits classifiers trained, attacked and shown on a page
	$(BIN)/ell0 run

dist: setup  ## an sdist, and the wheel that is built from it
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

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

test-peers: $(PEERS)/.peers  ## the adapters on the libraries themselves, at the versions of peers.lock; not part of CI
	ELL0_PEERS=1 $(PEERS)/bin/python -m pytest tests/test_adapters.py tests/test_pointwise.py

bench: setup  ## times of the truncated layer on this machine
	$(BIN)/python benchmarks/layer.py --require-mnist --threads 2 --out results/bench-layer-cpu.json
	$(BIN)/python tools/tables.py
	$(BIN)/python tools/figures.py

bench-attacks: $(PEERS)/.peers  ## the attacks beside their peers; REFERENCE=rs_attacks.py of the authors of Sparse-RS
	$(PEERS)/bin/python benchmarks/attacks.py --require-mnist --threads 2 $(if $(REFERENCE),--reference "$(REFERENCE)") --out results/bench-attacks-cpu.json
	$(PEERS)/bin/python tools/tables.py
	$(PEERS)/bin/python tools/figures.py

clean:
	rm -rf $(VENV) $(PEERS) build dist src/*.egg-info src/ell0/ops/_kernel*.so
