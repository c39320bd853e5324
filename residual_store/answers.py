"""Answers: turning the body of a server's answer into a bundle, a leaf, a program or an error; digests are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, digest_of
from residual_store.dtypes import dtype_of
from residual_store.errors import DataLoss, InternalError, InvalidOption, ResidualStoreError, Unreachable
from residual_store.frame import FrameReader, aligned_empty
from residual_store.problem import error_from_problem
from residual_store.settings import Settings

__all__ = ["Answer", "read_as", "read_frame", "read_leaf", "read_nothing", "read_program", "refusal_of"]


class Headers(Protocol):
    """Header fields by name."""

    def __getitem__(self, name: str, /) -> str: ...


class Answer(Protocol):
    """What an HTTP library gives: headers, the length of the body if known, and the body as it comes."""

    length: int | None
    status: int
    reason: str

    @property
    def headers(self) -> Headers: ...

    def read(self) -> bytes: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


def read_frame(answer: Answer, settings: Settings) -> Bundle:
    reader = FrameReader(settings, total=answer.length)
    while not reader.complete:
        if reader.awaits_memory and reader.manifest is not None:
            reader.place(aligned_empty(reader.manifest.nbytes))
            continue
        count = answer.readinto(reader.buffer())
        if not count:
            raise Unreachable("the answer broke off before the last leaf")
        reader.received(count)
    answer.read()
    return reader.bundle()


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


def read_as[T](kind: Callable[..., T], content: Mapping[str, Any]) -> T:
    """A dataclass out of a JSON object; what a newer server says beyond that is left out.

    Raises `InternalError` if something is missing, as with a server of another release.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in content.items() if name in names})
    except TypeError as error:
        raise InternalError(
            f"the server's answer is not understood; does it have another release? {error}"
        ) from error


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
