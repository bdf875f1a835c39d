# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
#   PYTHON  interpreter for the virtual environment (>= 3.10)      VENV  where it goes
#   TORCH   what to install as torch. PyPI's x86-64 wheel is the CUDA build, several GB; on a machine without a GPU a CPU
#           build is enough: TORCH="torch==2.13.0 --index-url <the CPU index that pytorch.org names>"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= $(shell nproc)

bin := $(VENV)/bin
sources := $(shell find csrc include cmake backend areal_core -type f -not -name '*.pyc' -not -name '*.so') CMakeLists.txt pyproject.toml

.PHONY: demo test test-cpp test-python lint clean help
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

demo: $(VENV)/.installed  ## install, train the embedded default, show the result
	$(bin)/areal-core train --fresh

test: test-cpp test-python  ## install, build and run the C++ and the Python tests

test-cpp: build/tests/.configured  ## the C++ tests alone
	$(bin)/cmake --build build/tests -j $(JOBS)
	$(bin)/ctest --test-dir build/tests --output-on-failure -j $(JOBS)

test-python: $(VENV)/.test-requirements  ## the Python tests alone
	$(bin)/pytest

lint: $(VENV)/.dev-requirements  ## what the pre-commit hooks run
	$(bin)/ruff check . && $(bin)/ruff format --check . && $(bin)/mypy
	git ls-files '*.h' '*.cpp' '*.cuh' '*.cu' | xargs $(bin)/clang-format --dry-run --Werror

clean:  ## remove the virtual environment and the builds
	rm -rf $(VENV) build

$(VENV)/.torch: | python
	$(PYTHON) -m venv $(VENV)
	$(bin)/pip install --quiet --upgrade pip
	$(bin)/pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(sources) | compiler
	@echo "building areal_core (a minute or two)"
	$(bin)/pip install --quiet .
	@# Python started in this folder finds the source tree before the installed package: give it the native module too.
	@cp $(VENV)/lib/python*/site-packages/areal_core/_C.*.so areal_core/
	@touch $@

$(VENV)/.test-requirements: pyproject.toml $(VENV)/.installed
	$(bin)/pip install --quiet cmake ninja --group test
	@touch $@

$(VENV)/.dev-requirements: pyproject.toml $(VENV)/.test-requirements
	$(bin)/pip install --quiet --group dev
	@touch $@

# With nvcc the CUDA kernels are compiled too and their machine code is checked.
build/tests/.configured: CMakeLists.txt $(wildcard cmake/*.cmake) $(shell find csrc cpp_tests -name CMakeLists.txt) $(VENV)/.test-requirements | googletest
	PATH="$(abspath $(bin)):$$PATH" $(bin)/cmake -S . -B build/tests -G Ninja -DAREAL_TESTS=ON -DAREAL_PYTHON=OFF \
		-DPython_EXECUTABLE=$(abspath $(bin))/python
	@touch $@

# System packages: asked for only where they are missing.
apt-install = if command -v apt-get >/dev/null; then \
	sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); $$sudo apt-get update -qq && $$sudo apt-get install -y -qq $(1); \
	else echo "please install: $(1)" >&2; exit 1; fi

.PHONY: python compiler googletest
python:
	@$(PYTHON) -c "import ensurepip, os, sysconfig; assert os.path.exists(sysconfig.get_path('include') + '/Python.h')" \
		2>/dev/null || { $(call apt-install,python3 python3-venv python3-dev); }
compiler:
	@command -v c++ >/dev/null || { $(call apt-install,g++); }
googletest:
	@[ -e /usr/include/gtest/gtest.h ] || [ -e /usr/local/include/gtest/gtest.h ] || { $(call apt-install,libgtest-dev libgmock-dev); }
