# make quickstart   train a small causal GMA model, save it, reload it, generate text (a few minutes on two cores)
# make test         lint and all tests
# make lint         ruff check and format
# make clean        remove the virtual environment and caches
#
# Each sets up what it needs in .venv. PYTHON chooses the interpreter (CPython 3.10 to 3.13).

PYTHON ?= python3
VENV := .venv
# Threads that wait for work sleep: on shared cores, spinning ones slow each other down many times over.
export OMP_WAIT_POLICY ?= PASSIVE
READY := $(VENV)/.ready

.PHONY: help quickstart test lint clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

quickstart: $(READY)
	$(VENV)/bin/python scripts/quickstart.py --output_dir quickstart_output

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

test: lint
	$(VENV)/bin/python -m pytest -n 2 --durations 10

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
