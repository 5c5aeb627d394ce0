# The two commands of this project, `make train` and `make test`, and a few small ones. `make help` lists them.
# Each sets up .venv when that is missing or out of date (launch/setup.sh).

PYTHON_IN_VENV := .venv/bin/python
ARGS ?=

.PHONY: help train test lint format clean setup
.DEFAULT_GOAL := help

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  ARGS=... goes to pytest, or to the trainer: make test ARGS='-k schedule', make train ARGS='--set run.seed=1'"

train: setup ## the whole way on simulated data: simulate, pre-batch, train on 8 ranks, evaluate
	@$(PYTHON_IN_VENV) -m xla_b2t.launch --cores 8 $(ARGS)
	@$(PYTHON_IN_VENV) -m xla_b2t evaluate runs/demo

test: setup lint ## lint, then every test
	@$(PYTHON_IN_VENV) -m pytest $(ARGS)

lint: setup ## style and formatting, without changing anything
	@$(PYTHON_IN_VENV) -m ruff check --quiet .
	@$(PYTHON_IN_VENV) -m ruff format --check --quiet .

format: setup ## put style and formatting right
	@$(PYTHON_IN_VENV) -m ruff check --quiet --fix .
	@$(PYTHON_IN_VENV) -m ruff format --quiet .

clean: ## remove caches and the demo; .venv and other runs stay
	@rm -rf demo runs/demo build dist .pytest_cache .ruff_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

setup:
	@PYTHON='$(PYTHON)' bash launch/setup.sh
