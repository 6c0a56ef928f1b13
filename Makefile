# Everything runs in a virtual environment beside the code; the first target sets it up, later ones reuse it.
#   make lab CPU=1      take PyTorch's CPU wheels (on Linux the ordinary ones bring several gigabytes of CUDA)
#   make lab PYTHON=…   another interpreter than python3

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

INDEX  := https://download.pytorch.org/whl/cpu
# From the command line only: some clusters have a CPU in their environment.
ifeq ($(origin CPU),command line)
# Where a firewall drops what is sent there, pip would try again for each package, half an hour in all: one look first.
# Who answers, be it with a certificate or a status that only pip knows how to take, is there.
define LOOK
import signal, ssl, sys, urllib.error, urllib.request
signal.alarm(10)
try:
    urllib.request.urlopen(sys.argv[1])
except urllib.error.HTTPError:
    pass
except urllib.error.URLError as error:
    sys.exit(not isinstance(error.reason, ssl.SSLError))
endef
export LOOK
WHEELS := $$(if { $(BIN)/python -c "$$LOOK" $(INDEX)/torch/; } >/dev/null 2>&1; then echo "--extra-index-url $(INDEX)"; \
  else echo "cannot reach $(INDEX): going on with what pip is set up for, which may bring CUDA" >&2; fi)
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: FORCE help setup lab doctor run lint types images site slides handout notebooks clean \
  test test-fast test-browser test-long test-notebooks test-slurm test-gpu test-full quick-half quick-rest tests some-notebooks other-notebooks

help:
	@echo "make lab             open your own copy of the course, my_course/ (ARGS=... goes to jupyter lab)"
	@echo "make doctor          say what works here, and what will fail in which notebook"
	@echo "make run             train a pipeline on two ranks and check it against one process"
	@echo "make test-fast       linter, type checker, the quick ones of the tests that start no ranks"
	@echo "make test            linter, type checker, all tests with a sample of each grid, three notebooks"
	@echo "make test-browser    the explorer, the board, the notebooks and the site in Chromium"
	@echo "make test-long       the tests of make test, those in Chromium, and whole runs that repeat what parts have shown"
	@echo "make test-notebooks  all notebooks as shipped, and the solution of each exercise in its place"
	@echo "make test-slurm      the scripts, %torchrun and the notebooks on throw-away Slurm clusters"
	@echo "make test-gpu        the stack on this machine's GPUs; skipped without one"
	@echo "make test-full       every size of every grid of tests"
	@echo "make images          redraw the figures used in prose"
	@echo "make site            build the pages of the course in runs/site/html, offline"
	@echo "make slides          decks of slides in runs/slides, one a route (ROUTE=a_day START=9:30)"
	@echo "make handout         a route on paper in runs/handouts, for people and for teachers: ROUTE=a_day"
	@echo "make notebooks       run the notebooks again and save them in place"
	@echo "make setup           only set up $(VENV); every other target does it when needed"
	@echo "make clean           remove $(VENV)"
	@echo "CPU=1                take PyTorch's CPU wheels;  PYTHON=python3.12  use another interpreter"

setup: $(READY)

# The stamp is written last, so an interrupted set-up is taken up again. It holds the folder's path, because a virtual
# environment does not survive being moved.
MOVED := $(filter-out $(CURDIR),$(shell cat $(READY) 2>/dev/null))
FORCE:

