# Set-up, demo, tests and checks of a checkout; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A file, not the folder .venv: it is written last, so that a set-up which was cut short is taken up again.
STAMP := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test fuzz gpu-check audit lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       trace, training, export, evaluation and report in one go, into demo-output/"
	@echo "make test       the whole test suite"
	@echo "make fuzz       the readers on broken logs, 2 minutes each (with atheris if the extra fuzz is installed)"
	@echo "make gpu-check  on a machine with a GPU: the tests marked gpu, compute-sanitizer, a table of speeds; no .venv"
	@echo "make audit      known vulnerabilities in the pinned dependencies (pip-audit; needs the network)"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff lay out the code"
	@echo "make install    only make .venv (the others do it themselves)"
	@echo "make clean      remove .venv, caches and builds; keeps demo-output/ and runs/"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "error: there is no $(PYTHON); install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)," \
			"or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: helm-rl needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name a newer one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make virtual environments; install its venv module (Debian: apt-get install python3-venv)" \
			>&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/helm-rl demo --output demo-output --overwrite

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m fuzz $(FUZZ_ARGS)

# On a machine of which only a Python with cupy, numpy, numba and pytest is asked; GPU_CHECK_ARGS="--json FILE" for figures.
gpu-check:
	@PYTHON="$(PYTHON)" bash tests/gpu_check.sh $(GPU_CHECK_ARGS)

# Of pins, in an environment of its own: what pip-audit needs is not held to constraints.txt. --strict: a package about which
# nothing could be learnt is a failure. AUDIT_ARGS="--ignore-vuln ID" for one that is known not to concern us.
audit:
	$(PYTHON) -m venv --clear .venv-audit
	.venv-audit/bin/python -m pip install --disable-pip-version-check -q 'pip-audit>=2.9,<3'
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt $(AUDIT_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
