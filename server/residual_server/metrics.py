"""Metrics in the Prometheus text format: requests and bytes as counters, what is held as gauges."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from residual_server import direct_answer, direct_body
from residual_store.store import Store

__all__ = ["Metered", "Metrics"]


class Metrics:
    """The counters of one app and the gauges of its store."""

    def __init__(self, store: Store) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Held(store))
        self.requests = Counter(
            "residual_store_requests",
            "Requests by method and status.",
            ["method", "status"],
            registry=self._registry,
        )
        self.received = Counter(
            "residual_store_received_bytes", "Body bytes received.", registry=self._registry
        )
        self.sent = Counter("residual_store_sent_bytes", "Body bytes sent.", registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Held(Collector):
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        usage = self._store.usage()
        bundles = GaugeMetricFamily("residual_store_bundles", "Bundles by tier.", labels=["tier"])
        nbytes = GaugeMetricFamily(
            "residual_store_bundle_bytes", "Bytes of bundles by tier.", labels=["tier"]
        )
        for tier in ("host", "durable"):
            bundles.add_metric([tier], sum(run.bundles for run in usage.runs if run.tier == tier))
            nbytes.add_metric([tier], sum(run.nbytes for run in usage.runs if run.tier == tier))
        yield from (bundles, nbytes)
        yield GaugeMetricFamily(
            "residual_store_host_held_bytes", "Host memory in use.", value=usage.host_held_bytes
        )
        yield GaugeMetricFamily(
            "residual_store_host_total_bytes", "Host memory budget.", value=usage.host_total_bytes
        )
        yield GaugeMetricFamily(
            "residual_store_host_program_bytes", "Memory of programs.", value=usage.host_program_bytes
        )
        yield GaugeMetricFamily(
            "residual_store_expired_bundles", "Bundles whose lease ended.", value=usage.expired
        )
        yield GaugeMetricFamily(
            "residual_store_spilled_bundles", "Bundles moved to the disk.", value=usage.spilled
        )


class Metered:
    """ASGI middleware that counts requests and body bytes."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted_receive() -> Message:
            message = await receive()
            self._metrics.received.inc(len(message.get("body", b"")))
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(scope["method"], str(message["status"])).inc()
            self._metrics.sent.inc(len(message.get("body", b"")))
            await send(message)

        await self._app(scope, counted_receive, counted_send)
        extensions = scope.get("extensions", {})
        if (body := extensions.get(direct_body.EXTENSION)) is not None:
            self._metrics.received.inc(body.nbytes)
        if (answer := extensions.get(direct_answer.EXTENSION)) is not None:
            self._metrics.sent.inc(answer.nbytes)