$(READY): pyproject.toml constraints.txt $(if $(MOVED),FORCE)
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(f"Python {v[0]}.{v[1]} is too old: 3.11 or newer is needed (make PYTHON=python3.11 ...)") if v < (3, 11) else None'
	@echo "setting up $(VENV): PyTorch, JupyterLab, test tools (once; 2 GB and a few minutes, more with CUDA) ..."
	@$(PYTHON) -m venv $(if $(MOVED),--clear) $(VENV) || { echo "no venv module: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@# The pip that comes with Python 3.11 takes a third longer, but does.
	@$(BIN)/python -m pip install --quiet --upgrade pip || echo "pip stays as it is"
	@$(BIN)/python -m pip install --quiet $(WHEELS) --constraint constraints.txt --editable '.[test]'
	@$(BIN)/jupyter labextension disable --level=sys_prefix @jupyterlab/apputils-extension:announcements >/dev/null 2>&1
	@echo '$(CURDIR)' > $@

# Once after set-up: says what will fail here, and opens the course whatever that is.
$(VENV)/examined: $(READY)
	@$(BIN)/python -m course_pp doctor --short || true
	@touch $@

lab: $(VENV)/examined
	@$(BIN)/python -m course_pp lab -- $(ARGS)

doctor: $(READY)
	@$(BIN)/python -m course_pp doctor

run: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 source_code/first_run.py

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

# Two workers for two cores: tests of dying ranks wait for news that a fuller machine delivers late.
PYTEST := $(BIN)/python -m pytest
# Tests of a file share what takes long to start. (--dist loadgroup silently parts them under pytest 9.2:
# https://github.com/pytest-dev/pytest-xdist/issues/1386.)
SHARED := --dist loadfile --no-loadscope-reorder
# Two workers with two threads each would wait for each other's cores.
ONE_EACH := OMP_NUM_THREADS=1
PARTS  := MAKE='$(MAKE)' $(BIN)/python .ci/parts.py

test-fast: $(READY)
	@$(PARTS) quick-rest quick-half lint types

test: $(READY)
	@$(PARTS) tests lint types some-notebooks

test-gpu: $(READY)
	@$(PYTEST) tests/gpu

# Two processes that each collect half of the tests: workers of pytest-xdist would each collect all.
QUICK := $(ONE_EACH) $(PYTEST) -m 'not ranks and not slow and not long and not full'
HALF  := $(addprefix tests/,schedule show model plan runtime)

quick-half: $(READY)
	@$(QUICK) $(HALF)

quick-rest: $(READY)
	@$(QUICK) tests $(HALF:%=--ignore=%)

tests: $(READY)
	@$(ONE_EACH) $(PYTEST) tests --ignore=tests/slurm -n 2 $(SHARED) --durations=10

# One browser and one JupyterLab serve them all.
test-browser: $(READY)
	@$(PYTEST) tests/browser tests/site -m 'not full'

test-long: $(READY)
	@$(ONE_EACH) $(PYTEST) tests --ignore=tests/slurm -n 2 $(SHARED) --durations=10 -m 'not full'

# The last notebooks take longest, so they go first: no worker is left with one at the end. To run one of them:
# make test-notebooks NOTEBOOKS=notebooks/05_zero_bubble.ipynb
NOTEBOOKS_AT_ONCE ?= 2
NOTEBOOKS := $(shell ls -r notebooks/*.ipynb)
# The first, one with emulated runs and a clinic, and one with a board, a search and both engines.
SOME := $(foreach number,11 03 00,$(wildcard notebooks/$(number)_*.ipynb))
some-notebooks: NOTEBOOKS := $(SOME)
other-notebooks: NOTEBOOKS := $(filter-out $(SOME),$(NOTEBOOKS))
# Limits for a slow machine that runs other tests beside them: of a cell, and of the whole notebook.
test-notebooks some-notebooks other-notebooks: $(READY)
	@COURSE_PP_WHERE=local $(ONE_EACH) $(PYTEST) -p tests.notebooks.solved -n $(NOTEBOOKS_AT_ONCE) \
	  --nbmake --nbmake-timeout=240 --timeout=600 $(NOTEBOOKS)

# Two clusters side by side: what the tests wait for is Slurm.
test-slurm: $(READY)
	@$(PYTEST) --verbose --durations=10 tests/slurm -n 2 --dist worksteal

# One after the other: the grids' time limits are for a machine of their own.
test-full: $(READY)
	@$(PYTEST) tests -m 'full or not full'

images: $(READY)
	@$(BIN)/python images/make.py $(ARGS)

site: $(READY)
	@$(BIN)/python docs/make_site.py $(ARGS)

slides: $(READY)
	@$(BIN)/python docs/slides.py $(if $(ROUTE),--route '$(ROUTE)') $(if $(START),--start '$(START)') $(ARGS)

handout: $(READY)
	@$(BIN)/python docs/handouts.py '$(ROUTE)' $(ARGS)

notebooks: $(READY)
	@COURSE_PP_WHERE=local $(BIN)/jupyter nbconvert --to notebook --execute --inplace --log-level=WARN \
	  --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

clean:
	rm -rf $(VENV)
