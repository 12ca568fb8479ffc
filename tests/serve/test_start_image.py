"""A session begins with the picture that its client sent, or says why its model takes none."""

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from tests.serve.running_server import RunningServer, running_server, until
from tests.tiny_folder import FRAMEWISE_RECIPE, write_tiny_folder


def picture() -> str:
    file = BytesIO()
    Image.new("RGB", (64, 32), (200, 30, 30)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def settled(server: RunningServer, session_id: str) -> Any:
    view = server.get(f"/v1/sessions/{session_id}")
    return view if view["state"] not in ("starting", "recovering") else None


def test_a_picture_is_chunk_0_where_the_model_takes_one(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model", FRAMEWISE_RECIPE)
    with running_server(
        tmp_path, "--no-session", "--model", str(folder), "--max-sessions", "2"
    ) as server:
        asked = {"prompt": "a red circle", "image": picture()}
        refused = server.post("/v1/sessions", asked | {"image": "no base64!"})
        assert refused.status_code == 422
        started = server.post("/v1/sessions", asked | {"config": {"model": str(folder)}})
        assert started.status_code == 201, started.text
        embedded = server.post("/v1/sessions", asked | {"config": {"model": "tiny"}}).json()
        view = until(lambda: settled(server, started.json()["id"]), what="a session")
        assert view["state"] in ("live", "degraded"), view["detail"]
        failed = until(lambda: settled(server, embedded["id"]), what="a refusal")
        assert failed["state"] == "failed"
        assert "image" in failed["detail"]
