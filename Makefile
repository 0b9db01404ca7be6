# Every target works on a machine that has only python3 with pip: it makes its own environment in $(VENV).
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/python -m benchmarks.demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(READY)
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

clean:
	rm -rf $(VENV) build dist out *.egg-info
