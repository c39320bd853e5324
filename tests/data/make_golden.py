"""Makes the golden files of format version 1: ``python -m tests.data.make_golden``.

They are made once for a format version and never again: a release that cannot read them has broken its promise.
``*.frame`` are frames, and ``root/`` is a durable root with the bundles of the frames below ``golden/``.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from residual_store import Bundle, Manifest, Settings, open_store
from residual_store.bundle import digest_of
from residual_store.dtypes import DTYPES, FLOAT0, name_of
from residual_store.frame import frame_head, frame_parts
from residual_store.leaf import Aval, Channel, Leaf, MeshSharding
from residual_store.manifest import Argument

__all__ = ["FINGERPRINT", "FOLDER", "PROGRAM", "SETTINGS", "frame", "golden_bundles"]

FOLDER = Path(__file__).parent
SETTINGS = Settings(packed_leaf_bytes=1024, chunk_bytes=4096)
FINGERPRINT = "0123456789abcdef" * 4
PROGRAM = bytes(range(256)) * 3


def _bytes(count: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes that look random and are the same with every release of numpy."""
    steps = np.arange(count, dtype=np.uint64) * np.uint64(6364136223846793005) + np.uint64(
        seed * 1442695041 + 1
    )
    return (steps >> np.uint64(33)).astype(np.uint8)


