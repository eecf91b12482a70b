# Seven verbs: setup demo test lint format patches bench. Each works on a fresh clone; a C++ compiler, git and
# python3 >= 3.9 with venv are all that has to be there.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON     ?= python3
BUILD_TYPE ?= Release
# options of llama.cpp, e.g. make setup CMAKE_ARGS=-DGGML_CUDA=on
CMAKE_ARGS ?=
export CMAKE_ARGS
PYTEST_ARGS ?=

VENV := .venv
BIN  := $(VENV)/bin
PY   := $(BIN)/python
# cmake and ninja from the virtual environment
RUN  := PATH="$(CURDIR)/$(BIN):$$PATH"

CMAKE_PY := -DPython_EXECUTABLE="$(CURDIR)/$(PY)"

# when these were made tells what has to be made again
TOOLS   := $(VENV)/.tools-installed
PACKAGE := $(VENV)/.package-installed
ARGS    := $(VENV)/.cmake-args

PY_FILES     := $(shell find python -type f -not -name '*.pyc')
PACKAGE_DEPS := pyproject.toml CMakeLists.txt LICENSE README.md $(wildcard cmake/*.cmake patches/UPSTREAM patches/*.patch \
	scripts/*.py native/CMakeLists.txt native/include/* native/src/* native/src/*/* native/ggml/* native/ggml/*/* models/*.toml) $(PY_FILES)

.PHONY: help setup demo test lint format patches bench
help:
	@echo 'make setup     build and install llama-dge into $(VENV)'
	@echo 'make demo      answer a question about a long document, full cache and DGE side by side'
	@echo 'make test      unit tests in C++ (sanitizers) and Python'
	@echo 'make lint      ruff, mypy, clang-format, layers of native/src'
	@echo 'make format    rewrite sources in the project style'
	@echo 'make patches   check the patches to llama.cpp and what they rely on; patches-apply, -refresh, -bump, probes'
	@echo 'make bench     llama-dge bench: speed and memory before and after a cut, beside full cache and stock'
	@echo 'also: dev (incremental build of libllama), test-native, test-python, test-model, test-stock, test-upstream, test-backend-ops, test-gpu-shim, test-cuda-compile, test-cuda-objects, test-cuda-link, test-vulkan, gpu-check, test-integrations, test-browser, test-sanitize, soak, bench-policies, bench-select, bench-memory, bench-recall, bench-peers, bench-score, sweep, clean'

# --- environment

$(TOOLS): $(wildcard requirements/*.txt)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet 'pip>=23.1'
	$(PY) -m pip install --quiet -r requirements/build.txt -r requirements/dev.txt
	$(RUN) $(PY) -m pip install --quiet -r requirements/runtime.txt
	touch $@

# rewritten only when it differs
$(ARGS): $(TOOLS) FORCE
	test -f $@ && test "$$(cat $@)" = '$(CMAKE_ARGS)' || echo '$(CMAKE_ARGS)' > $@

# verbose, as the first build takes ten minutes on two cores
$(PACKAGE): $(TOOLS) $(ARGS) $(wildcard $(PACKAGE_DEPS))
	$(RUN) $(PY) -m pip install --verbose --no-build-isolation .
	touch $@

.PHONY: FORCE
FORCE:

setup: $(PACKAGE)

# --- build of libllama alone, for work on the native part: much faster than a wheel

.PHONY: dev
dev: $(TOOLS)
	$(RUN) cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) $(CMAKE_PY) $(CMAKE_ARGS)
	$(RUN) cmake --build build/dev --target llama-dge
	@echo 'LLAMA_DGE_LIB_PATH=$(CURDIR)/build/dev/bin'

# --- verbs

demo: setup
	$(BIN)/llama-dge demo

.PHONY: test-native test-python test-stock test-model test-upstream
test: test-native test-gpu-shim test-python

test-native: $(TOOLS)
	$(RUN) cmake -S native/tests -B build/native-tests -G Ninja $(CMAKE_PY)
	$(RUN) cmake --build build/native-tests
	$(RUN) ctest --test-dir build/native-tests --output-on-failure --no-tests=error

# the CUDA and Metal kernels compiled for the CPU, in three orders of threads, with sanitizers, beside wrong variants of
# them; docs/gpu.md. The Metal part needs clang, and is reported as skipped without it: make gpu-packages
# SHIM_ARGS= runs wrong variants of the Metal kernels as well, a minute
SHIM_ARGS ?= -LE slow
.PHONY: test-gpu-shim test-cuda-compile gpu-packages
test-gpu-shim: $(TOOLS)
	$(RUN) cmake -S native/ggml/tests/gpu -B build/gpu-shim -G Ninja $(CMAKE_PY)
	$(RUN) cmake --build build/gpu-shim
	$(RUN) ctest --test-dir build/gpu-shim --output-on-failure --no-tests=error $(SHIM_ARGS)

# clang, and Vulkan with a driver for the CPU, by apt-get
gpu-packages:
	scripts/gpu_packages.sh metal
	scripts/gpu_packages.sh vulkan

# the CUDA kernels for six architectures: registers, shared memory and spills, with bounds. No card; nvcc is installed
# into build/cuda where there is none
CUDA_ARGS ?=
test-cuda-compile: $(TOOLS)
	$(PY) scripts/cuda_compile.py $(CUDA_ARGS)

# ... and what puts them into ggml-cuda, for one; needs cuBLAS's headers, of a wheel of 420 MB
.PHONY: test-cuda-objects
test-cuda-objects: $(TOOLS)
	$(PYTHON) scripts/upstream.py prepare
	$(PY) scripts/cuda_compile.py --objects $(CUDA_ARGS)

# `CMAKE_ARGS=-DGGML_CUDA=on pip install .` into build/cuda-venv, without a card, and tests of what came of it. The whole
# of ggml-cuda for one architecture: 40 minutes of CPU time on a fast machine; ccache keeps what is done
.PHONY: test-cuda-link
test-cuda-link: $(TOOLS)
	$(PY) scripts/cuda_link.py
	LLAMA_DGE_LIB_PATH=$$(echo $(CURDIR)/build/cuda-venv/lib/python*/site-packages/llama_dge/lib) PYTHONPATH=python $(PY) -m pytest -m cuda_link $(PYTEST_ARGS)
	build/cuda-venv/bin/llama-dge doctor

