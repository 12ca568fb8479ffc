"""Publications of a session over HTTP: begun, listed, ended."""

import asyncio
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, ConfigDict, Field

from scope_contracts.errors import UserInputError
from scope_runners.serve.api_state import Api
from scope_runners.serve.media.publish import Publication
from scope_runners.serve.media.webrtc import ice_of
from scope_runners.serve.session import LiveSession

MOST_PUBLICATIONS = 8
"""Of one session."""
_LOOK_S = 0.2


class NewPublication(BaseModel):
    """Where the stream is to go."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(
        min_length=1,
        max_length=2000,
        description="rtmp(s)://, srt://, rtsp(s)://, or http(s):// of a WHIP endpoint, whose token "
        "is the password or #token=...",
    )


class Publications:
    """Of all sessions; used on one event loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._by_session: dict[str, dict[str, Publication]] = {}

    def of(self, session_id: str) -> dict[str, Publication]:
        """By id; those of a session that is gone are none."""
        return self._by_session.setdefault(session_id, {})

    def begin(self, session: LiveSession, url: str) -> Publication:
        """Raises `UserInputError`: the URL cannot be used, there are too many, or nothing is shown
        yet."""
        mine = self.of(session.record.id)
        if len(mine) >= MOST_PUBLICATIONS:
            raise UserInputError(f"{MOST_PUBLICATIONS} publications run; end one first")
        if session.hub is None:
            raise UserInputError("nothing is shown yet; try again once the session is live")
        publication = Publication(
            session.hub,
            url,
            ice_servers=ice_of(self._api.sessions.settings.ice_servers),
            tell=session.events.publish,
        )
        mine[publication.id] = publication
        publication.start()
        return publication

    async def begin_when_live(self, session: LiveSession, urls: tuple[str, ...]) -> None:
        """As a server was started to."""
        while session.hub is None:
            await asyncio.sleep(_LOOK_S)
        for url in urls:
            self.begin(session, url)

    async def close(self) -> None:
        """End all."""
        ends = [each.end() for mine in self._by_session.values() for each in mine.values()]
        await asyncio.gather(*ends)


def add_publications(app: FastAPI, api: Api, publications: Publications) -> None:
    """Add the routes."""

    @app.post("/v1/sessions/{session_id}/publications", status_code=201)
    async def begun(session_id: str, asked: NewPublication) -> dict[str, Any]:
        return publications.begin(api.session(session_id), asked.url).told()

    @app.get("/v1/sessions/{session_id}/publications")
    async def listed(session_id: str) -> list[dict[str, Any]]:
        api.session(session_id)
        return [each.told() for each in publications.of(session_id).values()]

    @app.delete("/v1/sessions/{session_id}/publications/{publication_id}", status_code=204)
    async def ended(session_id: str, publication_id: str) -> Response:
        api.session(session_id)
        publication = publications.of(session_id).pop(publication_id, None)
        if publication is None:
            raise HTTPException(404, f"there is no publication {publication_id[:64]!r}")
        await publication.end()
        return Response(status_code=204)
