"""Arrow Flight: tables over gRPC, put and got with ``do_put`` and ``do_get``."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from residual_client.bench.peers import flight_server
from residual_client.bench.way import Exchange
from residual_client.bench.workload import Host, Workload

__all__ = ["flight"]

_SMALL_LEAF_BYTES = 1 << 16


@contextlib.contextmanager
def flight(_: Path) -> Iterator[Exchange]:
    """A Flight client and its server, a process of its own on TCP loopback."""
    from pyarrow import flight as library

    flight_server.recycle_memory()
    command = [sys.executable, flight_server.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - all of it is ours
        try:
            port = int(process.stdout.readline() if process.stdout is not None else "")
            with library.connect(f"grpc+tcp://127.0.0.1:{port}") as client:
                yield _Flight(client)
        finally:
            process.kill()


class _Flight(Exchange):
    """Measured as the faster of two: a record batch for each leaf, or one with a row for each if they are small."""

    name = "flight"

    def __init__(self, client: Any) -> None:
        from pyarrow import flight as library

        self._client = client
        self._library = library

    def put(self, workload: Workload) -> None:
        batches = _batches(workload)
        target = self._library.FlightDescriptor.for_path(workload.name)
        writer, _ = self._client.do_put(target, batches[0].schema)
        with writer:
            for batch in batches:
                writer.write_batch(batch)

    def get(self, workload: Workload) -> list[Host]:
        reader = self._client.do_get(self._library.Ticket(workload.name.encode()))
        columns = [chunk.data.column(0) for chunk in reader]
        if not _is_small(workload):
            return [column.to_numpy() for column in columns]
        _, offsets, values = columns[0].buffers()
        ends, values = np.frombuffer(offsets, np.int64), np.frombuffer(values, np.uint8)
        return [values[start:end] for start, end in itertools.pairwise(ends)]

    def drop(self, workload: Workload) -> None:
        list(self._client.do_action(self._library.Action("drop", workload.name.encode())))


def _is_small(workload: Workload) -> bool:
    return workload.nbytes < _SMALL_LEAF_BYTES * len(workload.arrays)


def _batches(workload: Workload) -> list[Any]:
    import pyarrow as arrow

    leaves = [array.reshape(-1).view(np.uint8) for array in workload.arrays.values()]
    if not _is_small(workload):
        return [arrow.record_batch([arrow.array(leaf)], names=["leaf"]) for leaf in leaves]
    ends = np.cumsum([0, *(leaf.nbytes for leaf in leaves)], dtype=np.int64)
    buffers = [None, arrow.py_buffer(ends), arrow.py_buffer(np.concatenate(leaves))]
    rows = arrow.LargeBinaryArray.from_buffers(arrow.large_binary(), len(leaves), buffers)
    return [arrow.record_batch([rows], names=["leaves"])]
