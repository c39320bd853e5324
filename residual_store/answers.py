"""Answers: what the body of a server's answer stands for, digests checked.

A reader may raise what is in `NOT_UNDERSTOOD` for an answer that no server of this project gives.
What a newer server says beyond what is known here is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload, digest_of
from residual_store.dtypes import dtype_of
from residual_store.errors import DataLoss, InvalidOption, ResidualStoreError, Unreachable
from residual_store.frame import FrameReader
from residual_store.place import SEGMENT_HEADER, Place
from residual_store.problem import error_from_problem
from residual_store.settings import Settings
from residual_store.shared_leaf import SharedLeaf
from residual_store.store import Page, Receipt, Stat, Usage

__all__ = [
    "NOT_UNDERSTOOD",
    "Answer",
    "Apart",
    "read_deleted",
    "read_frame",
    "read_held",
    "read_json",
    "read_leaf",
    "read_nothing",
    "read_page",
    "read_placed_receipt",
    "read_program",
    "read_receipt",
    "read_stat",
    "read_usage",
    "refusal_of",
]

NOT_UNDERSTOOD = (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Headers(Protocol):
    """Header fields by name."""

    def __getitem__(self, name: str, /) -> str: ...

    def get(self, name: str, /) -> str | None: ...


class Answer(Protocol):
    """What an HTTP library gives: headers, the length of the body if known, and the body as it comes."""

    length: int | None
    status: int
    reason: str

    @property
    def headers(self) -> Headers: ...

    def read(self) -> bytes: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


@dataclass(frozen=True)
class Apart:
    """A frame whose leaf area is not in the body but in shared memory; ``adopt`` makes the bundle of the memory there.

    ``places`` are that of the leaf area, if it has bytes, and those of the shared leaves.
    """

    places: tuple[Place, ...]
    adopt: Callable[[Sequence[Payload]], Bundle]


def read_frame(answer: Answer, settings: Settings, allocate: Callable[[int], Payload]) -> Bundle | Apart:
    """The bundle in a body, its leaf area in memory from ``allocate``, or `Apart`."""
    text = answer.headers.get(SEGMENT_HEADER)
    reader = FrameReader(settings, total=answer.length, leaves_apart=text is not None)
    while not reader.awaits_memory:
        _read_some(answer, reader)
    if text is None and reader.manifest is not None:
        if reader.manifest.shared:
            raise ValueError("the frame leaves out the bytes of a leaf")
        reader.place(allocate(reader.manifest.nbytes))
        while not reader.complete:
            _read_some(answer, reader)
    answer.read()
    return reader.bundle() if text is None else _apart(Place.all_of_text(text), reader)


def _apart(places: tuple[Place, ...], reader: FrameReader) -> Apart:
    manifest = reader.manifest
    assert manifest is not None
    own = 1 if manifest.nbytes else 0
    if len(places) != own + len(manifest.shared):
        raise ValueError("the places are not those of the bundle's leaves")

    def adopt(memory: Sequence[Payload]) -> Bundle:
        stored = reader.adopt(memory[0] if own else np.empty(0, np.uint8))
        if not manifest.shared:
            return stored
        shared = zip(manifest.shared, memory[own:], strict=True)
        return stored.resolved([SharedLeaf.of(leaf).bundle(bytes_of) for leaf, bytes_of in shared])

    return Apart(places, adopt)


def _read_some(answer: Answer, reader: FrameReader) -> None:
    count = answer.readinto(reader.buffer())
    if not count:
        raise Unreachable("the answer broke off before the last leaf")
    reader.received(count)


def read_leaf(answer: Answer) -> npt.NDArray[np.generic]:
    data = answer.read()
    if f'"{digest_of(data).hex()}"' != answer.headers["ETag"]:
        raise DataLoss("the leaf does not match its digest")
    shape = [int(size) for size in answer.headers["Residual-Shape"].split(",") if size]
    dtype = dtype_of(answer.headers["Residual-Dtype"])
    return np.frombuffer(data, dtype).reshape(shape) if dtype.itemsize and data else np.zeros(shape, dtype)


def read_program(answer: Answer) -> bytes:
    program = answer.read()
    if digest_of(program).hex() != answer.headers["Residual-Digest"]:
        raise DataLoss("the program does not match its digest")
    return program


def read_receipt(answer: Answer) -> Receipt:
    """The receipt of a put."""
    return msgspec.json.decode(answer.read(), type=Receipt)


def read_placed_receipt(answer: Answer) -> tuple[Receipt, Place | None]:
    """The receipt of a put, and where the bundle's leaves are in shared memory, if they are."""
    receipt, text = read_receipt(answer), answer.headers.get(SEGMENT_HEADER)
    return receipt, Place.of_text(text) if text is not None else None


def read_held(answer: Answer) -> tuple[bool, ...]:
    """Which of the leaves that were asked for a run holds."""
    return tuple(bool(held) for held in json.loads(answer.read())["held"])


def read_stat(answer: Answer) -> Stat:
    """The stat in a body, or in the header of an answer to HEAD."""
    return msgspec.json.decode(answer.read() or answer.headers["Residual-Stat"], type=Stat)


def read_json(answer: Answer) -> Mapping[str, Any]:
    """A JSON object."""
    content = json.loads(answer.read())
    return {**content}


def read_page(answer: Answer) -> Page:
    """One page of a listing."""
    return msgspec.json.decode(answer.read(), type=Page)


def read_usage(answer: Answer) -> Usage:
    """How much a server holds."""
    return msgspec.json.decode(answer.read(), type=Usage)


def read_deleted(answer: Answer) -> int:
    """How many bundles a deletion removed."""
    return int(json.loads(answer.read())["deleted"])


def read_nothing(answer: Answer) -> None:
    """Read an answer that says nothing, to its end, so that the connection can be used again."""
    answer.read()


def refusal_of(url: str, answer: Answer) -> ResidualStoreError:
    """The error that an answer with a status of 300 or more stands for."""
    if answer.status < 400:
        return InvalidOption(
            f"{url} answers with a redirect, which is not followed; use the URL that it leads to"
        )
    # The answer to HEAD has no body, so the problem stands in a header.
    text = answer.read() or answer.headers["Residual-Problem"]
    try:
        problem = json.loads(text)
    except (ValueError, TypeError):
        problem = None
    if not isinstance(problem, dict):
        code = {401: "unauthorized", 404: "not-found", 503: "stopping"}.get(answer.status)
        problem = {"code": code, "detail": f"{url} answered {answer.status} {answer.reason}"}
    return error_from_problem(problem, answer.status)