def _values(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[Any]:
    dtype, count = DTYPES[name], int(np.prod(shape))
    raw = _bytes(count * dtype.itemsize, seed)
    if name == FLOAT0:
        return np.zeros(shape, dtype)
    if name == "bool":
        return (raw & 1).astype(np.bool_).reshape(shape)
    if (
        name.startswith(("int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_", "float6_"))
        and dtype.itemsize == 1
    ):
        bits = int("".join(filter(str.isdigit, name.partition("_")[0])))
        small = (raw & ((1 << bits) - 1)).astype(np.int8)
        return (
            small.view(dtype) if name.startswith("float") else _signed(small, bits, name).astype(dtype)
        ).reshape(shape)
    return raw.view(dtype).reshape(shape)


def _signed(small: npt.NDArray[np.int8], bits: int, name: str) -> npt.NDArray[np.int8]:
    return small - np.int8(1 << (bits - 1)) if name.startswith("int") else small


def _bundle(arrays: dict[str, npt.NDArray[Any]], channels: list[Channel], **fields: Any) -> Bundle:
    leaves = tuple(
        Leaf(
            index=index,
            channel=channels[index % len(channels)],
            path=path,
            dtype=name_of(host.dtype),
            shape=host.shape,
        )
        for index, (path, host) in enumerate(arrays.items())
    )
    manifest = Manifest(leaves=leaves, created=1_700_000_000.25, **fields)
    identities = [id(array) for array in arrays.values()]
    return Bundle.encoded(manifest, list(arrays.values()), identities=identities).sealed()


def _every_field() -> Bundle:
    """A manifest in which no field has its default, with leaves of every encoding."""
    h = _values("float32", (40, 33), 1)
    arrays = {
        "args[0]['w']": h,
        "opaque[0]": _values("uint32", (3, 2), 2),
        "structured['a'][0]": h,
        "structured['a'][1]": h.copy().view(np.int32),
        "mask": np.arange(1003) % 3 == 0,
        "constant": np.full((9, 4), -0.0),
        "scalar": np.array(7, np.int64),
        "nothing": np.zeros((0, 3), np.float16),
        "odd \N{SNOWMAN} name/../\\x00": _values("bfloat16", (5,), 3),
    }
    bundle = _bundle(arrays, ["args_res", "opaque_residuals", "structured_residuals"])
    mesh = MeshSharding(
        axis_names=("x", "y"), axis_sizes=(2, 4), axis_types=("Auto", "Explicit"), spec=(("x", "y"), ())
    )
    changes: dict[int, dict[str, Any]] = {
        0: {"committed": True, "memory_kind": "pinned_host", "sharding": mesh},
        1: {"kind": "key", "key_impl": "threefry2x32"},
        6: {"weak_type": True},
    }
    leaves = tuple(leaf.changed(**changes.get(leaf.index, {})) for leaf in bundle.manifest.leaves)
    manifest = replace(
        bundle.manifest,
        leaves=leaves,
        fingerprint=FINGERPRINT,
        program=digest_of(PROGRAM),
        no_program="host callback",
        versions={"jax": "0.12.0", "residual-store": "0.1.0"},
        x64=True,
        function="layer (model.py:12)",
        arguments=(
            Argument(path="args[0]['w']", state="saved", aval=Aval(dtype="float32", shape=(40, 33))),
            Argument(path="args[1]", state="not_saveable", needed=False, digest=bytes(range(16))),
            Argument(
                path="args[2]", state="not_needed", aval=Aval(dtype="key<fry>", shape=(), weak_type=True)
            ),
        ),
        cotangents=(Aval(dtype="float32", shape=(40,)), Aval(dtype="float0", shape=())),
        in_tree=(
            ["tuple", 3],
            ["dict", [["text", "w"]]],
            ["leaf"],
            ["OrderedDict", [["tuple", [["int", 3], ["bool", True]]]]],
            ["leaf"],
            ["list", 2],
            ["none"],
            ["leaf"],
        ),
        out_tree=(["custom", 2, "module.Pair", "a, b", "static"], ["leaf"], ["leaf"]),
        user={"step": 12, "loss": 0.5, "last": False, "label": "golden"},
    )
    return Bundle(manifest=manifest, payloads=bundle.payloads)


def _tiled() -> Bundle:
    """Leaves that are their first shard again and again: a small one, a large one, and the large one once more."""
    small = np.concatenate([_values("bfloat16", (3, 5), 4)] * 4)
    large = np.concatenate([_values("uint4", (20, 70), 5)] * 2)
    arrays = {"small": small, "large": large, "again": large}
    leaves = tuple(
        Leaf(
            index=index,
            channel="opaque_residuals",
            path=path,
            dtype=name_of(host.dtype),
            shape=host.shape,
            sharding=MeshSharding(
                axis_names=("x", "y"), axis_sizes=(2, 2), axis_types=("Auto", "Auto"), spec=(spec, ())
            ),
        )
        for index, ((path, host), spec) in enumerate(
            zip(arrays.items(), [("x", "y"), ("y",), ("y",)], strict=True)
        )
    )
    manifest = Manifest(leaves=leaves, created=1_700_000_000.25)
    hosts = list(arrays.values())
    return Bundle.encoded(manifest, hosts, identities=list(map(id, hosts))).sealed()


def golden_bundles() -> dict[str, Bundle]:
    """The bundles of the golden files by name."""
    dtypes = {name: _values(name, (7, 5), seed) for seed, name in enumerate(DTYPES)}
    return {
        "empty": _bundle({}, ["args_res"]),
        "every-dtype": _bundle(dtypes, ["opaque_residuals"]),
        "every-field": _every_field(),
        "tiled": _tiled(),
    }


def frame(bundle: Bundle) -> bytes:
    """The frame of a bundle as one string of bytes."""
    return b"".join(frame_parts(frame_head(bundle.manifest), bundle))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with open_store(Path(folder).as_uri(), settings=SETTINGS) as store:
            for name, bundle in golden_bundles().items():
                (FOLDER / f"{name}.frame").write_bytes(frame(bundle))
                store.put(f"golden/{name}", bundle)
            store.put_program(FINGERPRINT, PROGRAM)
        shutil.rmtree(FOLDER / "root", ignore_errors=True)
        for part in ("bundles", "programs"):
            shutil.copytree(Path(folder) / part, FOLDER / "root" / part)


if __name__ == "__main__":
    main()
