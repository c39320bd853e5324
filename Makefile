# Every target sets up all that it needs: `make demo` and `make test` work on a fresh clone that has only make, git and a python3 with venv.

UV  := .tools/bin/uv
BIN := .venv/bin

# Tests start many processes, and where Python must not write bytecode each of them would compile JAX again.
export UV_COMPILE_BYTECODE := 1

.DELETE_ON_ERROR:
.PHONY: setup demo bench test test-lowest check format image-check clean

setup: .venv/.ready

$(UV):
	python3 -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check uv

.venv/.ready: $(UV) pyproject.toml uv.lock
	$(UV) sync --quiet --frozen --all-extras
	touch $@

demo: setup
	$(BIN)/residual-store demo

bench: setup
	$(UV) sync --quiet --frozen --all-extras --group bench
	@command -v redis-server >/dev/null || echo "To measure Redis as well, install redis-server (Debian: apt install redis-server)."
	$(BIN)/residual-store bench --peers --json bench.json

# All tests, or those that TESTS says.
test: setup
	$(BIN)/python -m pytest $(TESTS)

# The same against the lowest versions that pyproject.toml allows.
test-lowest: .venv-lowest/.ready
	.venv-lowest/bin/python -m pytest $(TESTS)

.venv-lowest/.ready: $(UV) pyproject.toml
	$(UV) venv --quiet --clear .venv-lowest
	$(UV) pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[client,server]' --group dev
	touch $@

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) test

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

image-check: $(UV)
	docker/replay.sh

clean:
	rm -rf .tools .venv .venv-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis
