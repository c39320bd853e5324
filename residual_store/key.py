"""Keys: the names of bundles, ``run/anything/else``.

A key becomes a path below the root and a part of a URL, so the alphabet is small and nothing is ever escaped.
Names of leaves, such as the keys of a user's dictionary, never become keys.
"""

from __future__ import annotations

import re

from residual_store.errors import InvalidKey, InvalidOption
from residual_store.settings import Settings

__all__ = ["check_deleted", "check_fingerprint", "check_key", "check_prefix", "check_run", "run_of"]

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+:-]{0,127}")
_RESERVED = frozenset({"leaves", "manifest", "prefetch", "touch"})
_FORM = (
    "a key is 'run/name' or deeper: 2 or more segments of 1 to 128 characters out of A-Z a-z 0-9 _ . , = + : -, "
    "each starting with a letter, a digit or _"
)


def check_key(key: str, settings: Settings) -> str:
    """The key itself if it is well-formed, else `InvalidKey` with the rule that it breaks.

    >>> check_key("exp1/step-12/layer-3", Settings())
    'exp1/step-12/layer-3'
    """
    segments = check_prefix(key, settings).split("/")
    if len(segments) < 2 or not segments[-1]:
        fault = "ends with a slash" if len(segments) > 2 else "has no name after its run"
        raise InvalidKey(f"the key {_shown(key)} {fault}; {_FORM}")
    if any(part.endswith(".__lock") for part in segments):
        raise InvalidKey(
            f"the key {_shown(key)} has a segment that ends in .__lock, as lock files of the store do"
        )
    if reserved := _RESERVED.intersection(segments[1:]):
        raise InvalidKey(
            f"the key {_shown(key)} has the segment {min(reserved)!r}, which names a route of the HTTP interface; "
            f"choose another word than {', '.join(sorted(_RESERVED))}"
        )
    return key


def check_run(run: str, settings: Settings) -> str:
    """The run itself if some key can have it, else `InvalidKey`.

    >>> check_run("exp1", Settings())
    'exp1'
    """
    if not run or "/" in check_prefix(run, settings):
        raise InvalidKey(f"{_shown(run)} is not a run, which is the first segment of a key; {_FORM}")
    return run


def check_prefix(prefix: str, settings: Settings) -> str:
    """The prefix itself if some key can start with it, else `InvalidKey`.

    >>> check_prefix("exp1/step-", Settings())
    'exp1/step-'
    """
    if not isinstance(prefix, str):
        raise InvalidKey(f"a key is a str, and this is a {type(prefix).__name__}")
    if len(prefix) > settings.max_key_chars:
        raise InvalidKey(
            f"a key of {len(prefix)} characters is too long; the limit max_key_chars is {settings.max_key_chars}"
        )
    *whole, last = prefix.split("/")
    if any(not _SEGMENT.fullmatch(part) for part in whole) or (last and not _SEGMENT.fullmatch(last)):
        raise InvalidKey(f"{_shown(prefix)} is not a key; {_FORM}")
    return prefix


def run_of(key: str) -> str:
    """The run of a key: its first segment, the unit of quota, access, deduplication and bulk deletion.

    >>> run_of("exp1/step-12/layer-3")
    'exp1'
    """
    return key.partition("/")[0]


def check_deleted(prefix: str, settings: Settings) -> None:
    """Raise `InvalidOption` for a prefix that all keys have, and `InvalidKey` for one that none has."""
    if not check_prefix(prefix, settings):
        raise InvalidOption(
            "the prefix is empty; name at least the run whose bundles to delete", option="prefix"
        )


def check_fingerprint(fingerprint: str) -> str:
    """The fingerprint of a program itself if it is well-formed, else `InvalidOption`."""
    if not re.fullmatch("[0-9a-f]{64}", fingerprint):
        raise InvalidOption("a fingerprint is 64 lower-case hexadecimal digits", option="fingerprint")
    return fingerprint


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")
