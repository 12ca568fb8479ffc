"""A chunk, a command and a recovery become spans that an OpenTelemetry collector can show."""

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scope_contracts.errors import UserInputError
from scope_runners.serve import tracing
from scope_runners.serve.tracing import Tracing, open_tracing
from tests.serve.viewed import view

CHUNK = {
    "type": "chunk",
    "chunk_index": 41,
    "cache_epoch": 2,
    "prompt": "a secret prompt",
    "num_frames": 12,
    "recomputed": False,
    "stage_ms": {"generate": 200.0, "decode": 50.0},
}


def receipt(**changes: Any) -> dict[str, Any]:
    said = {
        "id": "c1",
        "kind": "prompt",
        "fields": {"text": "a secret prompt"},
        "state": "applied",
        "chunk_index": 41,
        "cache_epoch": 2,
        "posted_at": 100.0,
        "applied_at": 100.5,
        "shown_at": None,
    }
    return {"type": "receipt", "receipt": said | changes}


def spans(*events: dict[str, Any]) -> list[ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traced = Tracing(provider.get_tracer("test"))
    for event in events:
        traced.observe("4f0c", event)
    return list(exporter.get_finished_spans())


def length_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return float(span.end_time - span.start_time) / 1e9


def test_a_chunk_has_a_span_for_each_stage_as_long_as_it_took() -> None:
    generate, decode, chunk = spans(CHUNK)
    assert [each.name for each in (generate, decode, chunk)] == ["generate", "decode", "chunk"]
    assert length_s(generate) == pytest.approx(0.2)
    assert length_s(decode) == pytest.approx(0.05)
    assert length_s(chunk) == pytest.approx(0.25)
    assert decode.start_time == generate.end_time
    assert decode.end_time == chunk.end_time
    assert chunk.context is not None
    for stage in (generate, decode):
        assert stage.parent is not None
        assert stage.parent.span_id == chunk.context.span_id
    assert chunk.attributes is not None
    assert dict(chunk.attributes) == {
        "scope.session": "4f0c",
        "scope.chunk": 41,
        "scope.epoch": 2,
        "scope.frames": 12,
        "scope.recomputed": False,
    }


def test_a_command_spans_from_its_post_to_its_first_picture_once() -> None:
    (command,) = spans(
        receipt(state="pending", applied_at=None), receipt(), receipt(shown_at=101.0)
    )
    assert length_s(command) == pytest.approx(1.0)


def test_a_command_that_is_never_shown_ends_with_its_answer() -> None:
    (command,) = spans(receipt(state="superseded"))
    assert length_s(command) == pytest.approx(0.5)


def test_a_recovery_spans_from_the_loss_to_the_next_state() -> None:
    lost = {"type": "state", "session": view(state="recovering")}
    live = {"type": "state", "session": view(state="live")}
    (recovery,) = spans(live, lost, lost, live, live)
    assert recovery.name == "recovery"
    assert recovery.attributes is not None
    assert recovery.attributes["scope.recovered"] is True


def test_no_span_holds_a_prompt() -> None:
    told = "".join(span.to_json() for span in spans(CHUNK, receipt(shown_at=101.0)))
    assert "secret" not in told


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://host", "http://"])
def test_an_endpoint_that_is_no_url_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(UserInputError, match=r"^--trace .* is no URL; give one such as http://"):
        open_tracing(endpoint)


def test_who_lacks_opentelemetry_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"install scope-rt\[tracing\]$"):
        open_tracing("http://127.0.0.1:4318")
