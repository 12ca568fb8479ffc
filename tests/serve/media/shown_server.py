"""A server with one session that shows a coloured picture, without ranks; not a test itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scope_runners.serve.group_control import GroupControl
from tests.serve.idle_server import IdleServer, idle_server, idle_settings
from tests.serve.media.shown_hub import ShownHub, shown_hub
from tests.serve.running_server import until


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownServer:
    server: IdleServer
    shown: ShownHub
    session_id: str

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.session_id}"

    def nobody_watches(self) -> None:
        """Returns once that is so."""
        until(lambda: not self.shown.hub.num_viewers, what="the last viewer's end")


@contextmanager
def shown_server(folder: Path, *, max_viewers: int = 16) -> Iterator[ShownServer]:
    with (
        pytest.MonkeyPatch.context() as patch,
        shown_hub(folder / "recordings", max_viewers=max_viewers) as shown,
    ):
        patch.setattr(GroupControl, "start", lambda self: None)
        patch.setattr(GroupControl, "runs", True)
        patch.setattr(GroupControl, "wait", lambda self: None)
        with idle_server(idle_settings(folder, lease_s=3600.0)) as server:
            session = server.sessions.create("a red picture", {}, lease_s=None)
            session.stage.hub = shown.hub
            yield ShownServer(server=server, shown=shown, session_id=session.record.id)
