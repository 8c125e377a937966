# One environment, .venv, made at the first use of any target and kept. It holds exactly what constraints.txt says.
# TORCH=2.8.0 makes and uses another one, .venv-torch-2.8.0, which differs in PyTorch and what that brings; so does
# TORCH=newest, with NEWEST below. `make integrations` makes a third, .venv-integrations, with the training frameworks.
#
# PyTorch comes first, on its own, from wherever pip is pointed: `pip install torch==2.13.0` takes a CPU build where
# the index or the folder that pip looks in offers one; elsewhere, on Linux, it brings gigabytes of CUDA libraries. To
# point pip at an index of CPU builds set PIP_INDEX_URL, at a folder of wheels PIP_FIND_LINKS, for example
#     PIP_FIND_LINKS=~/wheels make test

PYTHON ?= python3
ARGS ?=
TORCH ?=
# The PyTorch of TORCH=newest: make test TORCH=newest. docs/versions.md says what was run.
NEWEST := 2.15.0
override TORCH := $(TORCH:newest=$(NEWEST))
# Test processes at a time. Each has a pool of ranks of its own; the tests of a file stay together.
WORKERS ?= 2

# With the PyTorch of constraints.txt, or with another one, beside it: make test TORCH=2.8.0
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
STAMP := $(VENV)/.complete
EXTRAS := examples,optimizers,test,dev,docs
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# make gpu PYTHON=/path/to/python3 takes that interpreter as it is, with the PyTorch that it has, and makes no
# environment: for a machine with a GPU and no network. It needs PyTorch, numpy and pytest there, nothing installed.
GPU_GIVEN := $(filter command,$(origin PYTHON))

export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same modules

.DEFAULT_GOAL := help
.PHONY: help train test test-all exhaustive sockets integrations gpu bench lint style types imports format docs release clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "ARGS='...' is handed on, as in: make train ARGS='--stage 3', make test ARGS='-k pool'"

train: $(STAMP)  ## train the small GPT of examples/, sharded over two processes
	GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/torchrun --standalone --nproc-per-node 2 \
	    examples/train_gpt.py $(ARGS)

test: $(STAMP)  ## run the quick tests; TORCH=2.8.0, or TORCH=newest, runs them on that PyTorch, in an environment of its own
	$(PYTEST) -m "not slow and not exhaustive" $(ARGS)

test-all: $(STAMP)  ## run the slow tests too: compilers, notebooks, all classes and all moments of a kill
	$(PYTEST) -m "not exhaustive" $(ARGS)

exhaustive: $(STAMP)  ## run every case of what test-all shows for some: kills, failures, the GPU suite on the CPU
	$(PYTEST) -m exhaustive $(ARGS)

# What `make sockets` runs, minutes: bits, recipes and faults, where ranks of one host do not share memory.
SOCKETS := $(foreach name,parity clip costs metrics ddp_bits ddp_join lazy_gather overlap_hooks overlap_inline overlap_training overlap_uneven row_sum sharded_training fully_sharded fully_sharded_state mesh mesh_checkpoints join stalled,tests/test_$(name).py)

sockets: $(STAMP)  ## run what sends tensors on ranks that do not share their host's memory, as ranks of several hosts
	$(PYTEST) -m "not slow and not exhaustive" --sockets $(SOCKETS) $(ARGS)

integrations:  ## run the adapters with the real frameworks, and all optimizer classes of other packages, each in an environment
	@$(MAKE) --no-print-directory test VENV=.venv-integrations EXTRAS=integrations ARGS='tests/integrations $(ARGS)'
	@$(MAKE) --no-print-directory test VENV=.venv-classes EXTRAS=classes ARGS='tests/integrations/test_c*.py tests/test_migrating.py $(ARGS)'

gpu: $(if $(GPU_GIVEN),,$(STAMP))  ## run every claim on the GPUs there are, 12 minutes at most; ARGS='--device cpu --dry' without one
	PYTHONPATH=tests:. $(if $(GPU_GIVEN),$(PYTHON),$(VENV)/bin/python) -m gpu $(ARGS)

bench: $(STAMP)  ## run every benchmark, about 40 minutes
	@for name in calls partition scale memory muon consolidate checkpoint step reducer overlap fully_sharded fsdp2_owners mesh watchdog; do $(VENV)/bin/python benchmarks/$$name.py || exit 1; done

lint: style types imports  ## check all three; add -k to see what else fails after a failure

style: $(STAMP)  ## ruff: habits and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(VENV)/bin/mypy

imports: $(STAMP)  ## import-linter: imports point down
	$(VENV)/bin/lint-imports --no-logo

format: $(STAMP)  ## put the code into the one format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Warnings are errors: links and anchors that lead nowhere, pages that nobody finds, names without a docstring.
# Not with --quiet, which hides them from --strict.
docs: $(STAMP)  ## build the site from docs/, docstrings and notebooks into build/site; it needs no network
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict -f docs/site/mkdocs.yml

release: $(STAMP)  ## build sdist and wheel in dist/, and run the quick tests on the wheel with the sources away
	$(VENV)/bin/python tests/distribution.py dist build/release
	cd build/release/checkout && ../environment/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	    -m "not slow and not exhaustive and not packaging" $(ARGS)

clean:  ## remove the environments and everything that was built
	rm -rf .venv .venv-torch-* .venv-integrations .venv-classes build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted set-up is no set-up. It is removed first, so an interrupted update is
# none either. Without a stamp nothing that lies in .venv is trusted, and it is made from nothing. No build isolation:
# the package is built with the setuptools that torch brought, at its pinned version. Python compiles what is imported
# when it is: all of PyTorch takes three times as long as its installation.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "zero-optim needs Python 3.10 or newer, and '$(PYTHON)' is not: try make PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@echo "setting up $(VENV), once"
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear $(VENV); fi
	@sed $(if $(TORCH),-e '/^torch==/d') -e '' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet --no-compile torch==$(or $(TORCH),2.13.0) -c $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet --no-compile --no-build-isolation -c $(VENV)/constraints.txt \
	    -e '.[$(EXTRAS)]' torch==$(or $(TORCH),2.13.0)
	@touch $@
