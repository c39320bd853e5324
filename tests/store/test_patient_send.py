"""Patient sending: the kernel waits, within a limit."""

from __future__ import annotations

import socket

import pytest

from residual_store.patient_send import waiting_in_kernel


@pytest.mark.parametrize("seconds", [1e-9, 0.0499999999, 0.05])
def test_a_peer_that_takes_nothing_ends_in_a_timeout(seconds: float) -> None:
    """Whatever fraction of a second is waited for; the timeout of the socket is what it was."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.settimeout(3)
        with pytest.raises(TimeoutError), waiting_in_kernel(sender, seconds) as send:
            send(memoryview(bytes(64 << 20)))
        assert sender.gettimeout() == 3


def test_a_fraction_that_is_almost_a_second_is_one() -> None:
    """The kernel takes at most 999,999 microseconds beside the whole seconds."""
    sender, receiver = socket.socketpair()
    with sender, receiver, waiting_in_kernel(sender, 0.9999999) as send:
        send(memoryview(b"x"))
        assert receiver.recv(1) == b"x"
