# Two commands do everything on a fresh Linux machine: `make run` and `make test`.
#
# Variables: PYTHON (3.11 or newer), TORCH (any pip requirement, or the path of a wheel), FASHION_MNIST (folder of the
# data), KUBEBUILDER_ASSETS (folder with etcd and kube-apiserver), PYTEST_ARGS, TEST_PROCESSES (test files that run at a
# time), E2E_PROCESSES (tests that run on a cluster at a time), FUZZ_SECONDS (for each target of `make fuzz`). Options of the main job are variables such as
# FASHION_EPOCHS=2 and FASHION_LIMIT=6000. For images and the cluster: REGISTRY, TAG, PYTHON_IMAGE, TORCH_INDEX,
# NODE_IMAGE (kind's, for another version of Kubernetes), E2E_ADDONS (program that installs JobSet and Kubeflow Trainer
# on a kind cluster). For a release: SIGNING_KEY (PEM file with an Ed25519 key), PYTHON_IMAGE with a digest.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PACKAGED_DATA := /usr/share/datasets/fashion-mnist
FASHION_MNIST ?= $(PACKAGED_DATA)
PYTEST_ARGS ?=
TEST_PROCESSES ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
E2E_PROCESSES ?= 2
FUZZ_SECONDS ?= 300
FUZZ_TARGETS ?=
AUDIT_SERVICE ?= pypi
SIGNING_KEY ?=

KUBEBUILDER_ASSETS ?= /usr/local/kubebuilder/bin
APISERVER_VERSION ?= 1.34.1
KWOK_VERSION ?= 0.8.0
ENVTEST := .envtest
ifeq ($(wildcard $(KUBEBUILDER_ASSETS)/kube-apiserver),)
override KUBEBUILDER_ASSETS := $(abspath $(ENVTEST))
endif
export KUBEBUILDER_ASSETS

REGISTRY ?= ghcr.io/dataloaderjob
TAG ?= $(shell sed -n 's,^__version__ = "\(.*\)",\1,p' sidecar/dataloaderjob/__init__.py)
PYTHON_IMAGE ?= python:3.11-slim-bookworm
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
NODE_IMAGE ?=
export REGISTRY TAG PYTHON_IMAGE NODE_IMAGE

VENV := .venv
EXAMPLE := examples/fashion-mnist
override FASHION_MNIST := $(abspath $(FASHION_MNIST))
IMAGES := $(FASHION_MNIST)/train-images-idx3-ubyte
export FASHION_MNIST
export PATH := $(abspath $(VENV)/bin):$(PATH)

.DEFAULT_GOAL := help
SUITES := test-unit test-contract test-integration test-parity test-apiserver test-chart
.PHONY: help env data apiserver constraints images run test test-ci test-all test-nightly durations record-parity $(SUITES) test-gpu e2e e2e-nightly check fuzz generate docs dist release-check sbom audit sign bench bench-full bench-petastorm bench-operator clean

help:  ## lists the targets
	@grep -hE '^[a-z0-9-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*  ## /\1\t/' | expand -t 18

env: $(VENV)/.installed  ## .venv with torch, this package and its tools

$(VENV)/.run-installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, found $$($(PYTHON) --version 2>&1): make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "$(PYTHON) cannot make environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(VENV)/bin/pip install "$(TORCH)"
	$(VENV)/bin/pip install -e '.[examples]'
	@touch $@

$(VENV)/.installed: $(VENV)/.run-installed tests/libraries.txt
	$(VENV)/bin/pip install -e '.[dev]'
	$(VENV)/bin/pip install --no-deps -r tests/libraries.txt
	@touch $@

$(VENV)/.bench-installed: $(VENV)/.installed
	$(VENV)/bin/pip install -e '.[bench]'
	@touch $@

