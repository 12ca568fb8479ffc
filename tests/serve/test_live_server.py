"""A person's commands are obeyed and answered by a server with ranks of its own."""

from collections.abc import Iterator
from typing import Any

import av
import httpx
import pytest

from scope_rt.record.reader import read_history
from tests.serve.running_server import NotingClient, RunningServer, running_server, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("live"), "--prompt", "a red circle") as server:
        server.live()
        yield server


@pytest.fixture
def session_id(server: RunningServer) -> str:
    name = server.live()["id"]
    assert isinstance(name, str)
    return name


def chunk_seen(client: NotingClient, index: int) -> Any:
    chunks = [event for event in client.of("chunk") if event["chunk_index"] == index]
    return chunks[0] if chunks else None


def test_a_prompt_takes_effect_at_the_chunk_that_its_receipt_names(
    server: RunningServer, session_id: str
) -> None:
    client = NotingClient(server, session_id)
    until(lambda: client.of("state"), what="the state on connecting")
    receipt = server.command(session_id, kind="prompt", text="a green triangle")
    assert receipt["state"] == "applied"
    index = receipt["chunk_index"]
    chunk = until(lambda: chunk_seen(client, index), what=f"chunk {index}")
    assert chunk["prompt"] == "a green triangle"
    before = [event for event in client.of("chunk") if event["chunk_index"] < index]
    assert "a green triangle" not in [event["prompt"] for event in before]

    def shown() -> Any:
        told = [e["receipt"] for e in client.of("receipt") if e["receipt"]["id"] == receipt["id"]]
        return told and told[-1]["latency_ms"]

    assert until(shown, what="the receipt once it is on screen") > 0
    client.close()
    assert [event["seq"] for event in client.of("receipt")] == sorted(
        event["seq"] for event in client.of("receipt")
    )


def test_every_kind_of_command_is_answered(server: RunningServer, session_id: str) -> None:
    transition = {"chunks": 2, "method": "lerp", "bias_floor": 0.5}
    asked: list[dict[str, Any]] = [
        {"kind": "prompt", "text": "a blue square", "transition": transition},
        {"kind": "hard_cut"},
        {"kind": "bias", "value": 0.7},
        {"kind": "seed", "value": 11},
        {"kind": "pause"},
        {"kind": "resume"},
        {"kind": "prompt", "text": "a white circle", "hard_cut": True},
    ]
    receipts = [server.command(session_id, **command) for command in asked]
    assert [each["state"] for each in receipts] == ["applied"] * len(asked)
    chunks = [each["chunk_index"] for each in receipts if each["kind"] not in ("pause", "resume")]
    assert chunks == sorted(chunks)
    log = server.folder / "serve" / "sessions" / session_id / "stream.scope"
    history = read_history(log)
    cut, bias, seed = (receipts[number]["chunk_index"] for number in (1, 2, 3))
    assert history.envelopes[cut].init_cache
    assert history.envelopes[bias].kv_cache_attention_bias == pytest.approx(0.7)
    assert history.envelopes[seed].base_seed == 11


def test_a_command_that_cannot_be_obeyed_is_refused_by_the_models_own_sentence(
    server: RunningServer, session_id: str
) -> None:
    receipt = server.command(session_id, kind="prompt", text="a purple elephant")
    assert receipt["state"] == "refused"
    assert "unknown word 'elephant'" in receipt["error"]
    answer = server.post(f"/v1/sessions/{session_id}/commands", {"kind": "bias", "value": 2.0})
    assert answer.status_code == 422
    receipt = server.command(session_id, kind="record_stop")
    assert "no recording runs" in receipt["error"]


def test_a_repeated_post_counts_once(server: RunningServer, session_id: str) -> None:
    first = server.command(session_id, id="mine-1", kind="hard_cut")
    again = server.command(session_id, id="mine-1", kind="hard_cut")
    assert (first["chunk_index"], first["cache_epoch"]) == (
        again["chunk_index"],
        again["cache_epoch"],
    )
    other = server.post(f"/v1/sessions/{session_id}/commands", {"id": "mine-1", "kind": "pause"})
    assert other.status_code == 422
    assert "that of another command" in other.json()["detail"]


def test_a_scheduled_prompt_comes_when_it_was_asked_to(
    server: RunningServer, session_id: str
) -> None:
    receipt = server.command(session_id, kind="prompt", text="a yellow square", in_chunks=2)
    assert receipt["state"] == "pending"

    def answered() -> Any:
        found = server.get(f"/v1/sessions/{session_id}/commands/{receipt['id']}")
        return found if found["state"] != "pending" else None

    assert until(answered, what="its answer")["chunk_index"] == receipt["at_chunk"]


def test_a_recording_is_a_video_of_what_is_shown(server: RunningServer, session_id: str) -> None:
    started = server.command(session_id, kind="record_start", name="clip")
    assert started["state"] == "applied"
    again = server.command(session_id, kind="record_start", name="clip")
    assert "is there already" in again["error"]
    shown = server.session()["media_time_s"]
    until(lambda: server.session()["media_time_s"] > shown + 1.0, what="a second of video")
    server.command(session_id, kind="record_stop", name="clip")
    path = f"/v1/sessions/{session_id}/recordings"
    until(lambda: not server.get(path)[-1]["under_way"], what="the end of the recording")
    video = server.folder / "clip.mp4"
    video.write_bytes(httpx.get(f"{server.url}{path}/clip.mp4", timeout=30).content)
    with av.open(str(video)) as container:
        frames = [frame.pts for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 16
    assert len(frames) >= 16
    assert frames == list(dict.fromkeys(frames))


def test_a_rewound_stream_goes_on_after_the_chunk_that_was_asked_for(
    server: RunningServer, session_id: str
) -> None:
    client = NotingClient(server, session_id)
    newest = until(lambda: server.live()["chunk_index"] >= 6, what="some chunks")
    receipt = server.command(session_id, kind="rewind", chunk_index=3)
    assert receipt["state"] == "applied", receipt["error"]
    assert receipt["chunk_index"] == 3
    until(lambda: chunk_seen(client, 3), what="chunk 3 once more")
    client.close()
    after = [event["chunk_index"] for event in client.of("chunk")]
    start = len(after) - 1 - after[::-1].index(3)
    assert after[start:] == list(range(3, 3 + len(after) - start))
    assert newest


def test_what_is_not_there_is_said_and_nothing_is_made(server: RunningServer) -> None:
    unknown = httpx.get(f"{server.url}/v1/sessions/none", timeout=30)
    assert unknown.status_code == 404
    full = server.post("/v1/sessions", {"prompt": "a red circle"})
    assert full.status_code == 503
    assert "--max-sessions" in full.json()["detail"]
    bad = server.post("/v1/sessions", {"prompt": "a", "config": {"plam": "pp1"}})
    assert bad.status_code == 422
    assert "plam" in bad.json()["detail"]
    assert len(list((server.folder / "serve" / "sessions").iterdir())) == 1
