"""A bundle: its digests are those of the bytes that are stored, whenever they are taken."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from residual_store import Bundle, open_store
from residual_store.bundle import digest_of
from residual_store.copier import Copier
from residual_store.errors import InvalidFrame
from residual_store.frame import frame_head, frame_parts
from tests.store.strategies import bundles

# Around the lengths at which a leaf is digested at once, joined with its neighbours, or copied in blocks.
_LENGTHS = [0, 1, 63, 64, 65, 4096, 4097, 65_535, 65_536, 262_144, 262_145, 1_000_003]


def _noise(*lengths: int) -> dict[str, npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return {f"leaf {i}": np.frombuffer(rng.bytes(n), np.uint8).copy() for i, n in enumerate(lengths)}


def _segment(bundle: Bundle) -> npt.NDArray[np.uint8]:
    """Memory that another bundle has been in."""
    return np.full(bundle.manifest.nbytes, 0xEE, np.uint8)


def _frame(bundle: Bundle) -> bytes:
    return b"".join(frame_parts(frame_head(bundle.manifest), bundle))


def test_large_leaves_are_sealed_when_their_bytes_are_taken() -> None:
    """A new bundle lacks the digests of large leaves; sealed in place or on the way it has those of its payloads."""
    bundle = Bundle.of_arrays(_noise(*_LENGTHS))
    assert not bundle.is_sealed
    for sealed in (bundle.sealed(), bundle.copied_into(_segment(bundle), copier=Copier())):
        assert sealed.is_sealed
        assert [leaf.digest for leaf in sealed.manifest.leaves] == list(map(digest_of, bundle.payloads))
    assert bundle.sealed().manifest == bundle.copied_into(_segment(bundle), copier=Copier()).manifest
    assert not bundle.sealed().owned
    assert bundle.copied_into(_segment(bundle), copier=Copier()).owned


def test_an_alias_of_a_large_leaf_has_its_digest() -> None:
    """One array twice, or its bytes in another dtype, are sealed with the digest of the leaf that has the bytes."""
    h = np.arange(100_000.0)
    bundle = Bundle.of_arrays({"h": h, "same": h, "other": h.copy().view(np.int64)})
    for sealed in (bundle.sealed(), bundle.copied_into(_segment(bundle), copier=Copier())):
        assert {leaf.digest for leaf in sealed.manifest.leaves} == {digest_of(bundle.payloads[0])}


@settings(deadline=None, max_examples=100)
@given(bundles())
def test_a_copy_makes_the_same_frame(bundle: Bundle) -> None:
    """A frame of small leaves joined is that of one run of memory, and gaps of old memory are filled with zeros."""
    assert _frame(bundle.copied_into(_segment(bundle), copier=Copier())) == _frame(bundle)


def test_a_copy_of_large_leaves_makes_the_same_frame() -> None:
    """Also where leaves are sent from where they lie, between runs of small ones."""
    bundle = Bundle.of_arrays(_noise(*_LENGTHS, *reversed(_LENGTHS), *[9000] * 70)).sealed()
    frame = _frame(bundle)
    assert _frame(bundle.copied_into(_segment(bundle), copier=Copier())) == frame
    assert frame.endswith(bytes(bundle.payloads[-1]))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_byte_that_changed_after_its_digest_is_refused(data: st.DataObject) -> None:
    """A sealed bundle whose array was changed since is refused, by the name of the leaf, wherever the byte is."""
    arrays = _noise(*_LENGTHS)
    bundle = Bundle.of_arrays(arrays).sealed()
    name = data.draw(st.sampled_from([name for name, array in arrays.items() if array.size]))
    arrays[name][data.draw(st.integers(0, arrays[name].size - 1))] ^= data.draw(st.integers(1, 255))
    for take in (
        lambda: bundle.copied_into(_segment(bundle), copier=Copier()),
        lambda: bundle.sealed(check=True),
    ):
        with pytest.raises(InvalidFrame, match="do not match its digest") as caught:
            take()
        assert caught.value.fields["leaf"] == name


def test_what_is_not_sealed_is_taken_as_it_is_at_the_put() -> None:
    """A large array that changes between the making of its bundle and the put is stored as it is at the put."""
    h = np.arange(100_000.0)
    bundle = Bundle.of_arrays({"h": h})
    h[5] = 77
    with open_store("memory://") as store:
        store.put("run/a", bundle)
        h[5] = 0
        got = store.get("run/a")
        assert got.array(0)[5] == 77
        assert got.manifest.leaves[0].digest == digest_of(got.payloads[0])


@pytest.mark.parametrize("payload", [np.zeros(1, np.uint8), np.zeros(7, np.uint8)])
def test_a_payload_of_another_length_is_refused(payload: npt.NDArray[np.uint8]) -> None:
    """Also one of a single byte, which numpy would spread over the leaf."""
    whole = Bundle.of_arrays({"h": np.arange(5000.0)})
    bundle = Bundle(manifest=whole.manifest, payloads=(payload,))
    for take in (lambda: bundle.copied_into(_segment(whole), copier=Copier()), bundle.sealed):
        with pytest.raises(InvalidFrame, match="leaf 0"):
            take()
