# The front door. Needs Python 3.11 or newer with headers and venv, g++, make and git; everything else
# goes into .venv/ and .toolkit/ of this folder.

PYTHON ?= python3
CUDA ?= 13.0
ARGS ?=
BENCHMARKS ?= attention norms

VENV := .venv
RUN := $(VENV)/bin/python
BUILD := $(RUN) -m tools.build

.PHONY: help demo test build bench gpu-test matrix gate release verify published records format lint clean

help:
	@echo "make demo      build the variant for the installed torch and train a small model with it"
	@echo "make test      build and check the cpu and CUDA $(CUDA) variants, run all tests"
	@echo "make build     build the cpu and CUDA $(CUDA) variants (ARGS='--backend cpu' for one)"
	@echo "make bench     measure on this machine and write records to benchmarks/results/"
	@echo "make gpu-test  tests on a GPU: this machine's own Python, a variant that is built already"
	@echo "make matrix    build every variant from one clean commit (COMMIT=... for another one)"
	@echo "make gate      VARIANT=...: test one variant as users load it, and record that"
	@echo "make release   show what a release would change; PUBLISH=1 does it (TO=org/name or folder)"
	@echo "make verify    WHAT=org/name@revision or a folder: find files that are not as released"
	@echo "make published what users of every published version find, on the Hub of HF_ENDPOINT"
	@echo "make records   say which committed measurements are of the sources at hand"
	@echo "make format    format C++ and Python; make lint: check both"
	@echo "make clean     remove build/ and .build/, and keep what was installed"
	@if [ -e $(VENV)/test.stamp ]; then $(RUN) -m tools.records; fi

demo: $(VENV)/demo.stamp
	$(BUILD) --for-this-torch $(ARGS)
	$(RUN) examples/train_tiny.py

# One process a core, each with whole files: their fixtures are costly.
test: build
	$(RUN) -m pytest -n auto --dist loadfile

build: $(VENV)/test.stamp
ifeq ($(ARGS),)
	$(BUILD) --backend cpu --backend cuda --cuda $(CUDA)
else
	$(BUILD) $(ARGS)
endif
	@$(RUN) -m tools.records

bench: $(VENV)/test.stamp
	$(BUILD) --for-this-torch
	set -e; for name in $(BENCHMARKS); do $(RUN) -m benchmarks.$$name $(ARGS); done

# No .venv: a GPU machine brings its own torch, and may have no network to fetch another.
gpu-test:
	$(PYTHON) -m pytest -m gpu --ignore=tests/packaging tests $(ARGS)

matrix: $(VENV)/test.stamp
	$(RUN) -m tools.matrix $(if $(COMMIT),--commit $(COMMIT)) $(ARGS)

# TORCH=2.10.0 runs it on another torch, in an environment of its own (a large download). A GPU machine
# has no .venv: its own Python is used.
GATE_PYTHON = $(if $(TORCH),.dev/torch-$(TORCH)/bin/python,$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)))
gate: $(if $(TORCH),.dev/torch-$(TORCH).stamp)
	$(GATE_PYTHON) -m tools.gate $(or $(VARIANT),$(error say VARIANT=name, a folder of build/)) $(ARGS)

release: $(VENV)/test.stamp
	$(RUN) -m tools.release $(if $(PUBLISH),--publish) $(if $(TO),--to $(TO)) \
	    $(if $(COMMIT),--commit $(COMMIT)) $(ARGS)

verify: $(VENV)/test.stamp
	$(RUN) -m tools.release verify $(or $(WHAT),$(error say WHAT=org/name@revision or a folder)) $(ARGS)

published: $(VENV)/test.stamp
	$(RUN) -m pytest tests/packaging/check_published.py $(ARGS)

records: $(VENV)/test.stamp
	@$(RUN) -m tools.records

format: $(VENV)/test.stamp
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format -i
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

lint: $(VENV)/test.stamp
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

clean:
	rm -rf build .build

# A stamp newer than every list it comes from: the second run installs nothing.
$(VENV)/%.stamp: requirements/*.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; say PYTHON=...")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing requirements/$*.txt into $(VENV)/, once: a minute or two"
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt
	@touch $@

.dev/torch-%.stamp:
	$(PYTHON) -m venv .dev/torch-$*
	.dev/torch-$*/bin/python -m pip install --quiet --disable-pip-version-check torch==$* \
	    $$(grep -hE '^(hypothesis|kernels|numpy|pytest|transformers)[=>]=' requirements/*.txt)
	@touch $@

.PRECIOUS: $(VENV)/%.stamp .dev/torch-%.stamp
