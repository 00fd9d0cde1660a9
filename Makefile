# The checks and tests in one word each. The tools' versions are in requirements-dev.txt.

RULES = tests/test_architecture.py tests/test_limits.py tests/test_style.py tests/test_house.py tests/checks/test_habits.py
FAST = tests/config tests/positional tests/model tests/data/samples tests/data/shards tests/data/tasks tests/data/tokenizers

.PHONY: help check fast test docs format

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

check: ## Style, spelling, types and the rules of the house
	ruff format --check .
	ruff check .
	codespell
	basedpyright
	python -m pytest -q $(RULES)

fast: ## The tests of configuration, embeddings, model and data
	python -m pytest -q -n 3 --dist loadfile $(FAST)

test: ## All tests: README's command
	python -m pytest -q -n 3 --dist loadfile

docs: ## docs/configuration.md, then the site in site/
	python tools/pages/reference.py
	mkdocs build

format: ## Format the code and repair what ruff can repair
	ruff format .
	ruff check --fix .
