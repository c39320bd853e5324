"""Extents: where the values of an OCDBT database lie in its files, for reading them straight into memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tensorstore as ts

from residual_store.bundle import Payload

__all__ = ["Extent", "extents_of"]


@dataclass(frozen=True, order=True)
class Extent:
    """``nbytes`` bytes from ``offset`` on in the file at ``path``; extents sort as they lie on the disk."""

    path: str
    offset: int
    nbytes: int

    def read_into(self, memory: Payload) -> None:
        """Fill ``memory``, which may be shorter than the extent; raises OSError, or ValueError if the file ends early."""
        rest, offset = memoryview(memory)[: self.nbytes], self.offset
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, offset, len(rest), os.POSIX_FADV_WILLNEED)
            while rest:
                count = os.preadv(descriptor, [rest], offset)
                if not count:
                    raise ValueError(f"{self.path} ends at {offset}, before its extent does")
                rest, offset = rest[count:], offset + count
        finally:
            os.close(descriptor)


def extents_of(directory: Path, *, context: ts.Context) -> dict[str, Extent]:
    """The extents of the database in ``directory`` by key; small values, which lie in tree nodes, have none.

    Raises ValueError if the database is damaged or gone.
    The tree is read through ``tensorstore.ocdbt.dump``, https://google.github.io/tensorstore/python/api/tensorstore.ocdbt.dump.html.
    """
    base = ts.KvStore.open({"driver": "file", "path": f"{directory}/"}, context=context).result()
    root = ts.ocdbt.dump(base, context=context).result()["versions"][-1]["root"]
    found: dict[str, Extent] = {}
    nodes = [(root["location"], b"")] if "location" in root else []
    while nodes:
        location, prefix = nodes.pop()
        for entry in ts.ocdbt.dump(base, location, context=context).result()["entries"]:
            if "location" in entry:
                # Keys below an inner node are written without the prefix that they share.
                nodes.append((entry["location"], prefix + entry["subtree_common_prefix"]))
            elif "indirect_value" in entry:
                _, folder, rest = entry["indirect_value"].split(":", 2)
                name, offset, nbytes = rest.rsplit(":", 2)
                key = (prefix + entry["key"]).decode()
                found[key] = Extent(f"{directory}/{folder}{name}", int(offset), int(nbytes))
    return found
