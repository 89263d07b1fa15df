# Every target sets up what it needs in .venv. Needs: Debian, Python 3.11 (python3-venv), make; `test` also postgresql
# and chromium.
.DELETE_ON_ERROR:
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench soak clean

$(STAMP): pyproject.toml setup.cfg constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs Python 3.11 with venv: apt-get install python3.11 python3.11-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## kill a real pipeline twice, watch it recover, check the result bit for bit
	$(BIN)/python -m example_project.demo

test: $(STAMP)  ## all tests: real processes, a real S3 server, a real PostgreSQL, a real browser
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { echo "needs PostgreSQL: apt-get install postgresql"; exit 1; }
	@test -x /usr/bin/chromium || { echo "needs Chromium: apt-get install chromium"; exit 1; }
	$(BIN)/python -m pytest -m "not alone"
	$(BIN)/python -m pytest -m alone -n 0

lint: $(STAMP)  ## style, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## speed as ratios, raw rounds kept in benchmarks/results
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.sidecar
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.recovery_tick
	$(BIN)/python -m benchmarks.resume

soak: $(STAMP)  ## the full counts: kill sweeps and model checks
	RESILIENT_SOAK=1 $(BIN)/python -m pytest -m "not alone" --ignore tests/chaos
	RESILIENT_SOAK=1 $(BIN)/python -m pytest tests/chaos -n 1
	RESILIENT_SOAK=1 $(BIN)/python -m pytest -m alone -n 0

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
