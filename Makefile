# The checks and tests in one word each. The tools' versions are in requirements-dev.txt.

RULES = tests/test_architecture.py tests/test_limits.py tests/test_style.py tests/test_house.py tests/checks/test_habits.py
FAST = tests/config tests/positional tests/model tests/data/samples tests/data/shards tests/data/tasks tests/data/tokenizers
NUMBERS = tests/attention tests/kernels tests/positional tests/model tests/parallel tests/engine tests/distributed tests/evaluation tests/generation tests/plan tests/hub tests/tools/test_check_parity.py

.PHONY: help check fast test processor oldest docs format

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

# No test may expect one processor's bits: other instructions and three threads give other sums.
processor: export ATEN_CPU_CAPABILITY = default
processor: export ONEDNN_MAX_CPU_ISA = AVX2
processor: export MKL_ENABLE_INSTRUCTIONS = AVX2
processor: export OMP_NUM_THREADS = 3
processor: export MKL_DYNAMIC = FALSE
processor: ## The tests that compare floats, as on a processor with AVX2 only, with three threads
	python -m pytest -q -n 3 --dist loadfile $(NUMBERS)

oldest: ## Fast tests and kernels with the oldest packages that pyproject.toml admits
	.ci/oldest

docs: ## docs/configuration.md, then the site in site/
	python docs/site/reference.py
	mkdocs build

format: ## Format the code and repair what ruff can repair
	ruff format .
	ruff check --fix .
