"""The benchmark: the store against the limits of the machine and against what a user would pick instead.

Everything is host arrays to host arrays: a put builds a bundle (digests included) and stores it, and a get ends with
every leaf as a host array.
All ways take turns in one run; each round puts, gets, drops what it got and deletes.

The file of ``--json`` holds one object. Rates are in 10^9 bytes per second, times in milliseconds; each is a median,
and ``spread`` is the distance of the quartiles as a share of it:

``workloads``
    ``block``, ``leaf``, ``small`` and ``tiny``, each with ``nbytes``, ``leaves``, ``rounds``, ``left_out``
    (transport -> why it is missing) and

    ``limits``
        Limit -> ``gbps``, ``spread``: ``memcpy``, ``socket_send``, ``socket_receive``, ``write_fsync``,
        ``read_uncached``, ``read_cached``.
    ``transports``
        ``embedded``, ``segment``, ``http``, ``durable`` -> for ``put`` and ``get`` (of ``durable`` also ``get_warm``)
        ``_gbps``, ``_ms``, ``_spread`` and ``_of_limit``, the ratio to the limit of that transport.
    ``peers``
        Peer -> the same without ``_of_limit``.
    ``client``
        Of ``block``: transport -> the same for `Client.offload` (``put``, and ``stored`` until it is acknowledged) and
        `Client.restore` (``get``), with ``offload_of_store`` and ``stored_of_store`` (ratios to the put of the same
        transport), ``offload_of_memcpy`` and ``restore_of_memcpy``.
``left_out``
    What could not be measured with any workload -> why.
``quick``
    Whether it was run with fewer rounds and smaller arrays.
``machine``
    What it ran on.
``seconds``
    How long all took.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["run"]


def run(
    *, json_file: Path | None = None, peers: bool = False, quick: bool = False, url: str | None = None
) -> None:
    """Measure everything, print one table for each workload, and write the figures to ``json_file``.

    Without ``url`` it starts a server in a process of its own.
    Raises `InvalidOption` for a ``url`` that is no server, and whatever the store raises.
    """
    from rich.console import Console

    from residual_client.bench.trial import hold_trial

    figures = hold_trial(peers=peers, quick=quick, url=url, console=Console(highlight=False))
    if json_file is not None:
        json_file.write_text(figures.to_json() + "\n", encoding="utf-8")
