# Two commands: `make demo` and `make test`. Both set up .venv themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check format clean

demo: $(VENV)/.demo-installed
	$(BIN)/gpupipe demo

test: $(VENV)/.test-installed
	$(BIN)/python -m pytest -n auto

check: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch alone is gigabytes: the first installation takes a minute or more, depending on the network.
$(VENV)/.demo-installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -e '.[demo,fast]'
	touch $@

$(VENV)/.test-installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -e '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
