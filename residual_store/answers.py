"""Answers: turning the body of a server's answer into a bundle, a leaf or a program, its digest checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from residual_store.bundle import Bundle, digest_of
from residual_store.dtypes import dtype_of
from residual_store.errors import DataLoss, Unreachable
from residual_store.frame import FrameReader, aligned_empty
from residual_store.settings import Settings

__all__ = ["Answer", "read_frame", "read_leaf", "read_nothing", "read_program"]


class Answer(Protocol):
    """What an HTTP library gives: headers, the length of the body if known, and the body as it comes."""

    length: int | None

    @property
    def headers(self) -> Mapping[str, str]: ...

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


def read_nothing(answer: Answer | None) -> None:
    if answer is not None:
        answer.read()
