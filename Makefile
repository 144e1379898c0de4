# Trefoil needs only Python 3.11 and make; a C compiler is optional. Each target makes the virtual environment itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# Two more than there are cores: tests of real processes wait much of the time.
WORKERS = $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 2)')
# Without bytecode on disk, every process that a command or a test starts would compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE
FAST := not processes and not browser and not documents and not statistical
SOURCES := protocol device mpc_helpers benchmarks tests trefoil.py

.PHONY: help demo live check test lint style types compiled tests bench results chaos load alerts fuzz clean

help:
	@echo "make demo    people, reports, three helpers and one noisy answer, in under a minute"
	@echo "make live    the same in your browser: an advertisement, a shop, the answer, the budget"
	@echo "make check   lint, types and the fast tests, in a minute and a half"
	@echo "make test    lint, types and all tests, in seven minutes"
	@echo "make bench   what aggregating under MPC costs, against plaintext and a trusted server"
	@echo "make results the commands of the files in benchmarks/results, and the tables that quote them: hours"
	@echo "make chaos   the whole fault matrix with real processes      make load  200 queries, 100,000 posts"
	@echo "make fuzz    hostile bytes, planted bugs: 30 minutes         make alerts  Prometheus fires every rule"
	@echo "make clean   remove what the others made"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Trefoil needs Python 3.11 or newer; this is $$($(PYTHON) -V)."; \
		  echo "hint:  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "== making the virtual environment in $(VENV) (once; about a minute)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[experiments,cluster,postgres,dev]'
	@# Optional: without it helpers open payloads one at a time, and one line says so.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[lanes]' 2>/dev/null || true
	@$(BIN)/python -m protocol.lanes_build
	@touch $@

demo: $(READY)
	$(BIN)/trefoil demo

live: $(READY)
	$(BIN)/trefoil live

lint: style types

style: $(READY)
	@echo "== lint"
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(READY)
	@echo "== types"
	$(BIN)/mypy

# Pytest compiles tests in its own way, each worker for itself where nobody has done so before.
compiled: $(READY)
	@ls tests/*/__pycache__/*-pytest-*.pyc >/dev/null 2>&1 || $(BIN)/python -m pytest --collect-only -qq >/dev/null || true

# The fast lane. Coverage of real processes, browsers, documents and samples is left to `make test`.
check: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint compiled
	@echo "== fast tests"
	$(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(FAST)"

# Types are checked beside the tests, whose processes wait now and then; what lint finds is said before.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 style compiled
	@$(MAKE) --no-print-directory --jobs 2 types tests

# The order of files is that of tests/conftest.py, long ones first.
tests: $(READY)
	@echo "== tests"
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

bench: $(READY)
	$(BIN)/trefoil bench report
	$(BIN)/trefoil bench device
	$(BIN)/trefoil bench noise
	$(BIN)/trefoil bench throughput

results: $(READY)
	$(BIN)/trefoil bench results --run --write

chaos: $(READY)
	TREFOIL_HUNT_SCHEDULES=100000 TREFOIL_HUNT_ROUNDS=200 $(BIN)/python -m pytest -s --timeout 28800 tests/virtual/test_hunt.py
	TREFOIL_FULL_MATRIX=1 TREFOIL_CHAOS=all $(BIN)/python -m pytest -s --timeout 7200 tests/virtual/test_commit_crashes.py tests/processes/test_chaos.py tests/mpc_helpers/test_postgres_ledger.py \
		tests/mpc_helpers/test_ledger_parts.py
	TREFOIL_NOISE=joint TREFOIL_CHAOS=all $(BIN)/python -m pytest -s --timeout 7200 tests/mpc_helpers/test_bad_helper.py tests/processes/test_chaos.py

load: $(READY)
	TREFOIL_LOAD=all $(BIN)/python -m pytest -s --timeout 7200 tests/processes/test_load.py tests/protocol/test_collector.py \
		tests/mpc_helpers/test_withdrawal.py tests/mpc_helpers/test_server.py tests/processes/test_noise_channels.py \
		tests/device/test_browser_install.py tests/device/test_browser_person.py \
		tests/benchmarks/test_browser_timing.py

alerts: $(READY)
	TREFOIL_ALERTS=all $(BIN)/python -m pytest -s --timeout 1800 tests/processes/test_alerts.py

fuzz: $(READY)
	TREFOIL_FUZZ_SECONDS=600 $(BIN)/python -m pytest -s --timeout 7200 tests/protocol/test_fuzz.py tests/mpc_helpers/test_joint_noise.py tests/mpc_helpers/test_noise_audit.py \
		tests/device/test_device_timelines.py tests/device/test_display_privacy.py tests/device/test_parts_privacy.py
	TREFOIL_BUGS=all $(BIN)/python -m pytest --timeout 7200 tests/documents/test_planted_bugs.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis artefacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
