# `make help` lists the targets. Everything runs in .venv, which `make setup`
# makes around the active environment's torch, or with a torch of its own.

.DEFAULT_GOAL := help
SHELL := bash

# The active environment's Python: the first of these that is new enough.
ifndef PYTHON
PYTHON := $(shell for p in python python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
  && command -v $$p && break; done)
endif
# nproc says what OpenMP was told, where it was.
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
RANKS ?= 2
MESH ?=
ARGS ?=
PROGRAMS ?=
CONFIGURE ?=

BIN := .venv/bin
PACKAGE := python/shardtensor
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
# Where Python may not leave bytecode beside its sources (containers say so), .venv
# keeps it; else every process compiles torch anew, which doubles what imports cost.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
endif
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export NINJA_STATUS := [%f/%t %es] 
export CTEST_PARALLEL_LEVEL := $(JOBS)
# Checkouts in several folders share one compiler cache.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

CXX_FILES = $(shell git ls-files --cached --others --exclude-standard \
  '*.h' '*.cpp')

.PHONY: help setup build demo demo-cpp demo-attention demo-climate demo-mesh demo-sphere \
  test test-all test-cpp test-python test-device conformance asan \
  lint format check-headers bench run-bench report run-report wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s%s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)
	@echo
	@echo '  RANKS=4 MESH=2x2 ARGS="..."  for demo; JOBS=N for builds and tests'

setup:  ## make .venv: the active torch or torch==2.13.0, what compiling needs
	@test -n '$(PYTHON)' || { echo 'Python 3.10 or newer is needed' \
	  '(make PYTHON=...)'; exit 1; }
	@$(PYTHON) tools/environment.py

# What a target needs beside that is installed when it is first called.
setup-%: setup
	@$(PYTHON) tools/environment.py $*

# Made by setup; newer than the build folder when .venv has another torch.
.venv/setup.json: setup ;

build/build.ninja: .venv/setup.json CMakePresets.json
	@$(BIN)/cmake --preset dev --fresh $(CONFIGURE)

build: build/build.ninja  ## compile the library and the Python extension
	@$(BIN)/cmake --build --preset dev --target shardtensor _C

# The same folder with tests, for which GoogleTest and MPI are looked for now.
.PHONY: build-tests
build-tests: build/build.ninja setup-test
	@grep -qs 'SHARDTENSOR_TESTS:BOOL=ON' build/CMakeCache.txt || $(BIN)/cmake \
	  --preset dev -U 'CMAKE_DISABLE_FIND_PACKAGE_*' -D SHARDTENSOR_TESTS=ON
	@$(BIN)/cmake --build --preset dev

# Freed tensors go back to the system at once, in large pages, so that what is
# shown as memory is what is in use.
LAUNCH ?= $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(RANKS)
TIDY_MEMORY = MALLOC_MMAP_THRESHOLD_=1048576 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
THREADS = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( \
	  $(JOBS) > $(RANKS) ? $(JOBS) / $(RANKS) : 1 ))}
# Ranks that would share a GPU, which NCCL refuses, stay on the CPU.
GPUS = nvidia-smi -L 2>/dev/null | grep -c '^GPU'
ON_HOST = $$(gpus=$$($(GPUS)); [ $$gpus -gt 0 -a $$gpus -lt $(RANKS) ] && echo CUDA_VISIBLE_DEVICES=)
RUN_DEMO = env $(ON_HOST) $(THREADS) $(TIDY_MEMORY) $(LAUNCH) $(1) \
  $(if $(MESH),--mesh $(MESH)) $(ARGS)

# With a launcher of yours: LAUNCH_PROGRAM="mpirun -n 2".
LAUNCH_PROGRAM ?= $(LAUNCH) --no-python

demo: build setup-demo  ## train a 3-D UNet on a brain volume over RANKS processes
	@$(call RUN_DEMO,examples/python/train_unet.py)

demo-cpp: build setup-demo  ## the same in C++
	@$(BIN)/cmake --build --preset dev --target train_unet
	@$(BIN)/python examples/cpp/prepare.py out/unet
	@env $(ON_HOST) OMP_NUM_THREADS=$(JOBS) $(TIDY_MEMORY) \
	  build/examples/train_unet out/unet $(ARGS)
	@env $(ON_HOST) $(THREADS) $(TIDY_MEMORY) $(LAUNCH_PROGRAM) build/examples/train_unet out/unet \
	  $(if $(MESH),--mesh $(MESH)) $(ARGS)
	@$(BIN)/python examples/cpp/show.py out/unet --ranks $(RANKS)

demo-attention: build setup-demo setup-fields  ## a vision transformer on real ocean temperatures
	@$(call RUN_DEMO,examples/python/train_ocean_vit.py)

demo-climate: RANKS = 4
demo-climate: build setup-demo setup-fields  ## train on climate fields, a node dies, it goes on
	@env $(ON_HOST) OMP_NUM_THREADS=1 $(BIN)/python examples/python/train_climate.py $(ARGS)

demo-mesh: build setup-demo setup-mesh  ## a MeshGraphNet learns heat flow on a cortical surface
	@$(call RUN_DEMO,examples/python/train_mesh.py)

demo-sphere: build setup-demo setup-sphere  ## train a spherical operator on the globe's weather
	@$(call RUN_DEMO,examples/python/train_sphere.py)

