# Three targets for users, each alone enough on a machine with Python, a C compiler and the registry:
#   make demo      the embedded model tells a story
#   make test      the test suite
#   make install   the package with every extra, in .venv
# And for developers: check, slow, docs, native, clean.

PYTHON ?= python3
BIN := .venv/bin
PIP := @$(BIN)/python -m pip install --quiet --disable-pip-version-check
PACKAGE := pyproject.toml CMakeLists.txt $(wildcard native/*)

.PHONY: demo test slow install check docs native clean

demo: .venv/installed
	@$(BIN)/finback run --raw --seed 5 --max-tokens 200 "One morning the children went down to the river, and"

test: .venv/tested
	@$(BIN)/python -m pytest -q -n 2

slow: .venv/tested
	@$(BIN)/python -m pytest -q -m slow

install: .venv/python
	@echo "Installing finback with every extra into .venv"
	$(PIP) --editable '.[test,dev,oracle,training]'
	@touch .venv/installed .venv/tested

check: .venv/python
	$(PIP) --editable '.[test,dev]'
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: .venv/installed
	@$(BIN)/typer finback.cli.main utils docs --name finback --title "The finback command" --output docs/cli.md

native: .venv/python
	$(PIP) --editable .

clean:
	rm -rf .venv build

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "finback needs Python 3.11 or newer")'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/python $(PACKAGE)
	@echo "Installing finback into .venv"
	$(PIP) --editable .
	@touch $@

.venv/tested: .venv/python $(PACKAGE)
	@echo "Installing finback and its tests into .venv"
	$(PIP) --editable '.[test]'
	@touch $@ .venv/installed
