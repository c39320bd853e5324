"""Tokens: who may read, write or administer which runs.

Only SHA-256 hashes of tokens are kept, compared in constant time; a token never reaches a log or an error.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from residual_store.errors import Forbidden, InvalidOption, Unauthorized

__all__ = ["ANYONE", "Access", "Grant", "Tokens", "check_access"]

type Access = Literal["read", "write", "admin"]

_RANK: dict[str, int] = {"read": 0, "write": 1, "admin": 2}


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What one token allows: an access, and the runs that it reaches ("*" is all of them).

    "write" includes "read", and "admin" also reads the metrics, which tell of all runs.
    """

    name: str
    sha256: str
    runs: tuple[str, ...]
    access: Access

    def reaches(self, run: str | None) -> bool:
        """Whether the grant covers a run; None stands for all runs together."""
        return "*" in self.runs or (run is not None and run in self.runs)


ANYONE = Grant(name="anyone", sha256="", runs=("*",), access="admin")
"""The grant of every caller where no tokens are configured."""


class Tokens:
    """The grants of a server.

    >>> digest = hashlib.sha256(b"secret").hexdigest()
    >>> tokens = Tokens([Grant(name="trainer", sha256=digest, runs=("exp1",), access="write")])
    >>> tokens.grant("Bearer secret").name
    'trainer'
    """

    def __init__(self, grants: Sequence[Grant]) -> None:
        self._grants = tuple(grants)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """The tokens of a TOML file with one ``[[token]]`` table each; raises `InvalidOption`."""
        try:
            tables = tomllib.loads(path.read_text())["token"]
            return cls([_grant(table) for table in tables])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InvalidOption(
                f"the token file {path} cannot be used: {type(error).__name__}: {error}; "
                "it needs [[token]] tables with name, sha256, runs and access"
            ) from error

    def grant(self, authorization: str | None) -> Grant:
        """The grant of an ``Authorization`` header; raises `Unauthorized`."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized(
                "this server needs a token: pass token= to connect, set RESIDUAL_STORE_TOKEN, or send "
                "'Authorization: Bearer <token>'"
            )
        digest = hashlib.sha256(token.strip().encode()).hexdigest()
        found = None
        for grant in self._grants:
            if hmac.compare_digest(grant.sha256, digest):
                found = grant
        if found is None:
            raise Unauthorized("the token is not known to this server")
        return found


def check_access(grant: Grant, access: Access, *runs: str | None) -> None:
    """Raise `Forbidden` unless the grant allows this access, to each of these runs (None: all runs together)."""
    if _RANK[grant.access] < _RANK[access]:
        raise Forbidden(f"the token {grant.name!r} allows {grant.access}; this needs {access}")
    for run in runs:
        if not grant.reaches(run):
            where = (
                "all runs together; end the prefix with the run and a slash"
                if run is None
                else f"the run {run!r}"
            )
            raise Forbidden(f"the token {grant.name!r} does not reach {where}")


def _grant(table: dict[str, object]) -> Grant:
    access, runs, sha256 = table["access"], table["runs"], str(table["sha256"])
    if access not in _RANK:
        raise ValueError(f"access is {access!r}; it must be read, write or admin")
    if not isinstance(runs, list) or not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ValueError("runs must be a list, and sha256 64 hexadecimal digits")
    return Grant(name=str(table["name"]), sha256=sha256.lower(), runs=tuple(map(str, runs)), access=access)  # type: ignore[arg-type]
