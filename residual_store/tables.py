"""Tables for people: bundles, and the leaves and arguments of one bundle."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from rich.markup import escape
from rich.table import Column, Table

from residual_store.manifest import Manifest
from residual_store.store import Stat

__all__ = ["bundle_table", "in_units", "leaf_table", "summary"]


def in_units(nbytes: float) -> str:
    """A size for people.

    >>> in_units(3 << 20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).isoformat(sep=" ", timespec="seconds")


def _whole(name: str) -> Column:
    return Column(name, no_wrap=True)


def _folded(name: str) -> Column:
    return Column(name, overflow="fold")


def bundle_table(stats: Iterable[Stat]) -> Table:
    """One row for each bundle."""
    table = Table(
        _folded("key"),
        *(_whole(name) for name in ("tier", "durability", "leaves", "bytes", "arrived", "expires")),
    )
    for stat in stats:
        table.add_row(
            escape(stat.key),
            stat.tier,
            stat.durability,
            str(stat.leaves),
            in_units(stat.nbytes),
            _moment(stat.arrived),
            _moment(stat.expires_at),
        )
    return table


def summary(stat: Stat, manifest: Manifest) -> str:
    """A few lines about a bundle as a whole."""
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    program = manifest.no_program or "stored"
    return escape(
        f"{stat.key}: {manifest.function or 'named arrays'}\n"
        f"{stat.leaves} leaves, {in_units(stat.array_nbytes)} as arrays, {in_units(stat.nbytes)} stored, "
        f"{stat.tier} tier, durability {stat.durability}, arrived {_moment(stat.arrived)}, "
        f"expires {_moment(stat.expires_at)}\n"
        f"fingerprint {manifest.fingerprint or '-'}, backward program: {program}\n"
        f"made with {versions or 'unknown versions'}, x64 {'on' if manifest.x64 else 'off'}"
    )


def leaf_table(manifest: Manifest) -> Table:
    """One row for each leaf, and one for each argument that is not among them."""
    names = ("dtype", "shape", "bytes", "encoding", "restore")
    table = Table(_whole("leaf"), _folded("channel"), _folded("path"), *map(_whole, names))
    for leaf in manifest.leaves:
        encoding = leaf.encoding if leaf.alias_of is None else f"alias of {leaf.alias_of}"
        dtype = leaf.dtype if leaf.key_impl is None else f"{leaf.key_impl} keys"
        cells = [
            str(leaf.index),
            leaf.channel,
            leaf.path,
            dtype,
            str(list(leaf.shape)),
            in_units(leaf.nbytes),
            encoding,
        ]
        table.add_row(*map(escape, cells))
    for argument in manifest.arguments:
        if argument.state != "saved":
            aval = argument.aval
            must = "must be restored" if argument.must_be_restored else "not needed"
            dtype, shape = (aval.dtype, str(list(aval.shape))) if aval is not None else ("", "")
            table.add_row(
                *map(escape, ["-", "args_res", argument.path, dtype, shape, "-", argument.state, must])
            )
    return table
