"""The Flight server, a process of its own: it knows pyarrow only, runs as a script, and prints its port."""

from __future__ import annotations

from typing import Any


def recycle_memory() -> None:
    """Let Arrow allocate from jemalloc where it has it, which keeps freed pages; that is faster than its default."""
    import pyarrow as arrow

    if "jemalloc" in arrow.supported_memory_backends():
        arrow.set_memory_pool(arrow.jemalloc_memory_pool())


def main() -> None:
    """Keep tables in memory by name until the process is killed."""
    from pyarrow import flight

    class Tables(flight.FlightServerBase):
        def __init__(self) -> None:
            super().__init__("grpc+tcp://127.0.0.1:0")
            self._tables: dict[bytes, Any] = {}

        def do_put(self, _: Any, descriptor: Any, reader: Any, __: Any) -> None:
            self._tables[descriptor.path[0]] = reader.read_all()

        def do_get(self, _: Any, ticket: Any) -> Any:
            return flight.RecordBatchStream(self._tables[ticket.ticket])

        def do_action(self, _: Any, action: Any) -> list[Any]:
            del self._tables[action.body.to_pybytes()]
            return []

    recycle_memory()
    server = Tables()
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
