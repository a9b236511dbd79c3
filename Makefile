# Each target says what it does; `make` alone lists them.
.DEFAULT_GOAL := help

HOST ?= 127.0.0.1
PORT ?= 8000
DATA_DIR ?= ./data
ARGS ?=
PYTEST_ARGS ?=
TORCH_INDEX_URL ?=
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
INSTALLED := .venv/installed
INSTALLED_DEV := .venv/installed-dev
HTMX := web/manylora/web/static/htmx.min.js
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) --editable

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  HOST, PORT, DATA_DIR and ARGS are handed to `make serve`, PYTEST_ARGS to `make test`;'
	@echo '  TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu takes the CPU build of PyTorch.'

.PHONY: serve
serve: $(INSTALLED) $(HTMX) ## start everything with a demo model, two tenants and their adapters
	@exec $(BIN)/manylora serve --demo --host "$(HOST)" --port "$(PORT)" --data-dir "$(DATA_DIR)" $(ARGS)

.PHONY: test
test: $(INSTALLED_DEV) $(HTMX) ## run the tests; says at the end what was skipped and why
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: nightly
nightly: $(INSTALLED_DEV) $(HTMX) ## run the long tests that `make test` leaves out
	$(BIN)/python -m pytest -m nightly $(PYTEST_ARGS)

.PHONY: check
check: $(INSTALLED_DEV) ## lint, formatting, types, import rules, docker-compose.yml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

.PHONY: format
format: $(INSTALLED_DEV) ## mend formatting and what ruff can mend itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: map
map: $(INSTALLED_DEV) ## write the list of modules in docs/architecture.md anew
	$(BIN)/python docs/make_map.py

.PHONY: download-size
download-size: $(INSTALLED) ## measure what installing downloads on this machine
	$(BIN)/python docs/measure_download.py . $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

.PHONY: clean
clean: ## remove .venv, caches and build output; keeps the data folder
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(HTMX)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'manylora needs Python 3.11 or newer: PYTHON=/path/to/python3.11 make ...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo '$(PYTHON) is older than Python 3.11, which manylora needs' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo '$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv' >&2; exit 1; }

# The figures are those of `make download-size` on Linux x86-64, rounded.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into .venv. pip downloads about 270 MB with the CPU build of PyTorch, or 2.8 GB with'
	@echo 'the CUDA build, which is what PyPI has for Linux x86-64.'
	@echo 'TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu make ... takes the CPU build.'
	@test -z '$(TORCH_INDEX_URL)' || echo 'PyTorch also comes from $(TORCH_INDEX_URL) now.'
	$(PIP_INSTALL) .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(INSTALLED)
	$(PIP_INSTALL) '.[dev]'
	@touch $(INSTALLED) $@

$(HTMX): web/fetch_static.py | $(INSTALLED)
	$(BIN)/python web/fetch_static.py
	@touch $@
