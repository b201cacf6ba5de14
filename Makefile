# Two commands set everything up: `make demo` and `make test`. The rest is for working on it.

# The contract "Arithmetic is pure" names them; `coverage` requires that tests run all of their lines.
PURE := $(shell sed -n '/^name = "Arithmetic is pure"/,/^]/s|^  "\(.*\)",.*|\1|p' pyproject.toml | paste -sd,)
BIN := .venv/bin
INNER := tests/unit tests/property tests/contract tests/field
# Tests of pure modules, but those of whole tuners, fleets and trainings, which are simulations, and SEEN.
PROPERTIES := attribution_ capper.py capper_ramps config forward_enrich inference_ model_ pipelines sampling_intervals \
	sharing_ spans_ tuning
# Long ones, all lines of which other tests run too.
SEEN := tests/property/test_tuning.py $(addprefix %/test_, attribution_baseline.py attribution_cost.py decode_progress.py \
	miss_rate.py power_curve.py tuning_load_tracking.py)
COVERED := $(filter-out $(SEEN) tests/unit/tuning/test_tuner% $(addprefix %/test_, busy_start.py owners.py \
	participant.py replayed_trainings.py), $(wildcard $(foreach name, $(PROPERTIES), tests/property/test_$(name)*) \
	$(addsuffix /test_*.py, $(addprefix tests/unit/, advice attribution fleet footprint frontier inference model \
	recurring sharing spans training tuning tuning/pipeline util))))
# To collect all files takes each worker half a minute.
WITH_SLOW = $(shell grep -rl --include='test_*.py' 'mark\.slow' $(INNER))
# By file: tests of one file share simulated worlds and running programs.
BY_FILE := -n logical --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(BY_FILE)
# A part that fails does not keep the others from running.
EACH = $(MAKE) --no-print-directory -k
BOTH = $(EACH) -j2 --output-sync=target
# Flow tests wait for processes, timers and sockets half of their time.
FLOW_WORKERS := $(shell expr $$(nproc) + $$(nproc) / 2)
QUICK := not slow and not exhaustive
FAST := --hypothesis-profile=fixed -m '$(QUICK)'
SCHEMA = $(BIN)/check-jsonschema --quiet --builtin-schema vendor.
RECORD = --durations=10 --junit-xml=build/tests/$@.xml


export PYTHON
# Tests start the program hundreds of times: its modules are compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check environment tools all-tools lint types contracts structure format unit \
	affected inner covered uncovered slow flow flow-and-calculations calculations coverage thorough exhaustive alone search \
	soak docs bench fuzz dist release site lock clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## set up and run the agent on an emulated host (needs Python >= 3.11, nothing else)
	@scripts/environment run
	@exec $(BIN)/wattspan demo

test: environment ## set up and run every check and test of a change (at most 15 minutes on 2 cores)
	@$(BOTH) tools lint types contracts structure
	@$(EACH) uncovered flow-and-calculations coverage

test-all: test all-tools ## `make test`, then the exhaustive tests and a soak of ten minutes (over an hour)
	@$(BOTH) soak exhaustive
	@$(EACH) thorough search alone

check: environment ## the inner loop: every check, and the tests nearest to the change (a minute on 2 cores)
	@$(BOTH) affected lint types contracts structure

environment:
	@scripts/environment dev

tools:
	@scripts/test-tools

all-tools:
	@scripts/test-tools all

lint: ## style, spelling, project metadata, workflows
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/validate-pyproject pyproject.toml
	$(SCHEMA)github-workflows .github/workflows/*.yml
	$(SCHEMA)github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SCHEMA)github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA)dependabot .github/dependabot.yml
	$(SCHEMA)citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --no-progress --quiet .github

types: ## mypy: the product strictly, names and calls of tests and benchmarks
	$(BIN)/mypy

contracts: ## who may import whom
	$(BIN)/lint-imports

structure: ## size of the sources and stops of the data paths, compared with the ceilings in structure.toml
	$(BIN)/python scripts/structure.py

format: ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

unit: ## unit, property and contract tests, the slow ones left out
	$(PYTEST) -q -m '$(QUICK)' $(RECORD) $(INNER)

# Pytest ends with 5 if all tests of the files are slow.
affected: ## the unit, property and contract tests that import what differs from HEAD, for a minute
	@tests=$$($(BIN)/python scripts/affected.py) || exit; test -z "$$tests" || \
		$(PYTEST) -q -m '$(QUICK)' $(RECORD) $$tests || test $$? = 5

# Coverage triples the CPU time of calculations: it is measured in the tests of the modules that need it.
inner: covered uncovered

covered:
	@rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run --source=$(PURE) -m pytest $(BY_FILE) $(FAST) $(RECORD) $(COVERED)

uncovered:
	$(PYTEST) $(FAST) $(RECORD) $(COVERED:%=--ignore=%) $(filter-out $(COVERED), $(INNER))

slow:
	$(PYTEST) --hypothesis-profile=fixed -m 'slow and not exhaustive' $(RECORD) $(WITH_SLOW)

# Simulations and other calculations take the time in which flow tests wait.
flow-and-calculations:
	@$(BOTH) flow calculations

calculations:
	@+nice $(EACH) covered slow

flow:
	$(PYTEST) -n $(FLOW_WORKERS) -m 'not exhaustive' $(RECORD) tests/flow

thorough:
	$(PYTEST) --hypothesis-profile=thorough $(RECORD) tests/property tests/contract

exhaustive:
	$(PYTEST) -n $(FLOW_WORKERS) -m 'exhaustive and not alone and not search' $(RECORD) tests

search:
	$(PYTEST) -m search $(RECORD) tests/flow

alone:
	$(BIN)/python -m pytest -m alone $(RECORD) tests/flow

soak:
	$(BIN)/python -m benchmarks.soak --minutes 10 --interval 50ms --beside

coverage: ## require 100 % of the pure modules from the last run of the covered tests
	@$(BIN)/python -m coverage combine -q --keep
	@$(BIN)/python -m coverage report --skip-covered --fail-under=100 --show-missing

docs: environment ## write the generated reference pages and dashboards
	$(BIN)/python scripts/reference.py
	$(BIN)/python -m dashboards

bench: environment ## measure the agent beside its peers (two hours; see benchmarks/README.md)
	$(BIN)/python -m benchmarks

fuzz: environment ## fuzz every parser: [seconds=30] [target=NAME] [jobs=1] [input=FILE]
	PYTHONPATH=tests:. $(BIN)/python -m fuzz $(if $(seconds),--seconds $(seconds)) $(if $(jobs),--jobs $(jobs)) \
		$(if $(target),--target $(target)) $(if $(input),--input $(input))

dist: ## write the wheel, the source archive and the Helm chart to dist/
	@scripts/environment run
	@scripts/build-dist

release: ## write a release to dist/, with SBOM and checksums (see SUPPORT.md)
	@scripts/environment run
	@scripts/build-dist --release

site: ## build the documentation as a site in build/site/html, and check its links
	@scripts/environment run
	@scripts/tool-environment site
	@$(BIN)/python scripts/site.py

lock: ## resolve the dependencies anew and pin them with hashes
	scripts/lock

clean: ## remove everything that was set up or generated here
	rm -rf .venv .venv-clients .venv-apps .venv-packaging .venv-site .tools build dist htmlcov .coverage .coverage.* .mypy_cache \
		.ruff_cache .pytest_cache .hypothesis .import_linter_cache
