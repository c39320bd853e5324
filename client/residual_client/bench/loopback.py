"""The other end of the raw socket, a process of its own: it knows the standard library only, and runs as a script.

It prints its port, takes one connection, and obeys commands of 9 bytes until that closes: a letter and a u64 of
bytes, little-endian.
``P``: that many bytes follow, and it answers one byte when it has them all.
``G``: it sends that many bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import sys

__all__ = ["COMMAND", "receive"]

COMMAND = struct.Struct("<cQ")


def receive(sock: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer; each call of the kernel gets all that is left of it."""
    while buffer:
        received = sock.recv_into(buffer)
        if not received:
            raise EOFError
        buffer = buffer[received:]


def main(nbytes: int) -> None:
    """Serve one connection, with one buffer of that many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer, head = memoryview(_warm(nbytes)), bytearray(COMMAND.size)
    while True:
        try:
            receive(sock, memoryview(head))
        except EOFError:
            return
        command, length = COMMAND.unpack(head)
        if command == b"P":
            receive(sock, buffer[:length])
            sock.sendall(b"K")
        else:
            sock.sendall(buffer[:length])


def _warm(nbytes: int) -> mmap.mmap:
    """Memory that has been written before, on huge pages where the kernel has them, as that of a large numpy array."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, nbytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory


if __name__ == "__main__":
    main(int(sys.argv[1]))
