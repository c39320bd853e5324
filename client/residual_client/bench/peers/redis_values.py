"""Redis: values in the memory of a server, without persistence."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload

__all__ = ["redis_values"]

_SMALL_LEAF_BYTES = 1 << 16


@contextlib.contextmanager
def redis_values(folder: Path) -> Iterator[Exchange]:
    """A client and its ``redis-server`` on TCP loopback; raises OSError if there is no such command."""
    import redis

    if (command := shutil.which("redis-server")) is None:
        raise FileNotFoundError("redis-server is not on PATH; Debian's package has the same name")
    port = _free_port()
    options = [
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    with subprocess.Popen([command, *options], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - as above
        try:
            _await(process)
            with redis.Redis(port=port) as client:
                yield _Redis(client)
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _await(process: subprocess.Popen[str]) -> None:
    for line in process.stdout or ():
        if "Ready to accept connections" in line:
            return
    raise ChildProcessError("redis-server ended before it accepted connections")


class _Redis(Exchange):
    """A value for each leaf; set one by one if they are large, else all at once, whichever is faster; got all at once."""

    name = "redis"

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, workload: Workload) -> None:
        values = {
            name: memoryview(array.reshape(-1).view(np.uint8)) for name, array in workload.arrays.items()
        }
        if workload.nbytes < _SMALL_LEAF_BYTES * len(values):
            self._client.mset(values)
            return
        for name, value in values.items():
            self._client.set(name, value)

    def get(self, workload: Workload) -> list[Host]:
        return [np.frombuffer(value, np.uint8) for value in self._client.mget(list(workload.arrays))]

    def drop(self, workload: Workload) -> None:
        self._client.delete(*workload.arrays)
