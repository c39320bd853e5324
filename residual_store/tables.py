"""Tables for people: bundles, and the leaves and arguments of one bundle."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from rich import box
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
    return f"{datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _whole(name: str) -> Column:
    return Column(name, no_wrap=True)


def _folded(name: str) -> Column:
    return Column(name, overflow="fold", min_width=16)


def bundle_table(stats: Iterable[Stat]) -> Table:
    """One row for each bundle; times are in UTC."""
    table = Table(
        _folded("key"),
        *map(_whole, ("tier", "leaves", "bytes")),
        *(Column(name, overflow="fold") for name in ("arrived", "expires")),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for stat in stats:
        table.add_row(
            escape(stat.key),
            stat.tier,
            str(stat.leaves),
            in_units(stat.nbytes),
            _moment(stat.arrived),
            _moment(stat.expires_at),
        )
    return table


def summary(stat: Stat, manifest: Manifest) -> str:
    """A few lines about a bundle as a whole."""
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    program = manifest.no_program or (
        f"stored, for {', '.join(manifest.platforms)}" if manifest.program else "none"
    )
    lines = [
        f"{stat.key}: {manifest.function or 'named arrays'}",
        f"{stat.leaves} leaves, {in_units(stat.array_nbytes)} as arrays, {in_units(stat.nbytes)} stored",
        f"{stat.tier} tier, durability {stat.durability}",
        f"arrived {_moment(stat.arrived)}, expires {_moment(stat.expires_at)} (UTC)",
        f"fingerprint {manifest.fingerprint or '-'}, backward program: {program}",
        f"made with {versions or 'unknown versions'}, x64 {'on' if manifest.x64 else 'off'}",
    ]
    if manifest.cotangents:
        lines.append(f"takes cotangents {', '.join(map(str, manifest.cotangents))}")
    if manifest.user:
        lines.append(f"labels {', '.join(f'{name}={value!r}' for name, value in manifest.user.items())}")
    return escape("\n".join(lines))


def leaf_table(manifest: Manifest) -> Table:
    """One row for each leaf, and one for each argument that is not among them."""
    table = Table(
        _whole("leaf"),
        Column("channel", overflow="fold", min_width=8),
        _folded("path"),
        *map(_whole, ("shape", "dtype", "bytes")),
        Column("note", overflow="fold", min_width=8),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for leaf in manifest.leaves:
        note = {
            "raw": "",
            "alias": f"repeats {leaf.alias_of}",
            "tiled": f"{leaf.tiles} equal shards",
        }.get(leaf.encoding, leaf.encoding)
        dtype = leaf.dtype if leaf.key_impl is None else f"{leaf.key_impl} keys"
        shape, size = str(list(leaf.shape)), in_units(leaf.nbytes)
        table.add_row(*map(escape, [str(leaf.index), leaf.channel, leaf.path, shape, dtype, size, note]))
    for argument in manifest.arguments:
        if argument.state != "saved":
            note = "must be restored" if argument.must_be_restored else "not needed"
            aval = argument.aval
            shape, dtype = (str(list(aval.shape)), aval.dtype) if aval is not None else ("", "")
            table.add_row(*map(escape, ["-", "args_res", argument.path, shape, dtype, "-", note]))
    return table
