# make bench   set up .venv and run the main benchmark: on all GPUs, one rank each, or on 4 CPU ranks
# make test    set up .venv and run the test suite
# make interop the tests with torch and JAX
# make lint    style of the Python, Cython and CUDA sources
# make docs    the documentation as HTML, docs/_build/html/index.html
# make clean   remove what was built, .venv too
#
# PYTHON=python3.12 picks the interpreter that .venv is made with.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := PYTHONWARNINGS=ignore $(PY) -m pip --disable-pip-version-check install -qq

# "cuda12", "cuda13" (what the driver can run) or "none", and the number of usable GPUs.
GPUS := $(shell $(PYTHON) mpi_launch/gpus.py)
CUDA := $(or $(word 1,$(GPUS)),none)
ifeq ($(CUDA),none)
  DEVICE := cpu
  RANKS := 4
else
  DEVICE := cuda
  RANKS := $(word 2,$(GPUS))
  comma := ,
  AND_CUDA := $(comma)$(CUDA)
endif

SOURCES := pyproject.toml setup.cfg $(wildcard epcomm/runtime/*.pyx epcomm/runtime/*.pxi epcomm/runtime/*.pxd epcomm/runtime/*.h) \
           $(wildcard kernels_cu/*.cu kernels_cu/*.cuh kernels_cu/*.h kernels_cu/cpu/*)

# bench/ and tests/ are not installed: they are run from here.
export PYTHONPATH := $(CURDIR)

.PHONY: help bench test interop lint docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

bench: $(VENV)/has-bench-$(CUDA) $(VENV)/built
	$(PY) -m mpi_launch -n $(RANKS) --device $(DEVICE) bench/bench_balanced.py

# On a CUDA 12 driver the suite uses that CuPy: only one can be installed.
test: $(VENV)/has-$(if $(filter cuda12,$(CUDA)),suite,test)-$(CUDA) $(VENV)/built
	EPCOMM_DEVICE=$${EPCOMM_DEVICE:-$(DEVICE)} $(PY) -m pytest tests --ignore tests/interop

interop: $(VENV)/has-interop-$(CUDA) $(VENV)/built
	EPCOMM_DEVICE=$${EPCOMM_DEVICE:-$(DEVICE)} $(PY) -m pytest tests/interop tests/test_examples.py

lint: $(VENV)/has-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PATH="$(VENV)/bin:$$PATH" cython-lint --max-line-length 110 epcomm/runtime  # it calls pycodestyle
	$(VENV)/bin/clang-format --dry-run --Werror $(filter %.cu %.cuh %.h %.cpp,$(SOURCES)) \
	  $(wildcard bench/*.cu bench/*/*.cu tests/*.c tests/*.cpp tests/*/*.cpp)

docs: $(VENV)/has-docs-$(CUDA) $(VENV)/built
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) build docs/_build *.egg-info epcomm/runtime/*.so $(patsubst %.pyx,%.c,$(wildcard epcomm/runtime/*.pyx)) \
	  $(patsubst %.pyx,%.cpp,$(wildcard epcomm/runtime/*.pyx))

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epcomm needs Python 3.11 or newer, and $(PYTHON) is %s: make PYTHON=..." % sys.version.split()[0])'
	@command -v $${CXX:-c++} >/dev/null || { echo "epcomm needs a C++ compiler (c++ on PATH, or CXX=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What builds the extensions, without a download a build.
$(VENV)/has-tools: | $(VENV)/bin/python
	$(PIP) --upgrade pip "setuptools>=77" "Cython>=3.1"
	@touch $@

# $(VENV)/has-EXTRA-CUDA: the package, editable, with an extra and what fits the driver.
$(VENV)/has-bench-$(CUDA): EXTRAS = bench,mpi$(AND_CUDA)
$(VENV)/has-test-$(CUDA): EXTRAS = test
$(VENV)/has-suite-$(CUDA): EXTRAS = suite$(AND_CUDA)
$(VENV)/has-interop-$(CUDA): EXTRAS = suite,interop$(AND_CUDA)
$(VENV)/has-docs-$(CUDA): EXTRAS = docs
$(foreach what,bench test suite interop docs,$(VENV)/has-$(what)-$(CUDA)): pyproject.toml $(VENV)/has-tools
	$(PIP) --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@

$(VENV)/has-lint: pyproject.toml $(VENV)/has-tools
	$(PIP) $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"])')
	@touch $@

# Only the extensions, when a source is newer.
$(VENV)/built: $(SOURCES) | $(VENV)/has-tools
	$(PY) -W ignore -c 'from setuptools import setup; setup()' --quiet build_ext --inplace
	@touch $@
