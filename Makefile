# Two commands do everything on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
# Another interpreter than python3 gets a folder of its own, such as .venv-3.13.
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
BIN := $(VENV)/bin
ARGS ?=

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

# Worker processes of one thread each: several threads in several processes wait for one another. What
# is slow takes one more than two cores, since some of its tests wait for a deadline.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL = -n $(WORKERS) --dist worksteal
# Tests that need processes without trained threads, and those of test-docs.
APART = faults scripts
WHOLE_RUNS = $(APART) end_to_end tagged_device vllm_real vllm_omni_real
# Further interpreters for test-versions.
VERSIONS = 3.12 3.13
# Files that hold tests with a mark: to collect all others takes longer than to run some of them.
HOLDING = $(shell grep -rlE "$(1)" tests --include="test_*.py" $(APART:%=--exclude-dir=%))

OMNI_VENV ?= .venv-vllm-omni
$(OMNI_VENV)/.ready: pyproject.toml $(wildcard tests/support/*.sh tests/vllm_omni_real/*.sh tests/vllm_omni_real/cpu_platform/*/*.py)
	rm -rf $(OMNI_VENV)
	PYTHON=$(PYTHON) bash tests/vllm_omni_real/install.sh $(OMNI_VENV)
	touch $@

.PHONY: install demo browser extras test test-all test-slow test-fast test-versions test-faults test-kernels docs reference test-docs vllm-omni test-vllm-omni lint check size verification benchmark benchmark-correction benchmark-decoupled benchmark-workers benchmark-time-to-reward full-size
install: $(VENV)/.ready  ## everything into .venv

demo: $(VENV)/.ready  ## train the bundled model on the OCR reward
	$(BIN)/flowgrpo-rc train $(ARGS)

test: $(VENV)/.ready  ## run the tests but for those marked slow, or with PKG=correction all of one room
	$(PYTEST) $(if $(PKG),tests/$(PKG),$(PARALLEL) -m "not slow" $(APART:%=--ignore=tests/%)) $(ARGS)

test-slow: $(VENV)/.ready  ## run the tests marked slow
	$(PYTEST) -n 3 --dist worksteal -m slow $(call HOLDING,mark.slow|support.marks) $(ARGS)

test-all: test test-slow test-kernels test-faults test-docs  ## run all tests that need no environment of their own

test-versions:  ## run the quick tests on each further interpreter that is here
	@for version in $(VERSIONS); do \
		python=; \
		for candidate in python$$version $(HOME)/.pyenv/versions/$$version*/bin/python; do \
			if $$candidate -c 'import ensurepip' 2> /dev/null; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then echo "Python $$version is not here: nothing was tested on it"; \
		else $(MAKE) test-fast PYTHON=$$python || exit 1; fi; \
	done

extras: $(VENV)/.ready  ## install packages into .venv that some tests need and nobody else
	bash tests/support/install_torchvision.sh $(VENV)
	$(BIN)/pip install --quiet --editable ".[openvino]" mlflow-skinny swanlab

browser:  ## install Chromium, which some tests open pages in, where it is missing and Debian's packages may be installed
	@command -v chromium chromium-browser google-chrome > /dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null; } \
		|| echo "no Chromium could be installed: no page is opened in a browser"

test-faults: $(VENV)/.ready  ## harm runs in every way that we know, and say which were survived; FAULTS_EVERY=1 takes all
	$(PYTEST) -n 3 --dist worksteal tests/faults $(ARGS)

test-kernels: $(VENV)/.ready  ## run the tests that rest on a processor's kernels as one with AVX2 alone would
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(PARALLEL) -m "kernels and not slow" \
		$(call HOLDING,mark.kernels) $(ARGS)

test-fast: $(VENV)/.ready  ## run the tests that start no whole run: under a minute on two cores
	$(PYTEST) $(PARALLEL) -m "not slow" $(WHOLE_RUNS:%=--ignore=tests/%) $(ARGS)

docs: $(VENV)/.ready  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

reference: $(VENV)/.ready  ## docs/configuration.md, docs/metrics.md and tables of three other pages, from the code
	$(BIN)/python docs/reference_pages.py
	$(BIN)/python docs/memory_tables.py
	$(BIN)/python docs/suite_table.py

verification: $(VENV)/.ready  ## run the tests that docs/verification.md tells of, and write it
	$(BIN)/python docs/verification.py $(ARGS)

test-docs: $(VENV)/.ready  ## run the commands and Python blocks of README.md and docs/, examples, studies and the Dockerfile
	$(PYTEST) tests/docs/blocks.py tests/scripts $(ARGS)

vllm-omni: $(OMNI_VENV)/.ready  ## an environment in which rollout.name=vllm_omni runs on a CPU

test-vllm-omni: $(OMNI_VENV)/.ready  ## run the real vLLM-Omni engine on a CPU, in an environment of its own
	OMP_NUM_THREADS=1 $(OMNI_VENV)/bin/python -m pytest tests/vllm_omni_real $(ARGS)

lint: $(VENV)/.ready  ## ruff and mypy, as the pre-commit hooks run them
	PATH="$(abspath $(BIN)):$$PATH" pre-commit run --all-files

check: lint test

size:  ## lines of the package and tests by room and kind, words of the pages, tracked files
	@$(PYTHON) tests/support/size.py

benchmark: $(VENV)/.ready  ## time of an iteration, with PEER=CHECKOUT over that of flow_grpo, and of a step over its bare calls
	PYTHONPATH=examples/studies $(BIN)/python examples/benchmarks/time_to_reward.py --clock jobs \
		$(if $(PEER),--peer flow_grpo=$(PEER)) --results outputs/benchmark $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python examples/benchmarks/benchmark_overhead.py

benchmark-correction: $(VENV)/.ready  ## time, memory and host transfers of the correction beside verl 0.9.1 from PyPI
	$(BIN)/python examples/benchmarks/benchmark_correction.py --install $(ARGS)

benchmark-decoupled: $(VENV)/.ready  ## time of a step in decoupled mode over that in bypass mode, with and without recompute
	$(BIN)/python examples/benchmarks/benchmark_decoupled.py $(ARGS)

benchmark-workers: $(VENV)/.ready  ## time of sampling with two workers over one, and of a step with a worker over one without
	$(BIN)/python examples/benchmarks/benchmark_workers.py $(ARGS)

full-size: $(VENV)/.ready  ## train SD3.5-medium's published size with random weights for two steps; 7 GB of disk, 10 GB of memory
	$(BIN)/python examples/benchmarks/full_size.py $(ARGS)

benchmark-time-to-reward: $(VENV)/.ready  ## seconds of training to a held-out reward, for the arms of docs/performance.md; takes hours
	PYTHONPATH=examples/studies $(BIN)/python examples/benchmarks/time_to_reward.py $(ARGS)
