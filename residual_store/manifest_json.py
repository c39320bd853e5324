"""The manifest as JSON, for people and for clients without msgpack: the same fields, bytes in hexadecimal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from residual_store.manifest import Manifest

__all__ = ["as_json"]


def as_json(manifest: Manifest) -> dict[str, Any]:
    """What ``json.dumps`` takes.

    >>> as_json(Manifest())["format"]
    1
    """
    content: dict[str, Any] = _plain(asdict(manifest))
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.structs.asdict(value))
    return value.hex() if isinstance(value, bytes) else value
