"""The app under a stock uvicorn, as somebody serves it who builds it with `create_app` alone."""

from __future__ import annotations

import socket
import sys

import uvicorn

from residual_server.app import create_app
from residual_store.engine.local import LocalStore
from residual_store.settings import Settings


def main(root: str) -> None:
    """Serve a store at the URL ``root`` until a signal."""
    with (
        LocalStore.at(root, settings=Settings.from_environment()) as store,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        print(f"stock uvicorn listens on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(create_app(store), loop="asyncio", http="httptools", log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
