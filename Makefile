# make demo: trains a small GPT twice, bit for bit the same.   make test: the test suite.   make test-quick: a minute of it.
# make gates: the H100's kernels through other Tritons' compilers. make gates GATES=: every kernel of the tile tables, in 3/4 h.
# make figures: tables of docs/kernel-figures.md, of the H100's main loops by each Triton, in 20 minutes.
# make execute: every kernel's PTX executed on the CPU, looking for data races, 90 minutes at a time: again until none is left.
# make execute-3.6.0: the same as another Triton compiles it, looking for data races in a tenth of the kernels.
# make nightly: thousands of random cases, every interleaving of small grids, models, processes. Goes on where it ended.
# make nightly PARTS=models: some of it.
# make soak: a small model trained twice, the second time with killed ranks, wiped caches and other SM counts, bit for bit the same. STEPS=50: shorter.
# make reach: which attentions of ten libraries' models would be rewritten on an H100, for which kernel; LIBRARIES=timm: of one. Goes on where it ended.
# make mutants: small edits of the sources, each with the one test that must fail for it. make mutants MUTANTS=cache: some of them.
# make docs: the pages as a site, in site/. make docs-check: the site in a real browser, Debian's chromium and chromium-driver, and its words.
# make dist: the wheel and the source archive in dist/, checked as PyPI checks them, and the wheel tried in an environment of its own.
# make dist PUBLISH=v0.2.0: the same for that tag, refused where the metadata has placeholders or is of another version.
# make test TORCH=2.15.0: the same on that torch, in .venv-2.15.0, with the Triton it pins. TORCH=nightly: the newest of NIGHTLY's index.
PYTHON ?= python3
TORCH ?=
NIGHTLY ?= https://download.pytorch.org/whl/nightly/cpu
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
PIP_ARGUMENTS := $(if $(TORCH),$(if $(filter nightly,$(TORCH)),--pre torch --extra-index-url $(NIGHTLY),torch==$(TORCH)),-c constraints.txt)

# PyPI's torch brings gigabytes of CUDA, which a machine without a GPU has no use for. Where the index of CPU builds cannot be
# reached, PyPI's has to do.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
define cpu_torch
$(1)/python -m pip install -q --upgrade pip
nvidia-smi --list-gpus >/dev/null 2>&1 || $(1)/python -m pip install -q --no-deps --retries 0 --index-url $(CPU_BUILDS) \
	$(if $(TORCH),torch==$(TORCH),torch -c constraints.txt) || echo "No CPU build of torch there: taking PyPI's."
endef

# What torch 2.11, 2.14 and 2.15 pin; the compiler alone installs beside any torch. `make test` has the one of its own torch.
TRITONS := 3.6.0 3.8.0 3.9.0
SHAPES ?=
GATES := --arch sm_90 --dtype bf16 $(patsubst %,--head-dim %,64 128 256) $(SHAPES:%=--shape %)

.PHONY: demo test test-compiled test-emulated test-gpu test-quick gates figures execute nightly soak reach mutants docs docs-check dist lint clean
demo: $(VENV)/installed-demo
	$(BIN)/python -m dash_inductor demo

# Cores that tests run on.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

# One pytest per kind, since Triton's interpreter is on or off for a whole process. Each has all cores to itself, and says how far it
# is; all of them run, whatever fails. The tests of a GPU have it to themselves: without one they only say so.
test: $(VENV)/installed
	$(MAKE) --keep-going --jobs=1 test-gpu test-compiled test-emulated

test-compiled: $(VENV)/installed
	$(PYTEST) tests/unit tests/expect tests/ptx $(SIDE_BY_SIDE)

test-emulated: $(VENV)/installed
	TRITON_INTERPRET=1 $(PYTEST) tests/emulated $(SIDE_BY_SIDE)

test-gpu: $(VENV)/installed
	$(PYTEST) tests/gpu

# A minute of the fast tests, before `make test`. Left out of tests/unit: what starts processes, or computes for seconds.
SLOW := attention_benchmark attention_contenders attention_merge benchmark_commands by_hand check commands costs_setting docs env hooks install \
	lost_device nightly processes qualify qualify_runner selection trace wheel