# cuts with model and cache on a Vulkan device; by default lavapipe, Mesa's driver for the CPU: scripts/gpu_packages.sh
# installs it. For a card: make test-vulkan VULKAN_ICD=
VULKAN_ICD ?= $(firstword $(wildcard /usr/share/vulkan/icd.d/lvp_icd*.json))
VULKAN_ENV  = GGML_VK_VISIBLE_DEVICES=0 $(addprefix VK_ICD_FILENAMES=,$(VULKAN_ICD))
.PHONY: test-vulkan vulkan-build
vulkan-build: $(TOOLS)
	scripts/gpu_packages.sh vulkan
	$(RUN) cmake -S . -B build/vulkan -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_VULKAN=ON $(CMAKE_PY)
	$(RUN) cmake --build build/vulkan --target llama-dge

test-vulkan: vulkan-build
	$(VULKAN_ENV) LLAMA_DGE_LIB_PATH=$(CURDIR)/build/vulkan/bin PYTHONPATH=python $(PY) -m pytest -m vulkan $(PYTEST_ARGS)

# on a machine with an NVIDIA card; GPU_ARGS=--dry-run takes the CPU. The tools first where nothing can be downloaded
.PHONY: gpu-check gpu-check-tools
gpu-check-tools: $(TOOLS)
	$(PYTHON) scripts/upstream.py prepare
GPU_ARGS ?=
gpu-check: gpu-check-tools
	scripts/gpu_check.sh $(GPU_ARGS)

test-python: setup
	$(PY) -m pytest $(PYTEST_ARGS)

test-stock: setup
	$(PY) -m pytest -m stock $(PYTEST_ARGS)

# hundreds of requests on one instance, three minutes
.PHONY: soak
soak: setup
	$(PY) -m pytest -m soak $(PYTEST_ARGS)

# LangChain and LlamaIndex, which are installed first
INTEGRATIONS := $(VENV)/.integrations-installed
$(INTEGRATIONS): $(PACKAGE) requirements/integrations.txt
	$(PY) -m pip install --quiet -r requirements/integrations.txt
	touch $@

.PHONY: test-integrations
test-integrations: $(INTEGRATIONS)
	$(PY) -m pytest -m integrations $(PYTEST_ARGS)

# the page of `llama-dge inspect` in headless Chromium (apt-get install chromium); skipped where there is none
.PHONY: test-browser
test-browser: setup
	$(PY) -m pytest -m browser $(PYTEST_ARGS)

test-model: setup sweep-build
	$(PY) -m pytest -m 'model or slow' $(PYTEST_ARGS)

# llama.cpp's own tests on the patched library; its own build folder, which shares nothing but ccache's entries
test-upstream: $(TOOLS)
	$(RUN) cmake -S . -B build/upstream-tests -G Ninja $(CMAKE_PY) -DLLAMA_DGE_UPSTREAM_TESTS=ON $(CMAKE_ARGS)
	$(RUN) cmake --build build/upstream-tests --target llama-dge-upstream-tests
	$(RUN) ctest --test-dir build/upstream-tests --output-on-failure --no-tests=error

# ATTN_SCORE on every backend of the build: our test, then llama.cpp's; e.g. make test-backend-ops OPS_ARGS= for all
# operations
OPS_ARGS ?= -o ATTN_SCORE
.PHONY: test-backend-ops bench-score
test-backend-ops: dev
	$(RUN) cmake --build build/dev --target test-attn-score test-backend-ops
	build/dev/bin/test-attn-score
	build/dev/bin/test-backend-ops test $(OPS_ARGS)

