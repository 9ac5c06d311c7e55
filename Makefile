# `make train` and `make test` set up everything they need on a machine that has Python, then run.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
TORCH   = $(shell grep -m1 '^torch==' constraints.txt)
TORCHAO = $(shell grep -m1 '^torchao==' constraints.txt)

N     ?= 500
SEED  ?= 0

# Processes that share the tests, a file at a time. More than there are cores: tests wait for ranks and for processes.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(2, 3 * os.cpu_count() // 2))")
# Compiled files are kept, whatever the shell says: each worker would compile the tests, each script the package.
PYTEST   = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-all laws with-torch attack mutants style types lint format docs clean

train: $(READY)  ## the main job: make train ARGS="--steps 100 --placement ddp"
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: style  ## every check, of large tables some rows: make test ARGS="-k launch" WORKERS=4
	@said=$$(mktemp); nice -n 19 $(MAKE) --no-print-directory types >$$said 2>&1 & types=$$!; \
	$(PYTEST) -m "not large" $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat $$said; rm $$said; exit $$((tests + types))  # types have what the tests leave of the cores

test-all: lint  ## every check, and every row of every table
	LAWS=full $(PYTEST) --timeout 1800 $(ARGS)

laws: $(READY)  ## every row of the law tables, not only some
	LAWS=full $(subst loadfile,load,$(PYTEST)) tests/laws --timeout 1200

# What follows torch's private names and its compilers, with a given torch: make with-torch VERSION=2.11.0
FOLLOWS = tests/unit/test_vjp.py tests/unit/test_module.py tests/unit/test_init.py tests/unit/test_state.py \
	tests/ranks/test_traced_graph.py tests/ranks/test_whole_step.py tests/ranks/test_compile_units.py \
	tests/ranks/test_cuda_graph.py tests/ranks/test_lower.py tests/ranks/test_checkpoint.py tests/ranks/test_stream.py \
	tests/laws/test_ways.py

with-torch:  ## what depends on torch's version: make with-torch VERSION=2.11.0 (downloads that torch)
	.ci/with_torch $(VERSION) "$(or $(ARGS),$(FOLLOWS))" $(WORKERS)

attack: $(READY)  ## random cases against the package: make attack N=5000 SEED=0 KIND=kills CASE=specs:0:17 PACKAGE=folder
	PYTHONPATH="$(PACKAGE)" OMP_NUM_THREADS=1 $(BIN)/python tools/attack --n $(N) --seed $(SEED) \
		$(if $(KIND),--kind $(KIND)) $(if $(CASE),--case $(CASE)) $(ARGS)

mutants: $(READY)  ## mistakes in the package that no test notices: make mutants N=100 SEED=0 PACKAGE=folder AGAINST=folder
	$(BIN)/python tools/mutants --n $(N) --seed $(SEED) \
		$(if $(PACKAGE),--package $(PACKAGE)) $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache

types: $(READY)  # mypy takes one core a minute, the first time
	$(BIN)/mypy

lint: style types

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)  ## the documents as a site, in site/, which needs no network; a warning is an error
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict

# torch first and by exact version: a range would look at, and might fetch, other builds of several GB.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,examples,docs]'
	# apart, for what names it: transformers would import it wherever it finds it
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/float8 $(TORCHAO)
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
