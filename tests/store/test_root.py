"""The root: where it is, and what below it is not a part of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from residual_store import Settings, open_store
from residual_store.engine.local import LocalStore
from residual_store.engine.writers import Writers
from residual_store.errors import InvalidOption, ResidualStoreError
from tests.store.bundles import assert_equal, noise


@pytest.mark.parametrize("form", ["url", "url with a slash", "spec"])
def test_a_root_has_several_spellings(tmp_path: Path, form: str) -> None:
    """A URL with or without a slash and a JSON spec name the same root."""
    bundle = noise(100)
    with open_store((tmp_path / "deep" / "root").as_uri()) as store:
        store.put("run/a", bundle)
    path = f"{tmp_path}/deep/root"
    spelling = {
        "url": f"file://{path}",
        "url with a slash": f"file://{path}/",
        "spec": json.dumps({"driver": "file", "path": path}),
    }
    with LocalStore.at(spelling[form], settings=Settings()) as store:
        assert_equal(store.get("run/a"), bundle)


def test_a_root_may_have_any_name(tmp_path: Path) -> None:
    """Spaces, percent signs and letters of any script in the path of the root are no obstacle."""
    for name in ("with space", "per%20cent", "sn\N{SNOWMAN}w", "a+b=c,d", "#hash", "what?"):
        with open_store((tmp_path / name).as_uri()) as store:
            store.put("run/a", noise(10))
        assert (tmp_path / name / "bundles" / "run" / "a").is_dir()


@pytest.mark.parametrize(
    "url", ["file://relative/path", "nothing://x", "{", "{}", '{"driver": "nothing"}', '{"driver": 7}']
)
def test_what_is_no_root_is_refused(url: str) -> None:
    """As InvalidOption, with the URL."""
    with pytest.raises(InvalidOption) as caught:
        LocalStore.at(url, settings=Settings())
    assert url in str(caught.value)


def test_a_root_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A file in the way of the directory is an error of this project, and the file stays."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ResidualStoreError):
        open_store((tmp_path / "file").as_uri())
    with pytest.raises(ResidualStoreError):
        open_store((tmp_path / "file" / "root").as_uri())
    assert (tmp_path / "file").read_text() == "precious"


def test_other_files_below_a_root_are_left_alone(tmp_path: Path) -> None:
    """What somebody else put below the root is neither listed nor deleted, at the start or with a run."""
    with open_store(tmp_path.as_uri()) as store:
        store.put("run/a", noise(10))
    strangers = [
        "notes.txt",
        "bundles/notes.txt",
        "bundles/run/notes.txt",
        "bundles/run/a/notes.txt",
        "bundles/x y/@1/z",
    ]
    for name in strangers:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    with open_store(tmp_path.as_uri()) as store:
        assert [entry.key for entry in store.list().entries] == ["run/a"]
        assert store.delete_prefix("run/") == 1
        assert store.list().entries == ()
    assert [(tmp_path / name).read_text() for name in strangers] == ["precious"] * len(strangers)


def test_a_link_below_the_root_leads_nowhere(tmp_path: Path) -> None:
    """A bundle cannot be put through a symbolic link that leaves the root."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "bundles").mkdir(parents=True)
    (tmp_path / "root" / "bundles" / "link").symlink_to(tmp_path / "outside")
    with (
        open_store((tmp_path / "root").as_uri()) as store,
        pytest.raises(InvalidOption, match="symbolic link"),
    ):
        store.put("link/a", noise(10))
    assert list((tmp_path / "outside").iterdir()) == []


def test_writers_come_and_go(tmp_path: Path) -> None:
    """Each open store has a lock of its own, and a closed one leaves none."""
    writers = tmp_path / "writers"
    first, second = Writers(tmp_path), Writers(tmp_path)
    assert {path.name for path in writers.iterdir()} == {"door", first.own, second.own}
    assert first.is_alive(second.own)
    assert second.is_alive(first.own)
    assert not first.is_alive("0" * 12)
    first.close()
    second.close()
    second.close()
    assert [path.name for path in writers.iterdir()] == ["door"]
