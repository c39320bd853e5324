"""The values of a database: read straight out of files they are the same as through tensorstore."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from residual_store.engine.values import FileValues, StoreValues, Values

CHANCE = random.Random(5)
STORED = {
    f"leaves/{number}/c/{part}": CHANCE.randbytes(length)
    for number in range(30)
    for part, length in enumerate((1, 60, 3000))
} | {"big": CHANCE.randbytes((5 << 20) + 7), "record": b""}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database whose tree is several nodes deep, with values in its nodes and in several files."""
    root = tmp_path_factory.mktemp("database")
    spec = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{root}/"},
        "config": {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 100},
        "target_data_file_size": 50_000,
    }
    database, transaction = ts.KvStore.open(spec).result(), ts.Transaction(atomic=True)
    for key, value in STORED.items():
        database.with_transaction(transaction).write(key, value).result()
    transaction.commit_async().result()
    manifest = ts.ocdbt.dump(database.base).result()
    assert manifest["versions"][-1]["root_height"] >= 2
    assert len(list((root / "d").iterdir())) >= 2
    return root


@pytest.fixture(params=["file", "store"])
def values(root: Path, request: pytest.FixtureRequest) -> Iterator[Values]:
    """Its values, read in both ways."""
    context = ts.Context()
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
    found: Values = (
        FileValues(root, context=context) if request.param == "file" else StoreValues(spec, context=context)
    )
    yield found
    found.close()


def test_each_value_is_found(values: Values) -> None:
    """All values come whole, their first bytes do, and they are shown in order; what is not there is None."""
    for key, value in STORED.items():
        assert values.get(key) == value
        for length in {len(value), len(value) // 2}:
            memory, seen = np.zeros(length, np.uint8), bytearray()
            values.begin(key, memory, nbytes=len(value))(lambda part, seen=seen: seen.extend(part.tobytes()))
            assert memory.tobytes() == seen == value[:length]
    assert values.get("leaves/0/c/") is None


def test_a_value_of_another_length_is_an_error(values: Values) -> None:
    """Nothing is taken for a value that has another length than it must have, or that is not there."""
    memory = np.zeros(3, np.uint8)
    for key in ("leaves/3/c/1", "leaves/3/c/2", "big", "absent"):
        with pytest.raises(ValueError, match="bytes"):
            values.begin(key, memory, nbytes=59)(len)


def test_a_file_that_ends_early_is_an_error(root: Path, tmp_path: Path) -> None:
    """A value whose file is shorter, or gone, is not filled up with anything."""
    for name in ("manifest.ocdbt", *(str(path.relative_to(root)) for path in root.glob("d/*"))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((root / name).read_bytes())
    with FileValues(tmp_path, context=ts.Context()) as values:
        for path in (tmp_path / "d").iterdir():
            path.write_bytes(path.read_bytes()[:2000])
        memory = np.zeros(len(STORED["big"]), np.uint8)
        with pytest.raises(ValueError, match="ends before"):
            values.begin("big", memory, nbytes=len(memory))(len)
    with FileValues(tmp_path / "nowhere", context=ts.Context()) as values:
        assert values.get("big") is None
