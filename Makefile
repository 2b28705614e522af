# Every target does all of its own set-up, from a bare clone on.

PYTHON ?= python3
TORCH = 2.13.0
TORCH_CUDA = 2.11.0
TORCHES = $(TORCH) $(TORCH_CUDA)
RESULTS ?= $(if $(DRY_RUN),build/rehearsal,bench/results)

CXX_FILES = $(shell find csrc tests bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PY_FILES = setup.py build_backend.py amp_ext bench docs/mkdocs_hooks.py tests triton_kernels
INSTALL = bin/python -m pip install -c constraints.txt
WORKERS = -n $${MAX_JOBS:-logical} --maxprocesses 8 --dist worksteal
PYTEST = bin/pytest $(WORKERS)
FAKE_CUDA = ../.venv-cuda/bin/python fake_cuda/run.py --devices 2
# Each tensor is an allocation, and kernels may access no byte beside it.
EXACT = PYTORCH_NO_CUDA_MEMORY_CACHING=1
TRAINERS = lightning accelerate transformers timm torchvision peft
USES = autocast compat distributed integration scaler

.DEFAULT_GOAL = help
.DELETE_ON_ERROR:
.PHONY: help demo docs test check environments all-tests bench figures lint format hostile \
    cuda-check test-trainers gpu wheels clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s%s\n", $$1, $$2}' Makefile

demo: .venv/built ## train a small network with and without amp_ext; writes demo.png
	.venv/bin/python bench/demo.py

test: .venv/built ## the tests, without compiled CUDA kernels and what only combines cases or takes long
	.venv/$(PYTEST) -m "not full" -k "not cudasim" tests

check: lint docs cuda-check test-trainers all-tests hostile ## everything that needs no GPU; needs nvcc

# With --jobs=2, packages are installed while others are installed or compile.
environments: .venv-cuda/built .venv/made .venv-docs/made .venv-lint/made .venv-trainers/made

# The CPU's kernels are tested with narrower vectors too.
all-tests: .venv/built
	.venv/$(PYTEST) --durations 20 tests
	for capability in default avx2; do \
	    ATEN_CPU_CAPABILITY=$$capability .venv/$(PYTEST) -m "not full" -k cpu \
	        tests/lists tests/optim tests/gemm/test_gemm.py tests/gemm/test_gemm_[ace]*.py || exit; \
	done

bench: RESULTS = build/bench
bench: .venv/built ## amp_ext against torch on this machine, with figures; RESULTS=DIR
	.venv/bin/python bench/run.py all --results $(RESULTS); status=$$?; \
	.venv/bin/python bench/plot.py --results $(RESULTS); exit $$status

figures: .venv/built ## the results in docs/measuring.md, from bench/results
	.venv/bin/python bench/plot.py --page

docs: .venv-docs/made ## the pages and the API reference, in build/site; broken links fail
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

hostile: .venv/built ## 15,000 hostile calls of the ops: right, or an error and nothing changed
	.venv/$(PYTEST) tests/integration/test_hostile_calls.py --hostile-calls 5000

# By rule; the mutants of C++ and Python are switches in one build.
mutants: .venv-cuda/built .venv/built ## break CUDA kernels, C++ and Python code; list what no test notices
	cd tests && $(FAKE_CUDA) --multiprocessors 1 --capability 80 mutants/run.py --most 95
	cd tests && $(FAKE_CUDA) --multiprocessors 2 --capability 90 mutants/run.py --most 300
	.venv/bin/python tests/mutants/sources.py

lint: .venv-lint/made ## formatting, types and the usual mistakes
	.venv-lint/bin/ruff check $(PY_FILES)
	.venv-lint/bin/ruff format --check $(PY_FILES)
	.venv-lint/bin/mypy
	.venv-lint/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: .venv-lint/made ## format everything
	.venv-lint/bin/ruff check --fix --exit-zero $(PY_FILES)
	.venv-lint/bin/ruff format $(PY_FILES)
	.venv-lint/bin/clang-format -i $(CXX_FILES)

# The tests of what torch's oldest version may do in its own way. Not from here, where Python would
# find the source of amp_ext.
cuda-check: .venv-cuda/built ## compile and inspect all kernels, test with the oldest torch; needs nvcc
	.venv-cuda/bin/python tests/build/cuda_check.py
	env -u TRITON_INTERPRET .venv-cuda/bin/python tests/build/triton_check.py
	cd tests && ../.venv-cuda/$(PYTEST) -m "not full" \
	    autocast distributed scaler lists/test_ops_contract.py \
	    integration/test_seeds.py integration/test_fsdp_products.py \
	    integration/test_tensor_parallel.py optim/test_optim_dtensors.py
	cd tests && $(FAKE_CUDA) --order late \
	    -m pytest $(WORKERS) backends gemm/test_*.py graph probe $(USES)
	cd tests && $(EXACT) $(FAKE_CUDA) --order late -m pytest $(WORKERS) gemm/kernels lists optim
	cd tests && $(FAKE_CUDA) --order 1 --capability 80 --multiprocessors 7 \
	    -m pytest $(WORKERS) -m "not full" graph lists optim
	cd tests && $(EXACT) $(FAKE_CUDA) --order 2 --capability 80 --multiprocessors 7 \
	    -m pytest $(WORKERS) -m "not full" gemm
	cd tests && $(FAKE_CUDA) --order 4 --capability 75 \
	    -m pytest $(WORKERS) -m "not full" lists optim
	cd tests && $(FAKE_CUDA) --order 3 --guarded 1 -m pytest $(WORKERS) \
	    backends/test_cuda_runtime.py backends/test_cuda_streams.py backends/test_fake_cuda.py
	.venv-cuda/bin/python tests/fake_cuda/count.py --check
	cd tests && $(FAKE_CUDA) --multiprocessors 1 --capability 80 mutants/run.py --most 20
	cd tests && $(FAKE_CUDA) --multiprocessors 2 --capability 90 mutants/run.py --most 50
	$(MAKE) gpu DRY_RUN=1

# As users have it: products by torch's library.
test-trainers: .venv-trainers/made .venv-cuda/built ## the integrations, with the real packages; needs nvcc
	cd tests && AMP_EXT_GEMM=library ../.venv-trainers/bin/python fake_cuda/run.py \
	    -m pytest $(WORKERS) --dist loadfile trainers

gpu: $(if $(DRY_RUN),.venv-cuda/built) ## test and measure on a GPU; ONLY=tests|checks|bench, BUDGET=SECONDS, DRY_RUN=1
	$(if $(COMMIT),AMP_EXT_COMMIT=$(COMMIT)) \
	    $(if $(DRY_RUN),.venv-cuda/bin/python tests/fake_cuda/run.py,$(PYTHON)) bench/gpu.py \
	    $(if $(DRY_RUN),--dry-run) $(if $(ONLY),--only $(ONLY)) $(if $(BUDGET),--budget $(BUDGET)) \
	    $(RESULTS)

wheels: ## wheels in dist for the Pythons on PATH and TORCHES="2.13.0 2.11.0", tried without a compiler
	$(PYTHON) tests/build/wheels.py dist $(TORCHES)

clean: ## remove everything that was built or installed here
	rm -rf .venv .venv-cuda .venv-docs .venv-lint .venv-trainers build dist *.egg-info amp_ext/*.so amp_ext/_build_info.py demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The torch that PYTHON already has, reached through a .pth file because PYTHON may itself be a
# virtual environment; where there is none or an old one, the pinned torch.
.venv/made:
	rm -rf .venv
	if $(PYTHON) -c "import sys, torch; sys.exit(torch.__version__ < '2.11')" 2>/dev/null; then \
	    $(PYTHON) -m venv --system-site-packages .venv && \
	    $(PYTHON) -c "import sys; print(*sys.path[1:], sep='\n')" \
	        > $$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/python.pth; \
	else \
	    $(PYTHON) -m venv .venv && .venv/$(INSTALL) torch==$(TORCH); \
	fi
	touch $@

.venv/built: .venv/made setup.py pyproject.toml constraints.txt $(shell find csrc -type f)
	.venv/$(INSTALL) setuptools wheel cmake ninja
	.venv/$(INSTALL) --no-build-isolation -e '.[test,demo]'
	touch $@

.venv-lint/made: constraints.txt
	$(PYTHON) -m venv .venv-lint
	.venv-lint/$(INSTALL) clang-format mypy ruff
	touch $@

.venv-docs/made: constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/$(INSTALL) mkdocs mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

.venv-cuda/made:
	rm -rf .venv-cuda
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/$(INSTALL) torch==$(TORCH_CUDA) setuptools wheel cmake ninja pytest pytest-xdist
	touch $@

.venv-cuda/built: .venv-cuda/made setup.py pyproject.toml constraints.txt \
    $(shell find csrc amp_ext triton_kernels -name '*.so' -o -name '*.pyc' -o -name _build_info.py -o -type f -print)
	@command -v nvcc || { echo "This needs nvcc on PATH: install the CUDA toolkit" >&2; exit 1; }
	FORCE_CUDA=1 .venv-cuda/$(INSTALL) '.[test]'
	touch $@

# With the torch and the amp_ext of .venv-cuda; compiling what nobody imports takes longest.
.venv-trainers/made: .venv-cuda/made constraints.txt
	rm -rf .venv-trainers
	$(PYTHON) -m venv .venv-trainers
	purelib="import sysconfig; print(sysconfig.get_path('purelib'))"; \
	    .venv-cuda/bin/python -c "$$purelib" > $$(.venv-trainers/bin/python -c "$$purelib")/cuda.pth
	.venv-trainers/$(INSTALL) --no-compile $(TRAINERS)
	touch $@