data:  ## the Fashion-MNIST data set, by apt-get if possible
	@test -e $(IMAGES).gz -o -e $(IMAGES) || test "$(FASHION_MNIST)" != $(PACKAGED_DATA) || \
	  test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  { apt-get update && apt-get install -y --no-install-recommends dataset-fashion-mnist; } || true
	@test -e $(IMAGES).gz -o -e $(IMAGES) || { \
	  echo "Fashion-MNIST is needed, and $(FASHION_MNIST) has none. On Debian or Ubuntu, as root: apt-get install" >&2; \
	  echo "dataset-fashion-mnist. Elsewhere: take the four .gz files of data/fashion in" >&2; \
	  echo "https://github.com/zalandoresearch/fashion-mnist, then make run FASHION_MNIST=their-folder" >&2; exit 1; }

ARCH = $$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/')
# Empty if the program is installed, otherwise its path in .envtest, whose rule downloads it.
wanted = $(if $(wildcard $(KUBEBUILDER_ASSETS)/$(1))$(shell command -v $(1) 2>/dev/null),,$(abspath $(ENVTEST))/$(1))

apiserver: $(KUBEBUILDER_ASSETS)/kube-apiserver $(call wanted,kube-controller-manager)  ## etcd, kube-apiserver and its controllers, for tests without a cluster

$(abspath $(ENVTEST))/kube-apiserver:
	@command -v curl >/dev/null || { echo "curl is needed to get etcd and kube-apiserver" >&2; exit 1; }
	@mkdir -p $(ENVTEST)
	cd $(ENVTEST) && archive=envtest-v$(APISERVER_VERSION)-linux-$$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/').tar.gz && \
	  at=https://github.com/kubernetes-sigs/controller-tools/releases/download/envtest-v$(APISERVER_VERSION)/$$archive && \
	  curl -fsSLO $$at && curl -fsSLO $$at.sha512 && sha512sum -c $$archive.sha512 && \
	  tar -xzf $$archive --strip-components=2 && rm $$archive $$archive.sha512

$(abspath $(ENVTEST))/kube-controller-manager:
	@command -v curl >/dev/null || { echo "curl is needed to get kube-controller-manager" >&2; exit 1; }
	@mkdir -p $(ENVTEST)
	cd $(ENVTEST) && at=https://dl.k8s.io/release/v$(APISERVER_VERSION)/bin/linux/$(ARCH)/kube-controller-manager && \
	  curl -fsSL $$at -o kube-controller-manager.part && \
	  echo "$$(curl -fsSL $$at.sha256)  kube-controller-manager.part" | sha256sum -c && \
	  chmod +x kube-controller-manager.part && mv kube-controller-manager.part kube-controller-manager

# The releases of kwok publish no checksums of the programs.
$(abspath $(ENVTEST))/kwok:
	@command -v curl >/dev/null || { echo "curl is needed to get kwok" >&2; exit 1; }
	@mkdir -p $(ENVTEST)
	cd $(ENVTEST) && curl -fsSL -o kwok.part \
	  https://github.com/kubernetes-sigs/kwok/releases/download/v$(KWOK_VERSION)/kwok-linux-$(ARCH) && \
	  chmod +x kwok.part && mv kwok.part kwok

constraints: env  ## pins the packages of the images to their newest versions and the hashes of their files: constraints/
	python -m release.locks --upgrade

BUILD := docker build --build-arg PYTHON_IMAGE=$(PYTHON_IMAGE) --build-arg VERSION=$(TAG)

WHEEL := wheels/.got-$(shell echo "$(TORCH)" | cksum | cut -d' ' -f1)

