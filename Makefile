# Two commands on a fresh machine: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: install install-all demo test test-trust test-slow test-all check fuzz bench docs lock bill release-check clean

install: $(VENV)/.installed
install-all: $(VENV)/.installed-all

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit('FedLens needs Python 3.11 or newer') if sys.version_info < (3, 11) else None"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.installed: $(BIN)/python pyproject.toml
	@echo "Installing FedLens into $(VENV) (PyTorch is large: a few minutes the first time) ..."
	$(BIN)/pip install --quiet -e .
	@touch $@

$(VENV)/.installed-all: $(BIN)/python pyproject.toml
	@echo "Installing FedLens with all extras into $(VENV) (PyTorch is large: a few minutes the first time) ..."
	$(BIN)/pip install --quiet -e ".[all,dev]"
	@touch $@ $(VENV)/.installed

demo: install
	$(BIN)/fedlens run deblur --out runs/deblur --fresh
	$(BIN)/fedlens run demo --out runs/demo --fresh
	@echo
	@echo "Open in a browser:  runs/deblur/report.html  (one sharp scene from ten private, blurred views)"
	@echo "                    runs/demo/report.html    (ten clients learn to tell shapes apart)"

test: install-all
	$(BIN)/pytest -n $(WORKERS)

test-trust: install-all
	$(BIN)/pytest -m trust --timeout 600

test-slow: install-all
	$(BIN)/pytest -m slow --timeout 1800

test-all: test-trust test test-slow

check: install-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: install-all
	$(BIN)/python tests/fuzz.py

bench: install-all
	for f in $(filter-out benchmarks/measure.py benchmarks/flower_peer.py, $(wildcard benchmarks/*.py)); do $(BIN)/python $$f || exit 1; done

# The documentation, as pages in build/site; a warning is an error.
docs: install-all
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open in a browser:  build/site/index.html; with a search field: python3 -m http.server --directory build/site"

# The versions that the tests ran with, and a bill of materials of everything that is installed with all extras.
lock: install-all
	@echo "# Versions that the tests passed with, by \`make lock\`: $$($(BIN)/python -V), Linux. Install the same: pip install -c tested-versions.txt '.[all]'" > tested-versions.txt
	$(BIN)/pip freeze --exclude-editable >> tested-versions.txt

bill: install-all build/bill/bin/python
	mkdir -p dist && build/bill/bin/python .ci/bill.py $(BIN)/python dist/fedlens-all.cdx.json

build/bill/bin/python:
	$(PYTHON) -m venv build/bill
	build/bill/bin/pip install --quiet cyclonedx-bom

# Wheel and sdist, and what somebody gets who installs that wheel and nothing else.
release-check: $(BIN)/python
	$(BIN)/pip install --quiet build
	rm -rf dist build && mkdir build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet dist/*.whl
	build/empty/bin/pip check
	cd build && empty/bin/python -c "import sys, fedlens; heavy = {'torch', 'flwr', 'ray'} & set(sys.modules); sys.exit(f'import fedlens loads {heavy}' if heavy else 0)"
	$(MAKE) build/bill/bin/python && build/bill/bin/python .ci/bill.py build/empty/bin/python dist/fedlens.cdx.json
	cd build && empty/bin/fedlens --version && empty/bin/fedlens run deblur --out run && test -f run/report.html
	@ls -l dist

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
