"""The thinnest real path: a bundle goes to a server in another process and comes back."""

from __future__ import annotations

import numpy as np

from residual_store import Bundle, open_store
from tests.servers import Server


def test_a_bundle_comes_back_from_a_server(disk_server: Server) -> None:
    """What was put over HTTP is got back with equal bytes."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with open_store(disk_server.url) as store:
        store.put("spine/one", Bundle.of_arrays({"h": values}))
        assert np.array_equal(store.get("spine/one").array(0), values)
