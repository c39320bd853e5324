#!/bin/sh
# Installs the server from the source tree in the current directory into a virtual environment of its own.
# docker/Dockerfile and docker/replay.sh both run this, so the replay checks what the image installs.
#
#   docker/install.sh dependencies TARGET   what uv.lock says; needs .python-version, pyproject.toml and uv.lock only
#   docker/install.sh project TARGET        the project itself, and a test that it can be imported
set -eu

step=$1 target=$2
export UV_PROJECT_ENVIRONMENT="$target" UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy

install() {
    uv sync --quiet --frozen --no-dev --no-editable --extra server "$@"
}

case $step in
dependencies)
    install --no-install-project
    ;;
project)
    install --compile-bytecode
    # Away from the source tree, so that what is imported is what was installed.
    cd /
    "$target/bin/python" -c '
import importlib.util
import residual_server
import residual_store

for name in ("jax", "mypy", "pytest", "ruff"):
    assert importlib.util.find_spec(name) is None, f"{name} has no place in a server"
'
    "$target/bin/residual-store" --version
    ;;
*)
    echo "usage: docker/install.sh dependencies|project TARGET" >&2
    exit 2
    ;;
esac
