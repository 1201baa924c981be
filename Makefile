# make help says what there is. Everything runs in .venv, which is made on the first call.
VENV    ?= .venv
PYTHON  ?= python3
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.installed

.PHONY: help install reproduce test notebooks docs serve hooks lab clean-venv

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make .venv with the project and everything it needs

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make install PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@echo "installing into $(VENV): torch is large, this takes some minutes on the first call"
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Without DATASET: the main finding on digits, one seed, about three minutes. With DATASET: the whole study of that data set.
reproduce: $(STAMP)  ## the main finding on digits; DATASET=NAME makes every table and figure of NAME
ifeq ($(origin DATASET),undefined)
	@$(VENV)/bin/cl-nscl reproduce digits --preset quick --experiment 01_alignment
else
	@$(VENV)/bin/cl-nscl reproduce $(DATASET)
endif

# One process more than cores: some tests wait, for Slurm, for a lock, for a browser.
test: $(STAMP)  ## every notebook and test, then export and clean without a diff
	@$(PY) -m pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder

notebooks: $(STAMP)  ## export, re-execute the notebooks with their outputs, write README.md
	@$(PY) tools/notebooks.py
	@$(VENV)/bin/nbdev_export && $(VENV)/bin/nbdev_clean

docs: $(STAMP)  ## the site, in _docs/: with Quarto if it is installed, else without
	@$(PY) tools/docs.py

serve: $(STAMP)  ## show the site that make docs built, and say where
	@$(PY) tools/docs.py serve

hooks: $(STAMP)  ## from now on git refuses a commit whose notebooks are not clean and exported
	@git config core.hooksPath .githooks

# The commands and the kernel of .venv come first, whatever else this machine has.
lab: export PATH := $(abspath $(VENV))/bin:$(PATH)
lab: export JUPYTER_PREFER_ENV_PATH := 1
lab: $(STAMP)  ## open the notebooks in JupyterLab, in reading order
	@jupyter lab workspaces import tools/web/reading.jupyterlab-workspace >/dev/null
	@jupyter lab --LabApp.default_url=/lab/workspaces/reading

clean-venv:  ## remove .venv
	rm -rf $(VENV)