# scores of a layer by the operation and by the graph, e.g. make bench-score SCORE_ARGS="32768 32 2": keys, queries, threads
SCORE_ARGS ?=
bench-score: dev
	$(RUN) cmake --build build/dev --target bench-attn-score
	build/dev/bin/bench-attn-score $(SCORE_ARGS)

# Is every architecture cut exactly, or refused? llama.cpp's test-llama-archs writes a tiny random model of each into
# build/archs (1 GB), docs/models.md tells the result. E.g. make sweep SWEEP_ARGS="--only llama gemma3"
SWEEP_ARGS ?=
.PHONY: sweep sweep-build
sweep-build: $(TOOLS)
	$(RUN) cmake -S . -B build/upstream-tests -G Ninja $(CMAKE_PY) -DLLAMA_DGE_UPSTREAM_TESTS=ON $(CMAKE_ARGS)
	$(RUN) cmake --build build/upstream-tests --target test-llama-archs

sweep: setup sweep-build
	PYTHONPATH="tests$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m arch_sweep $(or $(SWEEP_ARGS),--table docs/models.md)

# random calls on the library, in which our own sources are built with sanitizers. llama.cpp's are not, which is what makes
# this quick; copies that they make of memory are checked all the same
STEPS ?= 400
.PHONY: test-sanitize
test-sanitize: $(TOOLS)
	mkdir -p build/stress/park
	$(PY) -m tests.reference.models g2 build/stress/g2.gguf
	for sanitizer in address undefined thread; do \
		$(RUN) cmake -S . -B build/sanitize-$$sanitizer -G Ninja $(CMAKE_PY) -DCMAKE_BUILD_TYPE=Release \
			-DLLAMA_DGE_SANITIZE=$$sanitizer -DLLAMA_DGE_STRESS=ON; \
		$(RUN) cmake --build build/sanitize-$$sanitizer --target dge-stress; \
		TSAN_OPTIONS=halt_on_error=1:suppressions=native/stress/tsan.supp build/sanitize-$$sanitizer/bin/dge-stress build/stress/g2.gguf build/stress/park $(STEPS); \
	done

CPP_FILES = $(shell find native -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) -m mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(PY) scripts/check_layers.py

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

.PHONY: patches-apply patches-refresh patches-check patches-bump probes probes-table
patches: patches-check probes
patches-apply:
	$(PYTHON) scripts/upstream.py prepare
patches-refresh:
	$(PYTHON) scripts/upstream.py refresh
patches-check:
	$(PYTHON) scripts/upstream.py check
# another llama.cpp: make patches-bump VERSION=0.3.37 SHA256=...
patches-bump:
	$(PYTHON) scripts/upstream_bump.py $(VERSION) $(SHA256)
# what we rely on inside llama.cpp, a probe each; e.g. make probes PROBE_ARGS="--tree ../llama.cpp"
PROBE_ARGS ?=
probes:
	$(PYTHON) scripts/upstream_probe.py $(PROBE_ARGS)
probes-table:
	$(PYTHON) scripts/upstream_probe.py --write-table

# e.g. make bench BENCH_ARGS=--quick; beside the stock llama-cpp-python that make test-stock built, if it did
BENCH_ARGS  ?=
BENCH_STOCK ?= $(or $(LLAMA_DGE_STOCK_PYTHON),$(wildcard build/stock-venv/bin/python))
bench: setup
	$(BIN)/llama-dge bench --json build/bench.json $(if $(BENCH_STOCK),--stock $(BENCH_STOCK)) $(BENCH_ARGS)

# what policies and uneven budgets cost, e.g. make bench-policies BENCH_ARGS=--quick
.PHONY: bench-policies bench-select bench-memory
bench-policies: setup
	$(PY) -m bench.policies $(BENCH_ARGS)

# what a cut gives back: cache and resident memory
bench-memory: setup
	$(PY) -m bench.memory $(BENCH_ARGS)

# choosing again from the parked cache: decode speed beside the full cache
.PHONY: bench-recall
bench-recall: setup
	$(PY) -m bench.recall $(BENCH_ARGS)

# beside NVIDIA/kvpress on the same weights: which rows are kept, speed, memory. It gets an interpreter of its own
PEERS := build/peers-venv/.installed
$(PEERS): requirements/peers.txt
	test -x build/peers-venv/bin/python || $(PYTHON) -m venv build/peers-venv
	build/peers-venv/bin/python -m pip install --quiet -r requirements/peers.txt
	touch $@

.PHONY: bench-peers
bench-peers: setup $(PEERS)
	$(PY) -m bench.peers $(BENCH_ARGS)

bench-select: $(TOOLS)
	$(RUN) cmake -S native/tests -B build/native-tests -G Ninja $(CMAKE_PY)
	$(RUN) cmake --build build/native-tests --target bench-dge-select
	build/native-tests/bench-dge-select

.PHONY: clean
clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache
