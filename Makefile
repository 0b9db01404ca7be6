# Every target works on a machine that has only python3 with pip: it makes its own environment in $(VENV).
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_TRL := $(VENV)/trl-1.15.0

.PHONY: demo test lint docs bench bench-ops clean

demo: $(READY)
	$(BIN)/python -m benchmarks.demo $(ARGS)

test: $(READY) $(OLDEST_TRL)
	OLDEST_TRL=$(abspath $(OLDEST_TRL)) $(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

docs: $(READY)
	$(BIN)/python tests/support/support_tables.py

SUITES ?= step evaluation precompute online head memory scaling

bench: $(READY)
	status=0; for suite in $(SUITES); do \
		$(BIN)/python -m benchmarks.run --suite $$suite --json out/$$suite.json $(ARGS) || status=1; \
	done; exit $$status

bench-ops: $(READY)
	mkdir -p out
	$(BIN)/python -m pytest benchmarks/ops --benchmark-enable --benchmark-only --benchmark-group-by=group \
		--benchmark-columns=median,iqr,rounds --benchmark-json=out/ops.json $(ARGS)

# torch first and by its exact version: an unpinned one, or one that a package pulls, may be another build.
$(READY): pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade-strategy only-if-needed "$(TORCH)"
	constraints="-c constraints/pins.txt"; \
	$(BIN)/python -c "import sys, torch; sys.exit(torch.version.cuda is not None or torch.version.hip is not None)" \
		&& constraints="$$constraints -c constraints/cpu.txt"; \
	$(BIN)/pip install --quiet $$constraints setuptools -e ".[trl,bench,dev]"
	touch $@

# The oldest TRL that is supported, for the tests that put it in front of the other.
$(OLDEST_TRL): $(READY)
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --target $@ trl==1.15.0
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info
