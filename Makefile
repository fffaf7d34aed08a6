# make finetune   train the default model on this machine, from nothing
# make test       the tests of every module, with one drill of each kind
# make check      lint, types, layers;   make bench   the published numbers;   make drills   the full grids
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: setup finetune test check bench drills

setup: .venv/.ready

# pip, not uv: it takes a torch wheel that is already on the machine. Pinned, so nothing is resolved.
.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

finetune: setup
	$(BIN)/python -m rayapp.finetune configs/tiny_cpu.yaml $(ARGS)

test: setup
	$(BIN)/python -m pytest -q -m "not drill" -n 2 --maxschedchunk 1 $(ARGS)

drills: setup
	$(BIN)/python -m pytest -q -m drill -n 2 --maxschedchunk 1 $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	for name in loop data resume sft checkpoint faults prepare; do $(BIN)/python bench/$$name.py || exit 1; done