# Not as prerequisites: without the DEVICE that was asked for nothing is built.
ON_DEVICE = missing=$$($(BIN)/python python/tests/support/rig.py) && \
  if [ "$$missing" ]; then echo "$$missing"; else $(MAKE) --no-print-directory $(1); fi

test: setup  ## all tests but the tail (DEVICE=cuda: those of Python on a GPU)
	@$(call ON_DEVICE,test-cpp test-python test-device)

test-all:  ## the same with the tail: full sweeps, larger compiled models
	@$(MAKE) test TAIL=1

TAIL ?=

# Ranks wait for each other, so two files of tests at a time keep two cores busy;
# ARGS="-n 0 ..." is one process, for a debugger or for what tests print.
WORKERS ?= $(shell echo $$(( $(JOBS) < 4 ? $(JOBS) : 4 )))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
  $(if $(TAIL),,-m 'not tail')

test-cpp: build-tests setup-demo setup-fields setup-sphere  ## ctest: C++ alone and under mpirun, its examples
	@$(BIN)/ctest --preset dev $(if $(TAIL),,-LE tail)

test-python: build-tests setup-demo setup-fields setup-graphs setup-mesh setup-sphere  ## pytest: gloo ranks, the API and the examples
	@$(PYTEST) $(ARGS)

# Sweeps whose rules see every kind of local tensor, on 2 ranks; some with their tail.
TEST_FILES = $(addsuffix .py,$(addprefix $(1)/test_,$(2)))
DEVICE_TESTS ?= device comm dispatch halo tensor rules/norm rules/reduce rules/view \
  $(call TEST_FILES,cells,cells corners) \
  $(call TEST_FILES,checkpoint,checkpoint optimizers) \
  $(call TEST_FILES,distributed,agreement collectives_sweep manager sync) \
  $(call TEST_FILES,dtensor,meshes operators written) \
  $(call TEST_FILES,io,one_error read tables write) \
  $(call TEST_FILES,rules/index,indexing python_indexing rows_by_index) \
  $(call TEST_FILES,rules/index,rows_of_elements rows_that_are_made rows_written) \
  $(call TEST_FILES,rules/order,along_dim) \
  $(call TEST_FILES,rules/attention,scaled_dot_product) \
  $(call TEST_FILES,rules/ops,activations optimizer pointwise) \
  $(call TEST_FILES,rules/matrix,matmul) \
  $(call TEST_FILES,rules/random,random random_counter random_layouts) \
  $(call TEST_FILES,rules/points,neighbours interpolate_neighbors sampling) \
  $(call TEST_FILES,rules/points,partition surfaces voxels) \
  $(call TEST_FILES,rules/spectra,fft known_zeros) \
  $(call TEST_FILES,rules/stencil,conv interpolate pad pooling) \
  $(call TEST_FILES,training,parallelize)
DEVICE_TAIL ?= rules/index rules/norm rules/reduce rules/stencil \
  $(call TEST_FILES,rules/points,neighbours interpolate_neighbors sampling)
IN_TESTS = $(addprefix python/tests/,$(1))

test-device: build-tests  ## pytest on a device whose memory the host cannot touch
	@DEVICE=guarded $(PYTEST) -m 'not tail' $(call IN_TESTS,$(DEVICE_TESTS)) $(ARGS)
	$(if $(TAIL),@DEVICE=guarded $(PYTEST) $(call IN_TESTS,$(DEVICE_TAIL)) $(ARGS))

conformance: build setup-test  ## PyTorch's samples of all operators: docs/coverage.md
	@OMP_NUM_THREADS=1 PYTHONPATH=python/tests/support:$$PYTHONPATH \
	  $(BIN)/python -m conformance $(if $(PROGRAMS),--programs $(PROGRAMS)) $(ARGS)

asan: setup-test  ## the C++ tests with address and UB sanitizers
	@$(BIN)/cmake --preset asan
	@$(BIN)/cmake --build --preset asan
	@$(BIN)/ctest --preset asan

lint: setup-lint  ## formatting, Python lint, layer order
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/python tools/check_includes.py
	@$(BIN)/python tools/check_names.py
	@echo 'lint: ok'

check-headers: setup-test  ## compile every header and file alone
	@$(BIN)/cmake --preset alone
	@$(BIN)/cmake --build --preset alone

format: setup-lint  ## format C++ and Python in place
	@$(BIN)/clang-format -i $(CXX_FILES)
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

bench: setup  ## per-operator cost and the UNet step
	@$(call ON_DEVICE,run-bench)

run-bench: build-tests setup-demo setup-sphere
	@RANKS=$(RANKS) $(BIN)/python benchmarks/python/run.py $(ARGS)

report: setup  ## tests and benchmarks into out/report.html
	@$(call ON_DEVICE,run-report)

run-report: build-tests setup-demo setup-fields setup-graphs setup-mesh setup-sphere
	@GUARDED_TESTS='$(addprefix python/tests/,$(DEVICE_TESTS))' \
	  $(BIN)/python tools/report.py $(ARGS)

wheel: setup  ## a wheel for the torch of .venv, in dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation \
	  --wheel-dir dist .
	@ls dist/*.whl

clean:  ## remove what was built, not .venv
	@rm -rf build build-* dist $(PACKAGE)/*.so
