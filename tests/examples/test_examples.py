"""The examples do what they say, with the package as it is."""

import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import warm_python

EXAMPLES = Path(__file__).parents[2] / "runners" / "examples"


def example(name: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def test_the_session_is_steered_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("session").main([]) == 0
    said = capsys.readouterr().out
    assert "chunk 5: 12 frames of 'a yellow triangle, fast'" in said
    assert "the new prompt took effect at chunk 2" in said
    assert "the stream is 72 frames of 64x64" in said


def test_the_same_session_runs_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = warm_python.run(
        [*command, str(EXAMPLES / "session.py"), "--plan", "tp_v1_1"], timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("chunk 0: 12 frames") == 1


def test_a_checkpoint_of_ones_own_streams_by_its_own_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = example("own_checkpoint")
    assert own.stream(own.copy_with_two_steps(tmp_path / "two")) == 3  # two steps, a clean pass
    assert "steps (1000.0, 500.0)" in capsys.readouterr().out


def test_a_folder_that_cannot_stream_is_refused_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "own_checkpoint.py"), str(tmp_path / "nothing")]
    done = warm_python.run(command, timeout=110)
    assert done.returncode == 1
    assert done.stderr.startswith("own_checkpoint.py: model folder ")
    assert done.stderr.count("\n") == 1


def test_the_live_page_shows_pictures_and_takes_prompts() -> None:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from scope_rt import StreamConfig

    live = example("live_page")
    stream = live.LiveStream(StreamConfig.of(seed=1), "a red circle")
    try:
        with TestClient(live.app_of(stream)) as client:
            assert "<img" in client.get("/").text
            taken = client.post("/prompt", json={"text": "a blue square"})
            assert taken.json()["chunk_index"] > 0
            refused = client.post("/prompt", json={"text": "a dragon"})
            assert refused.status_code == 422
            assert "dragon" in refused.json()["detail"]
            assert client.post("/cut").json()["chunk_index"] > 0
        pictures = live._jpegs(stream)
        assert b"image/jpeg" in next(pictures)
        pictures.close()
        assert stream.hub.num_viewers == 0
    finally:
        stream.close()
    assert "stream" not in {thread.name for thread in threading.enumerate()}
