"""Who watches a server from outside sees its session start, stream, lose a rank and end."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("prometheus_client")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from scope_runners.main import main
from tests.serve.running_server import NotingClient, RunningServer, until
from tests.serve.viewed import stats, view


class Collector(ThreadingHTTPServer):
    """Takes spans as a collector of OpenTelemetry does, and counts them by name."""

    def __init__(self) -> None:
        self.spans: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.update(span.name for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield listening
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("observed")
    options = (
        *("--prompt", "a purple circle", "--log-format", "json"),
        *("--trace", f"http://127.0.0.1:{collector.server_port}", "--max-sessions", "2"),
    )
    running = RunningServer(folder, *options, cold=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCOPE_LOG_LEVEL", "INFO")
        running.start()
    try:
        yield running
    finally:
        running.stop()


def readiness(server: RunningServer) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/readyz", timeout=30)
    return answer.status_code, answer.json()


def metric(server: RunningServer, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30).text)
    (found,) = (
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
    return float(found)


def test_a_server_is_not_ready_before_its_session_shows(server: RunningServer) -> None:
    assert server.get("/healthz") == {"status": "alive"}
    code, told = readiness(server)
    assert (code, told["ready"]) == (503, False)
    assert "its ranks have not met" in told["sessions"][0]["reasons"]
    server.live()
    assert readiness(server)[0] == 200


def test_a_session_tells_all_that_the_doubles_of_other_tests_tell(server: RunningServer) -> None:
    told = server.live()
    assert view().keys() <= told.keys()
    assert stats().keys() <= told["stats"].keys()
    assert {type(each) for each in told["stats"]["drops"].values()} == {int}


def test_metrics_follow_the_session(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    session = server.live()["id"]
    before = metric(server, "scope_chunks_total", session=session)
    server.command(session, kind="prompt", text="a purple square")
    until(
        lambda: metric(server, "scope_prompt_latency_seconds_count", session=session) >= 1,
        what="a latency",
    )
    assert metric(server, "scope_chunks_total", session=session) > before
    count = metric(server, "scope_stage_seconds_count", session=session, stage="generate")
    assert count >= before
    assert main(["top", server.url, "--once"]) == 0
    assert session in capsys.readouterr().out


def test_a_session_that_cannot_start_says_what_to_change(server: RunningServer) -> None:
    server.live()
    made = server.post("/v1/sessions", {"prompt": "a shiny hexagon"}).json()
    name = made["id"]

    def failed() -> Any:
        told = server.get(f"/v1/sessions/{name}")
        return told["detail"] if told["state"] == "failed" else None

    detail = until(failed, what="a failed session")
    assert detail.startswith("prompt: unknown word 'shiny'; known colours: red, ")
    (ill,) = (each for each in readiness(server)[1]["sessions"] if not each["ready"])
    assert (ill["id"], ill["reasons"][0]) == (name, f"it is failed: {detail}")
    assert httpx.delete(f"{server.url}/v1/sessions/{name}", timeout=90).status_code == 204
    assert readiness(server)[0] == 200


def test_a_lost_rank_is_told_and_counted_and_the_session_is_ready_again(
    server: RunningServer,
) -> None:
    view = server.live()
    client = NotingClient(server, view["id"])
    until(lambda: client.of("chunk"), what="a chunk")
    os.kill(view["ranks"][0]["pid"], signal.SIGKILL)
    # Over within a second: who asks may come too late to see it, who listens does not.
    until(
        lambda: "recovering" in [event["session"]["state"] for event in client.of("state")],
        what="that it recovers",
    )
    client.close()
    until(lambda: readiness(server)[0] == 200, what="ready again")
    assert metric(server, "scope_recoveries_total", session=view["id"]) == 1


def test_spans_reach_a_collector_and_lines_are_objects_without_a_prompt(
    server: RunningServer, collector: Collector
) -> None:
    session = server.live()["id"]
    assert server.stop() == 0
    assert {"chunk", "generate", "decode", "command", "recovery"} <= collector.spans.keys()
    text = server.output.read_text()
    lines = [json.loads(line) for line in text.splitlines() if not line.startswith("scope-rt: ")]
    assert session in {line["stream"] for line in lines if "stream" in line}
    assert any(line.get("rank") == 0 and line["level"] == "WARNING" for line in lines)
    assert any("chunk" in line and "epoch" in line for line in lines)
    assert "a purple" not in text
    assert not [line for line in lines if "it starts again" in line["message"]][1:], "at the end"
