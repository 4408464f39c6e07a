# The commands of the project. `make up` and `make test` set up what they need in .venv.
# PYTHON: the interpreter that makes .venv. JOBS: processes that share the tests.
# TORCH_INDEX: an index with CPU builds of PyTorch (PyTorch's "Get started" page names it); without
# it pip takes what the default index has.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TORCH_INDEX ?=
FILE ?= examples/kimi-nano.yaml
BIN := $(VENV)/bin
PIP_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: up down status test check fix generate e2e e2e-local e2e-cluster e2e-rdma e2e-all images bench bench-umbp dist clean

$(VENV)/.run-stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Kimistack and PyTorch into $(VENV); this takes minutes and says nothing"
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INDEX) -c constraints.txt -e '.[engine]'
	touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INDEX) -c constraints.txt -e '.[operator,engine,kernels,dev]'
	touch $@

up: $(VENV)/.run-stamp
	$(BIN)/kimistack up --detach -f $(FILE) $(ARGS)

down: $(VENV)/.run-stamp
	$(BIN)/kimistack down -f $(FILE)

status: $(VENV)/.run-stamp
	$(BIN)/kimistack status

test: $(VENV)/.dev-stamp
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

check: $(VENV)/.dev-stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate --check

fix: $(VENV)/.dev-stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(VENV)/.dev-stamp
	$(BIN)/python scripts/generate

# The real stack: as processes, then on two nodes (which says why it skips where it cannot start them).
e2e: e2e-local e2e-cluster

e2e-local: $(VENV)/.dev-stamp
	$(BIN)/pytest e2e/local $(ARGS)

# Two real nodes, as root: KIMISTACK_CLUSTER names the folder with the script that starts them.
e2e-cluster: $(VENV)/.dev-stamp
	PYTHON_INDEX_ARGS="$(PIP_INDEX)" $(BIN)/pytest e2e/cluster $(ARGS)

# Both images as OCI archives in build/images, as root, without a registry.
images: $(VENV)/.dev-stamp
	PYTHON_INDEX_ARGS="$(PIP_INDEX)" $(BIN)/python images/build

# Verbs on a soft-RoCE device in a virtual machine; the first run builds its image and needs root.
e2e-rdma: $(VENV)/.dev-stamp
	$(BIN)/python e2e/rdma/vm.py $(ARGS)

e2e-all: e2e e2e-rdma

bench: $(VENV)/.dev-stamp
	for bench in benchmarks/*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

# The KV pool, one table each: memcpy, other stores (ARGS of umbp_stores name their interpreters), fio,
# iperf3, the router's index of 10 million keys, peers, and fetching against computing.
UMBP_BENCHES := umbp umbp_stores ssdlog transfer umbp_index umbp_peers fetch_or_recompute
bench-umbp: $(VENV)/.dev-stamp
	for bench in $(UMBP_BENCHES); do echo "== $$bench"; \
	  $(BIN)/python benchmarks/$$bench.py $$(test $$bench = umbp_stores && echo $(ARGS)) || exit 1; done

dist: $(VENV)/.dev-stamp
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) dist build