QUICK_EMULATED := tests/emulated/test_op.py
test-quick: $(VENV)/installed
	$(PYTEST) tests/unit $(SLOW:%=--ignore=tests/unit/test_%.py) -q $(SIDE_BY_SIDE)
	TRITON_INTERPRET=1 $(PYTEST) $(QUICK_EMULATED) -q --numprocesses=$(WORKERS)
	@echo 'Not run: tests/expect and tests/ptx, which compile for GPUs; tests/emulated but for $(notdir $(QUICK_EMULATED)); and of tests/unit'
	@echo '$(strip $(SLOW)). `make test` runs them all.'

gates: $(VENV)/installed
	$(MAKE) --jobs=2 --output-sync $(TRITONS:%=gates-%)

gates-%: $(VENV)/triton-%
	PYTHONPATH=$< $(BIN)/python -m benchmarks.machine_code gates --no-cycles $(GATES)

FIGURES := --arch sm_90 --dtype bf16 $(patsubst %,--head-dim %,64 128 192 256) --json
figures: $(TRITONS:%=$(VENV)/triton-%)
	rm -rf build/loops benchmarks/results/loops && mkdir -p build/loops
	for triton in "" $(TRITONS:%=$(VENV)/triton-%); do \
		PYTHONPATH=$$triton $(BIN)/python -m benchmarks.machine_code gates $(FIGURES) > build/loops/loops$${triton##*-}.json || exit 1; done
	$(BIN)/python -m benchmarks.loops build/loops/*.json
	$(BIN)/python -m docs.generate

execute: $(VENV)/installed
	$(BIN)/python -m tests.ptx.cells

execute-%: $(VENV)/triton-%
	PYTHONPATH=$< $(BIN)/python -m tests.ptx.cells --values

.SECONDARY: $(TRITONS:%=$(VENV)/triton-%)
$(VENV)/triton-%: | $(VENV)/installed
	$(BIN)/python -m pip install -q --no-deps --target $@ triton==$* || { rm -rf $@; exit 1; }

nightly: $(VENV)/installed
	$(BIN)/python tests/nightly $(PARTS)

STEPS ?= 500
soak: $(VENV)/installed
	$(BIN)/python -m tests.soak --steps $(STEPS)

# Libraries with models, and what they import. Without what they depend on, which may be another torch: beside the environment, not in it.
REACH := timm torchvision diffusers open_clip_torch x-transformers litgpt vit-pytorch segment-anything local-attention \
	native-sparse-attention-pytorch einops einx frozendict ftfy hyper-connections lightning lightning-utilities loguru \
	rotary-embedding-torch torch-einops-utils torchmetrics wcwidth
reach: $(VENV)/reach
	mkdir -p build benchmarks/results/reach
	PYTHONPATH=$< $(BIN)/python -m benchmarks.reach $(LIBRARIES) --json build/reach.json \
		--out benchmarks/results/reach/torch-$(shell $(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[0])').csv
	$(BIN)/python -m docs.generate

$(VENV)/reach: | $(VENV)/installed
	$(BIN)/python -m pip install -q --no-deps --target $@ $(REACH) || { rm -rf $@; exit 1; }

mutants: $(VENV)/installed
	$(BIN)/python tests/mutants $(MUTANTS)

docs: $(VENV)/installed-docs
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs site

docs-check: docs $(VENV)/installed-docs-check
	$(BIN)/python -m docs.words
	$(BIN)/python -m pytest tests/site

lint: $(VENV)/installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

PUBLISH ?=
dist: $(VENV)/installed-dist
	$(if $(PUBLISH),$(PYTHON) .ci/publishable.py $(PUBLISH))
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear build/clean
	$(call cpu_torch,build/clean/bin)
	build/clean/bin/python -m pip install -q dist/*.whl $(PIP_ARGUMENTS)
	cd / && $(CURDIR)/build/clean/bin/dash-inductor --help

# A target installs the extras that it needs. The file says that they are there.
$(VENV)/installed: EXTRAS := test,docs,transformers
$(VENV)/installed-demo: EXTRAS := emulate
$(VENV)/installed-docs: EXTRAS := docs,emulate
$(VENV)/installed-docs-check: EXTRAS := test,browser
$(VENV)/installed-dist: EXTRAS := release
$(VENV)/installed-lint: EXTRAS := dev,emulate
$(VENV)/installed $(addprefix $(VENV)/installed-,demo docs docs-check dist lint): $(VENV)/torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -e ".[$(EXTRAS)]" $(PIP_ARGUMENTS)
	touch $@

$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(call cpu_torch,$(BIN))
	touch $@

clean:
	rm -rf .venv .venv-* build dist site *.egg-info