images: data $(WHEEL)  ## container images of operator, sidecar, feeder and the main job
	$(BUILD) -f operator/Dockerfile -t $(REGISTRY)/operator:$(TAG) .
	$(BUILD) -f sidecar/Dockerfile.sidecar -t $(REGISTRY)/sidecar:$(TAG) .
	$(BUILD) -f sidecar/Dockerfile.feeder --build-arg "TORCH=$(TORCH)" -t $(REGISTRY)/feeder:$(TAG) .
	mkdir -p $(EXAMPLE)/data && cp $(FASHION_MNIST)/*-ubyte* $(EXAMPLE)/data/
	docker build --build-arg FEEDER=$(REGISTRY)/feeder:$(TAG) -t fashion-mnist:1 $(EXAMPLE)

# torch for CPUs, for the Python in the images: from pip's local sources if possible, otherwise from torch's own index.
$(WHEEL): $(VENV)/.installed
	@mkdir -p wheels && rm -f wheels/*.whl wheels/.got*
	pip download -q --no-deps --only-binary=:all: --python-version 3.11 --no-index -d wheels "$(TORCH)" 2>/dev/null || \
	  pip download --no-deps --only-binary=:all: --python-version 3.11 --index-url $(TORCH_INDEX) -d wheels "$(TORCH)"
	@touch $@

run: $(VENV)/.run-installed data  ## the main job: trains through feeders, draws the results, proves the bytes (a few minutes)
	rm -rf $(EXAMPLE)/out
	dataloaderjob run --record $(EXAMPLE)/out/record $(EXAMPLE)/dataloaderjob.yaml
	python $(EXAMPLE)/plot.py $(EXAMPLE)/out
	dataloaderjob verify $(EXAMPLE)/out/record
	python $(EXAMPLE)/proof.py $(EXAMPLE)/out

# Files run longest first (tests/durations.json). Some wait, so more run than there are cores; 3 keep two cores busy.
PYTEST := python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --slowest-files 10

test: env  ## the quick tests, which need only pip packages: 12 minutes on two cores
	@echo "make test: the quick tests of all parts, about 12 minutes on two cores; make test-ci, make test-all and make test-nightly run more"
	$(PYTEST) -m "not slow and not system and not thorough" $(PYTEST_ARGS)

test-ci: env apiserver  ## the quick tests, and those that need helm, etcd, FFmpeg's libraries or photographs
	@echo "make test-ci: all tests without a cluster that are not slow, about 21 minutes on two cores"
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: env apiserver  ## all tests without a cluster or GPU that are not marked nightly: 30 minutes
	@echo "make test-all: all tests without a cluster or GPU that are not marked nightly, about 30 minutes on two cores"
	$(PYTEST) -m "not nightly" --hypothesis-profile new $(PYTEST_ARGS)

# One test at a time: many have time limits, and benchmarks take the CPU from other processes.
test-nightly: env apiserver  ## the tests that make test-all leaves out, and more examples of properties: 20 minutes
	@echo "make test-nightly: full products, many seeds, soaks and time limits, about 20 minutes on two cores"
	$(PYTEST) -n 1 -m "nightly or hypothesis" --hypothesis-profile full $(PYTEST_ARGS)

durations: env apiserver  ## runs all tests without a cluster, and records the time of each file in tests/durations.json
	$(PYTEST) --record-durations $(PYTEST_ARGS)

record-parity: env  ## runs the scripts of tests/parity under torch's loader, and records their results
	PYTHONPATH=tests/support python tests/support/parity_record.py

test-unit: env  ## tests of single parts, without a service or Ray
	python -m pytest tests/unit $(PYTEST_ARGS)

test-contract: env  ## tests of documents, the example and packaging
	python -m pytest tests/contract $(PYTEST_ARGS)

test-integration: env  ## tests with real processes and real Ray
	python -m pytest tests/integration $(PYTEST_ARGS)

test-parity: env  ## ordinary scripts under torch's loader and this one
	python -m pytest tests/parity $(PYTEST_ARGS)

test-gpu: env  ## tests on an NVIDIA GPU, for which TORCH must be built
	python -m pytest gpu $(PYTEST_ARGS)

test-apiserver: env apiserver  ## tests of the operator against an API server without a cluster
	python -m pytest tests/apiserver $(PYTEST_ARGS)

test-chart: env  ## tests of the rendered chart (helm is needed)
	python -m pytest tests/chart $(PYTEST_ARGS)

CLUSTER_PYTEST := python -m pytest e2e -n $(E2E_PROCESSES) --dist load --maxschedchunk 1

e2e: env images  ## tests not marked nightly, on a cluster that kind creates and deletes (needs docker and helm): 39 minutes
	$(CLUSTER_PYTEST) -m "not nightly" $(PYTEST_ARGS)

e2e-nightly: env images  ## the other tests on a cluster, which stop nodes, upgrade the operator or wait: 60 minutes
	$(CLUSTER_PYTEST) -m nightly $(PYTEST_ARGS)

check: env  ## format, lint, types, layers, workflows, subjects of commits
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	zizmor --quiet --offline .github/workflows
	python tests/support/commit_subjects.py

fuzz: $(VENV)/.installed .venv-fuzz/.installed  ## atheris on all parsers of untrusted bytes, FUZZ_SECONDS (300) each; FUZZ_TARGETS: only these
	PYTHONPATH=.venv-fuzz python -m fuzz.run --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# atheris alone, beside the environment: it has no wheel for every Python that this package supports.
.venv-fuzz/.installed: pyproject.toml
	rm -rf .venv-fuzz
	$(VENV)/bin/pip install --no-deps --target .venv-fuzz "$$($(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["fuzz"])')"
	@touch $@

generate: env  ## generates files from the code: the schema of the manifest, pages of the documents
	python docs/generate.py
	python -m bench.report

docs: env  ## the documents as a site, in build/site; a broken link is an error
	python docs/pages.py
	zensical build --clean --strict

dist: env  ## a wheel and an sdist, in dist/
	rm -rf dist
	python -m build --no-isolation

release-check: env .venv-release/.installed  ## checks if this tree can be released: version, changelog, locks, wheel in an empty environment, inventories, signature
	PYTHONPATH=. python tests/support/release_check.py --torch "$(TORCH)" --base-image "$(PYTHON_IMAGE)" $(if $(SIGNING_KEY),--key "$(SIGNING_KEY)")

sbom: env .venv-release/.installed  ## inventories of the images in the CycloneDX format, in build/sbom
	python -m release.inventory

audit: env .venv-release/.installed  ## known vulnerabilities of what images install, by pip-audit; AUDIT_SERVICE=osv asks another service
	python -m release.audit --service $(AUDIT_SERVICE)

sign: env .venv-release/.installed  ## adds inventories to dist/, and signs all files there with the key SIGNING_KEY
	@test -n "$(SIGNING_KEY)" || { echo "a key is needed: make sign SIGNING_KEY=release.pem. To make one: openssl genpkey -algorithm ed25519 -out release.pem" >&2; exit 1; }
	python -m release.inventory --folder dist
	python -m release.signing sign dist --key "$(SIGNING_KEY)"

.venv-release/.installed: $(VENV)/.installed
	$(VENV)/bin/python -m venv --clear .venv-release
	.venv-release/bin/pip install $$($(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"])')
	@touch $@

bench: $(VENV)/.bench-installed  ## benchmarks, a good hour; writes bench/results and docs/benchmarks.md
	python -m bench.run

bench-full: $(VENV)/.bench-installed  ## the whole grid of benchmarks, hours
	python -m bench.run --full

bench-petastorm: .venv-petastorm/.installed  ## an environment with Petastorm, for B20 of `make bench`: 2 GB

.venv-petastorm/.installed:
	$(PYTHON) -m venv .venv-petastorm
	.venv-petastorm/bin/pip install petastorm==0.13.1 'pyarrow<15' 'numpy<2' 'pandas<3'
	.venv-petastorm/bin/pip install "$(TORCH)" 'numpy<2' 'setuptools<81'  # torch asks for a newer setuptools than Petastorm
	@touch $@

bench-operator: env apiserver $(call wanted,kube-controller-manager) $(call wanted,kwok)  ## benchmarks of the operator with 1,000 jobs on kwok, and of its injector: 20 minutes
	PATH="$(PATH):$(abspath $(ENVTEST))" python -m bench.operator_scale
	python -m bench.admission

clean:  ## removes generated files, except .venv
	rm -rf build dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache $(EXAMPLE)/out
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
