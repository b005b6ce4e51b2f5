# SPDX-License-Identifier: Apache-2.0
#
# `make demo` and `make test` are all that a newcomer needs; both install what is missing, build,
# and may be run again at any time. `make help` lists the rest.

PRESET  ?= release
JOBS    ?= $(shell nproc)
CTEST_FLAGS ?=
BENCH_FLAGS ?=
FUZZ_SECONDS ?= 300

MODEL   := build/models/SmolLM2-135M-Instruct.Q4_1.gguf
PROFILE := deploy/profiles/smollm2-135m-instruct.safetensors
# Token ids of texts, as a NumPy archive with the keys calib and eval, 4,096 ids a text, for the targets
# accuracy and profile. Unset: bench/accuracy/npz_to_tokens.py's own.
ACCURACY_TOKENS ?=
ACCURACY_TEXTS ?= 1

# For `make python`: models installs PyTorch and transformers too.
PYTHON_EXTRAS ?=

.DEFAULT_GOAL := help
.PHONY: help setup build model demo test bench bench-rivals bench-gpu accuracy python lint format asan tsan tsa fuzz profile clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Install what is missing from the distribution's packages (run by the others)
	@deploy/install-dependencies.sh

build: setup ## Build everything (PRESET=release|dev|asan|tsan|tsa|fuzz)
	@cmake --preset $(PRESET)
	@cmake --build --preset $(PRESET) -j $(JOBS)

model: ## Download the model of the demo and of some tests into build/models (92 MB)
	@deploy/fetch-model.sh

test: build ## Build, then run the unit, model and end-to-end tests
	@deploy/fetch-model.sh || echo "Going on without the model: tests that need it are skipped."
	@ctest --preset $(PRESET) -j $(JOBS) $(CTEST_FLAGS)

demo: build model ## Three engines share one system prompt at two bits; writes build/demo.json
	@deploy/demo/demo.py --bin build/$(PRESET)/bin --model $(MODEL) --profile $(PROFILE) --out build/demo.json

accuracy: build model ## Perplexity of BF16 and each codec (ACCURACY_TEXTS=8: all); writes build/accuracy.json
	@bench/accuracy/run_accuracy.py --bin build/$(PRESET)/bin --model $(MODEL) --profile $(PROFILE) \
	  $(ACCURACY_TOKENS:%=--tokens %) --texts $(ACCURACY_TEXTS) --out build/accuracy.json

profile: build model ## Fit the model's profile anew from the calibration texts
	@bench/accuracy/npz_to_tokens.py calib build/calib.u32 $(ACCURACY_TOKENS)
	@build/$(PRESET)/bin/crumb-example collect --model $(MODEL) --tokens build/calib.u32 --texts 8 \
	  --out build/statistics.safetensors
	@build/$(PRESET)/bin/crumb-calibrate fit build/statistics.safetensors --out $(PROFILE)

python: setup ## Build, install (build/python/venv) and test the Python package (PYTHON_EXTRAS=models: its commands too)
	@deploy/install-dependencies.sh --python
	@client/python/install.sh $(PYTHON_EXTRAS)
	@tests/client/python/run.sh .

asan: ## Run the tests under the address and undefined-behaviour sanitizers
	@$(MAKE) --no-print-directory test PRESET=asan

tsan: ## Run the tests that do not speak gRPC under the thread sanitizer
	@$(MAKE) --no-print-directory test PRESET=tsan

tsa: ## Compile with clang's thread-safety analysis
	@$(MAKE) --no-print-directory build PRESET=tsa

fuzz: setup ## Run the decoders under libFuzzer, FUZZ_SECONDS each (300)
	@deploy/install-dependencies.sh --fuzz
	@cmake --preset fuzz -D CRUMB_FUZZ_SECONDS=$(FUZZ_SECONDS)
	@cmake --build --preset fuzz -j $(JOBS) --target fuzzers
	@ctest --test-dir build/fuzz -R '_fuzz(_seeds)?$$' --output-on-failure

lint: ## Check the format of all sources and run clang-tidy over the product
	@deploy/install-dependencies.sh --lint
	@cmake --preset dev >/dev/null && cmake --build --preset dev -j $(JOBS) --target crumb_proto >/dev/null
	@tests/style/lint.sh build/dev $(FILES)

format: ## Rewrite all sources in the house's format
	@deploy/install-dependencies.sh --lint
	@git ls-files -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

bench: build ## Run every benchmark; print each figure beside its limit, write build/bench.json
	@python3 bench/report/run_bench.py $(BENCH_FLAGS)

bench-rivals: build ## Run Mooncake, LMCache and Redis beside crumbd (7 GB of packages); write build/rivals.json
	-@deploy/install-dependencies.sh --rivals
	@python3 bench/rivals/run.py $(BENCH_FLAGS)

bench-gpu: ## Check and time the GPU's kernels beside BF16 rivals, and the service on it; writes bench/results/ (needs nvcc and a GPU)
	@bench/gpu/run.sh

clean: ## Remove build output (the downloaded model stays in build/models)
	@find build -mindepth 1 -maxdepth 1 ! -name models -exec rm -rf {} + 2>/dev/null || true
