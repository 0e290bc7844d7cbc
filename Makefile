# Two commands do everything on a fresh machine with Python >= 3.11, make and git: `make demo` and `make test`.
PYTHON ?= python3
# Any torch >= 2.11 will do; name another build here, e.g. make setup TORCH=torch==2.14.1
TORCH ?= torch==2.13.0
BIN := .venv/bin
TARGET := models/smollm2-135m-instruct

.PHONY: setup demo test test-slow test-quantise soak engine-check check format clean

setup: .venv/.ready $(TARGET)/PROVENANCE.json  ## .venv with everything in it, and the default target

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[deepspeed,endpoint,tensorboard,trackio,wandb,dev]"
	touch $@

$(TARGET)/PROVENANCE.json: | .venv/.ready
	$(BIN)/python scripts/get_smollm2 $(TARGET)

demo: setup  ## distil a draft for SmolLM2 and report what it is worth
	scripts/demo.sh

test: setup  ## the default suite, under ten minutes on two cores
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-slow: setup  ## what takes minutes on its own
	$(BIN)/python -m pytest -m slow

check: .venv/.ready  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-quantise: setup  ## quantised models: the libraries are there for these tests alone, since torchao slows every import
	$(BIN)/python -m pip install --quiet --no-deps "torchao>=0.18" "bitsandbytes>=0.49"
	$(BIN)/python -m pytest tests/test_decode_quantise.py; found=$$?; $(BIN)/python -m pip uninstall --quiet --yes torchao bitsandbytes; exit $$found

soak: .venv/.ready  ## kill data, cache and training at random moments; nothing may be lost
	$(BIN)/python scripts/soak.py
	$(BIN)/python scripts/soak.py --kills 8 --processes 2 --seed 1 --out runs/soak-ddp

.venv-engine/.ready: scripts/engine_env.sh
	PYTHON=$(PYTHON) scripts/engine_env.sh .venv-engine
	touch $@

engine-check: setup .venv-engine/.ready  ## our exported drafts in vLLM (CPU build) and transformers: same text, same acceptance
	$(BIN)/python scripts/engine_check.py

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## everything that commands made, but the environment
	rm -rf runs models build dist .mypy_cache .pytest_cache .ruff_cache
