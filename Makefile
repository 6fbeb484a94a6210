# Each target does all its set-up on a machine with Rust and Python; `make help` lists them.
BACKEND ?= tensorflow
BACKENDS ?= tensorflow jax torch
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Sources that the native module is made of.
NATIVE_SOURCES = $(shell find crates -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
RUN = TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0

.PHONY: help demo test test-rust test-python check sanitize bench format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/$(BACKEND) ## train a DeepFM on Criteo-shaped data, dump it, load it (BACKEND=tensorflow|jax|torch)
	$(RUN) KERAS_BACKEND=$(BACKEND) $(BIN)/python examples/criteo_deepfm.py

test: test-rust test-python ## all tests, on the three backends

test-rust:
	cargo test --workspace --exclude sok-python

test-python: $(VENV)/tensorflow $(VENV)/jax $(VENV)/torch: $(VENV)/package
	$(BIN)/maturin develop --release -q --extras $(notdir $@)
	touch $@

$(VENV)/tools: $(VENV)/package
	$(BIN)/pip install -q pytest pytest-timeout ruff mypy
	touch $@
