"""Chunks, commands and recoveries as OpenTelemetry spans; made from a session's events alone, so
that no stage knows of it.

A chunk's stages were measured on rank0, which tells how long each took and not when it began:
their spans follow each other, and the last one ends when the chunk reached the server. Where stages
of several chunks overlap (pp1), the lengths are right and the beginnings are not. No span holds a
prompt.
"""

import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from scope_contracts.errors import UserInputError
from scope_rt.version import __version__
from scope_runners.serve.session_states import SessionState

_FLUSHED_WITHIN_MS = 5000
_RUNNING = (SessionState.LIVE, SessionState.PAUSED, SessionState.DEGRADED)


class Tracing:
    """Spans of all sessions of one server; `tracer` is OpenTelemetry's."""

    def __init__(self, tracer: Any, *, end: Callable[[], None] = lambda: None) -> None:
        self._tracer, self._end = tracer, end
        self._lost_at_ns: dict[str, int] = {}
        """Sessions that recover, since when."""

    def observe(self, session_id: str, event: Mapping[str, Any]) -> None:
        """Turn one event of a session into the spans that it ends."""
        match event["type"]:
            case "chunk":
                self._chunk(session_id, event, time.time_ns())
            case "receipt":
                self._command(session_id, event["receipt"])
            case "state":
                self._state(session_id, event["session"], time.time_ns())

    def close(self) -> None:
        """Hand over what is not sent yet; blocks 10 s at most."""
        self._end()

    def _chunk(self, session_id: str, event: Mapping[str, Any], now_ns: int) -> None:
        stages = {name: round(ms * 1e6) for name, ms in event["stage_ms"].items()}
        start_ns = now_ns - sum(stages.values())
        attributes = {
            "scope.session": session_id,
            "scope.chunk": event["chunk_index"],
            "scope.epoch": event["cache_epoch"],
            "scope.frames": event["num_frames"],
            "scope.recomputed": event["recomputed"],
        }
        chunk = self._tracer.start_span("chunk", start_time=start_ns, attributes=attributes)
        if stages:
            from opentelemetry.trace import set_span_in_context

            context = set_span_in_context(chunk)
            for name, length_ns in stages.items():
                stage = self._tracer.start_span(name, context=context, start_time=start_ns)
                start_ns += length_ns
                stage.end(end_time=start_ns)
        chunk.end(end_time=now_ns)

    def _command(self, session_id: str, receipt: Mapping[str, Any]) -> None:
        ended_at = receipt["shown_at"]
        if receipt["state"] in ("superseded", "refused"):
            ended_at = receipt["applied_at"]
        if ended_at is None:
            return  # it is pending, or its picture is yet to come
        span = self._tracer.start_span(
            "command",
            start_time=round(receipt["posted_at"] * 1e9),
            attributes={
                "scope.session": session_id,
                "scope.command": receipt["id"],
                "scope.kind": str(receipt["kind"]),
                "scope.state": str(receipt["state"]),
                "scope.chunk": receipt["chunk_index"],
                "scope.epoch": receipt["cache_epoch"],
            },
        )
        span.end(end_time=round(ended_at * 1e9))

    def _state(self, session_id: str, view: Mapping[str, Any], now_ns: int) -> None:
        if view["state"] == SessionState.RECOVERING:
            self._lost_at_ns.setdefault(session_id, now_ns)
            return
        lost_at_ns = self._lost_at_ns.pop(session_id, None)
        if lost_at_ns is not None:
            span = self._tracer.start_span(
                "recovery",
                start_time=lost_at_ns,
                attributes={
                    "scope.session": session_id,
                    "scope.recovered": view["state"] in _RUNNING,
                },
            )
            span.end(end_time=now_ns)


def open_tracing(endpoint: str) -> Tracing:
    """Send spans by OTLP over HTTP to `endpoint`, such as `http://127.0.0.1:4318`.

    Raises:
        UserInputError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise UserInputError(
            f"--trace {endpoint!r} is no URL; give one such as http://127.0.0.1:4318"
        )
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise UserInputError("--trace needs OpenTelemetry; install scope-rt[tracing]")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "scope-rt", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def end() -> None:
        provider.force_flush(_FLUSHED_WITHIN_MS)
        provider.shutdown()

    return Tracing(provider.get_tracer("scope_runners.serve"), end=end)
