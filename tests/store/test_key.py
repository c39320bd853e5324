"""Keys and prefixes: a small alphabet, so that nothing is ever escaped on disk or in a URL."""

from __future__ import annotations

import urllib.parse

import pytest
from hypothesis import given, strategies as st

from residual_store import Settings
from residual_store.errors import InvalidKey
from residual_store.key import check_key, check_prefix, run_of

_SETTINGS = Settings()
_segments = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.,=+:-]{0,20}\Z").filter(
    lambda text: text not in {"leaves", "manifest", "prefetch", "touch"}
)
_keys = st.lists(_segments, min_size=2, max_size=6).map("/".join)


def _is_key(text: str) -> bool:
    try:
        check_key(text, _SETTINGS)
    except InvalidKey:
        return False
    return True


@given(_keys)
def test_a_key_is_the_same_in_a_url_and_as_a_path(key: str) -> None:
    """No character of a key is changed by a URL or means anything to a file system, and each of its prefixes is one."""
    assert check_key(key, _SETTINGS) == key
    assert urllib.parse.urlsplit(f"http://host/{key}").path == f"/{key}"
    assert not {"", ".", ".."} & set(key.split("/"))
    assert run_of(key) == key.split("/")[0]
    for end in range(len(key) + 1):
        assert check_prefix(key[:end], _SETTINGS) == key[:end]


@given(st.text(max_size=30))
def test_any_text_is_a_key_or_is_refused(text: str) -> None:
    """What passes has the form that the error describes; nothing else than InvalidKey is raised."""
    if _is_key(text):
        assert text.isascii()
        assert text.count("/") >= 1
        assert all(part and part[0] not in ".-@" for part in text.split("/"))


@pytest.mark.parametrize("length", [128, 129])
def test_a_segment_has_128_characters(length: int) -> None:
    """128 pass and 129 do not."""
    assert _is_key("run/" + "a" * length) == (length == 128)


def test_a_key_has_a_longest_length() -> None:
    """max_key_chars holds for keys and prefixes, and the error says how long the key was without repeating it."""
    long = "/".join(["a" * 100] * 6)
    with pytest.raises(InvalidKey) as caught:
        check_key(long, _SETTINGS)
    assert "605 characters" in str(caught.value)
    assert "aaaa" not in str(caught.value)
    assert check_key(long, Settings(max_key_chars=605)) == long


@pytest.mark.parametrize("word", ["leaves", "manifest", "prefetch", "touch"])
def test_words_of_routes_are_no_names(word: str) -> None:
    """No key can be taken for a route below another key; as a run, or as a part of a name, the word is free."""
    assert not _is_key(f"run/{word}")
    assert not _is_key(f"run/{word}/0")
    assert _is_key(f"{word}/a")
    assert _is_key(f"run/{word}s")


def test_a_refused_key_is_shown_harmlessly() -> None:
    """Control characters and line ends of a key never reach a terminal or a log as they are."""
    with pytest.raises(InvalidKey) as caught:
        check_key("run/\x1b[31m\nevil\udc80", _SETTINGS)
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()
