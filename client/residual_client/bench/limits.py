"""Limits: what the machine does with the same bytes when nothing but a copy, a socket or a file is in the way."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from residual_client.bench import loopback
from residual_client.bench.loopback import COMMAND, receive
from residual_client.bench.stopwatch import Stopwatch
from residual_client.bench.workload import Workload
from residual_store.frame import aligned_empty

__all__ = ["File", "Memcpy", "Socket", "forget_pages", "raw_socket"]


class Memcpy:
    """One copy into memory that has been written before; the step is ``memcpy``."""

    name = "memcpy"

    def __init__(self, nbytes: int) -> None:
        self._warm = _warm(nbytes)

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        with watch.step("memcpy"):
            np.copyto(self._warm[: workload.nbytes], workload.flat)


class Socket:
    """TCP over loopback to a process that receives into warm memory, and back; steps ``socket_send`` and ``socket_receive``.

    Options are the defaults but for TCP_NODELAY.
    """

    name = "socket"

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._sock = sock
        self._warm = memoryview(_warm(nbytes))

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        nbytes, done = workload.nbytes, memoryview(bytearray(1))
        with watch.step("socket_send"):
            self._sock.sendall(COMMAND.pack(b"P", nbytes))
            self._sock.sendall(memoryview(workload.flat))
            receive(self._sock, done)
        with watch.step("socket_receive"):
            self._sock.sendall(COMMAND.pack(b"G", nbytes))
            receive(self._sock, self._warm[:nbytes])


@contextlib.contextmanager
def raw_socket(nbytes: int) -> Iterator[Socket]:
    """A raw socket for workloads up to that many bytes, whose other end stops with it."""
    command = [sys.executable, loopback.__file__, str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - all of it is ours
        port = int(process.stdout.readline() if process.stdout is not None else "")
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Socket(sock, nbytes)


class File:
    """One file: steps ``write_fsync``, ``read_uncached`` (its pages dropped before) and ``read_cached``."""

    name = "file"

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._path = folder / "limit"
        self._warm = memoryview(_warm(nbytes))

    def round(self, workload: Workload, watch: Stopwatch) -> None:
        with watch.step("write_fsync"), self._path.open("wb", buffering=0) as file:
            _write(file.fileno(), memoryview(workload.flat))
            os.fsync(file.fileno())
        forget_pages(self._path)
        for step in ("read_uncached", "read_cached"):
            with watch.step(step), self._path.open("rb", buffering=0) as file:
                _read(file.fileno(), self._warm[: workload.nbytes])
        self._path.unlink()


def _warm(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that has been written before, from the start of a page: 16 bytes into one, where numpy's large arrays start,
    a copy of 256 MiB took 2.7 times as long on one machine.
    """
    warm = aligned_empty(nbytes)
    warm[:] = 1
    return warm


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[os.readv(descriptor, [buffer]) :]


def forget_pages(path: Path) -> None:
    """Drop the pages of a file from the kernel's cache, so that the next read goes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
