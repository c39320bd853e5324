"""Answers: what the body of a server's answer stands for, digests checked.

A reader may raise ValueError, TypeError or LookupError for an answer that no server of this project gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, Payload, digest_of
from residual_store.dtypes import dtype_of
from residual_store.errors import DataLoss, InvalidOption, ResidualStoreError, Unreachable
from residual_store.frame import FrameReader
from residual_store.place import SEGMENT_HEADER, Place
from residual_store.problem import error_from_problem
from residual_store.settings import Settings
from residual_store.store import Page, Receipt, RunUsage, Stat, Usage

__all__ = [
    "Answer",
    "Apart",
    "read_deleted",
    "read_frame",
    "read_json",
    "read_leaf",
    "read_nothing",
    "read_page",
    "read_place",
    "read_program",
    "read_receipt",
    "read_stat",
    "read_usage",
    "refusal_of",
]


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
    """A frame whose leaf area is not in the body but at a place in shared memory; ``adopt`` makes the bundle of it."""

    place: Place
    adopt: Callable[[Payload], Bundle]


def read_frame(answer: Answer, settings: Settings, allocate: Callable[[int], Payload]) -> Bundle | Apart:
    """The bundle in a body, its leaf area in memory from ``allocate``, or `Apart`."""
    text = answer.headers.get(SEGMENT_HEADER)
    reader = FrameReader(settings, total=answer.length, leaves_apart=text is not None)
    while not reader.awaits_memory:
        _read_some(answer, reader)
    if text is None and reader.manifest is not None:
        reader.place(allocate(reader.manifest.nbytes))
        while not reader.complete:
            _read_some(answer, reader)
    answer.read()
    return reader.bundle() if text is None else Apart(Place.of_text(text), reader.adopt)


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
    content = json.loads(answer.read())
    return _as(Receipt, content | {"platforms": tuple(content["platforms"])})


def read_stat(answer: Answer) -> Stat:
    """The stat in a body, or in the header of an answer to HEAD."""
    return _as(Stat, json.loads(answer.read() or answer.headers["Residual-Stat"]))


def read_place(answer: Answer) -> Place:
    """The place of a lent segment."""
    return _as(Place, json.loads(answer.read()))


def read_json(answer: Answer) -> Mapping[str, Any]:
    """A JSON object."""
    content = json.loads(answer.read())
    return {**content}


def read_page(answer: Answer) -> Page:
    """One page of a listing."""
    content = json.loads(answer.read())
    return Page(entries=tuple(_as(Stat, entry) for entry in content["entries"]), next=content["next"])


def read_usage(answer: Answer) -> Usage:
    """How much a server holds."""
    content = json.loads(answer.read())
    return _as(Usage, content | {"runs": tuple(_as(RunUsage, run) for run in content["runs"])})


def read_deleted(answer: Answer) -> int:
    """How many bundles a deletion removed."""
    return int(json.loads(answer.read())["deleted"])


def _as[T](kind: Callable[..., T], content: Mapping[str, Any]) -> T:
    """A dataclass out of a JSON object; what a newer server says beyond that is left out."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in content.items() if name in names})


def read_nothing(answer: Answer | None) -> None:
    if answer is not None:
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
