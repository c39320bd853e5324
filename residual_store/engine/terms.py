"""Terms: what a caller may ask of a local store, checked before anything is done."""

from __future__ import annotations

import threading

from residual_store.errors import InvalidOption, TooLarge
from residual_store.manifest import Manifest
from residual_store.settings import Settings
from residual_store.store import Durability

__all__ = ["check_durability", "check_if_exists", "check_limit", "check_size", "check_ttl", "check_wait"]


def check_durability(wanted: str | None, *, has_durable_tier: bool) -> Durability:
    """The durability that a put will have: the one that is wanted, or the best; raises `InvalidOption`."""
    match wanted:
        case None:
            return "disk" if has_durable_tier else "host"
        case "host":
            return "host"
        case "disk" if has_durable_tier:
            return "disk"
        case "disk":
            raise InvalidOption(
                "this store keeps bundles in memory only, so durability=disk cannot be promised; "
                "ask for durability=host, or give the store a root",
                option="durability",
            )
    raise InvalidOption(f"durability is {wanted!r}; it must be host or disk", option="durability")


def check_size(key: str, manifest: Manifest, settings: Settings) -> None:
    """Raise `TooLarge` for a bundle above the limit."""
    if manifest.nbytes > settings.max_bundle_bytes:
        raise TooLarge(
            f"{key!r} has {manifest.nbytes} bytes; the limit max_bundle_bytes is {settings.max_bundle_bytes}"
        )


def check_ttl(ttl: float | None, settings: Settings) -> None:
    """Raise `InvalidOption` for a lease that is not positive or too long."""
    if ttl is not None and not (isinstance(ttl, int | float) and 0 < ttl <= settings.max_ttl_seconds):
        raise InvalidOption(
            f"ttl is {ttl!r}; a lease has more than 0 and at most {settings.max_ttl_seconds:.0f} seconds",
            option="ttl",
        )


def check_wait(wait: float) -> float:
    """The wait itself in seconds; raises `InvalidOption` for one that is negative or not a number."""
    if not (isinstance(wait, int | float) and 0 <= wait <= threading.TIMEOUT_MAX):
        raise InvalidOption(f"wait is {wait!r}; it must be a number of seconds, 0 or more", option="wait")
    return wait


def check_if_exists(if_exists: str) -> None:
    """Raise `InvalidOption` for anything but error, same and replace."""
    if if_exists not in ("error", "same", "replace"):
        raise InvalidOption(
            f"if_exists is {if_exists!r}; it must be error, same or replace", option="if_exists"
        )


def check_limit(limit: int, settings: Settings) -> None:
    """Raise `InvalidOption` for a page that is empty or too long."""
    if not 1 <= limit <= settings.page_entries:
        raise InvalidOption(
            f"limit is {limit}; a page has 1 to {settings.page_entries} entries", option="limit"
        )
