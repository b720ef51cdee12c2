# make demo: trains a small GPT twice, bit for bit the same.   make test: the test suite.
# make gates: the H100's kernels through other Tritons' compilers. make gates GATES=: every kernel of the tile tables, in half an hour.
# make nightly: thousands of random cases, every interleaving of small grids, models, processes. make nightly PARTS=models: some of it.
# make mutants: small edits of the sources, each with the one test that must fail for it. make mutants MUTANTS=cache: some of them.
# make docs: the pages as a site, in site/. make docs-check: the site in a real browser, Debian's chromium and chromium-driver.
# make test TORCH=2.15.0: the same on that torch, in .venv-2.15.0, with the Triton it pins. TORCH=nightly: the newest of NIGHTLY's index.
PYTHON ?= python3
TORCH ?=
NIGHTLY ?= https://download.pytorch.org/whl/nightly/cpu
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
PIP_ARGUMENTS := $(if $(TORCH),$(if $(filter nightly,$(TORCH)),--pre torch --extra-index-url $(NIGHTLY),torch==$(TORCH)),-c constraints.txt)

# What torch 2.11 and 2.15 pin; the compiler alone installs beside any torch. `make test` has the one of its own torch.
TRITONS := 3.6.0 3.9.0
GATES := --arch sm_90 --dtype bf16 $(patsubst %,--head-dim %,64 128 256)

.PHONY: demo test test-compiled test-emulated gates nightly mutants docs docs-check lint clean
demo: $(VENV)/installed
	$(BIN)/python -m dash_inductor demo

# One pytest per kind, since Triton's interpreter is on or off for a whole process; side by side, each prints when it is done.
test: $(VENV)/installed
	$(MAKE) --jobs=2 --output-sync test-compiled test-emulated

test-compiled:
	$(BIN)/python -m pytest tests/unit tests/expect tests/gpu

test-emulated:
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/emulated --numprocesses=2 --dist=loadfile

gates: $(VENV)/installed
	$(MAKE) --jobs=2 --output-sync $(TRITONS:%=gates-%)

gates-%: $(VENV)/triton-%
	PYTHONPATH=$< $(BIN)/python -m dash_inductor gates $(GATES)

.SECONDARY: $(TRITONS:%=$(VENV)/triton-%)
$(VENV)/triton-%: | $(VENV)/installed
	$(BIN)/python -m pip install -q --no-deps --target $@ triton==$* || { rm -rf $@; exit 1; }

nightly: $(VENV)/installed
	$(BIN)/python tests/nightly $(PARTS)

mutants: $(VENV)/installed
	$(BIN)/python tests/mutants $(MUTANTS)

docs: $(VENV)/installed
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs site

docs-check: docs
	$(BIN)/python -m pytest tests/site

lint: $(VENV)/installed
	$(BIN)/python -m pip install -q -e ".[dev]" $(PIP_ARGUMENTS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e ".[cli,test,bench,transformers,docs]" $(PIP_ARGUMENTS)
	touch $@

clean:
	rm -rf .venv .venv-* build site *.egg-info
