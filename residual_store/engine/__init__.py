"""The engine: host memory and tensorstore behind the `Store` protocol. Used by embedded clients and by the server."""
