"""A session's stream goes to media servers, each on a thread of its own; one that is gone is tried
again, and no stream waits for any."""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scope_contracts.errors import UserInputError
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.publish_errors import PublishError, RefusedError
from scope_runners.serve.media.publish_target import MOST_PUBLICATIONS, Target, target_of
from scope_runners.serve.media.push import push
from scope_runners.serve.media.webrtc import ice_of
from scope_runners.serve.media.whip_out import send_by_whip
from scope_runners.serve.settings import IceServer

_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 30.0
_LOOK_S = 0.2
_END_S = 15.0
Send = Callable[[Target, MediaHub, Callable[[], None]], Awaitable[None]]


class PublicationState(StrEnum):
    """What a person is told."""

    CONNECTING = "connecting"
    LIVE = "live"
    RETRYING = "retrying"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class Backoff:
    """How long to wait before the next attempt. Pure."""

    wait_s: float = _LEAST_WAIT_S

    def after(self, live_s: float) -> float:
        """After an attempt that was live for so long."""
        if live_s >= _MOST_WAIT_S:
            self.wait_s = _LEAST_WAIT_S
        wait_s, self.wait_s = self.wait_s, min(_MOST_WAIT_S, 2 * self.wait_s)
        return wait_s


class Publication:
    """One target; any thread may use it."""

    def __init__(
        self,
        target: Target,
        *,
        hub: Callable[[], MediaHub | None],
        send: Send,
        tell: Callable[..., int],
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self._target, self._hub, self._send, self._tell = target, hub, send, tell
        self._state, self._detail = PublicationState.CONNECTING, ""
        self._num_live = 0
        self._live_at_s: float | None = None
        self._is_stopped = False
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name="publish", daemon=True)

    def start(self) -> None:
        """Begin to send, now or once anything is shown."""
        self._tell("publication", **self.told)
        self._thread.start()

    @property
    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "id": self.id,
            "url": self._target.shown,
            "state": str(self._state),
            "detail": self._detail,
            "reconnects": max(0, self._num_live - 1),
        }

    def stop(self) -> None:
        """Send no more; blocks `_END_S` at most. Idempotent."""
        self.ask_to_stop()
        self._thread.join(_END_S)

    def ask_to_stop(self) -> None:
        """As `stop`, without waiting for the end."""
        self._begun.wait(_END_S)
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not self._is_stopped:
            self._is_stopped = True
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            self._become(PublicationState.ENDED, "")
        except BaseException:
            self._become(PublicationState.FAILED, "an error of the server; see its log")
            raise

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._begun.set()
        backoff = Backoff()
        while True:
            hub = await self._shown()
            self._live_at_s = None
            try:
                await self._send(self._target, hub, self._is_live)
                self._become(PublicationState.ENDED, "")
                return
            except RefusedError as error:
                self._become(PublicationState.FAILED, str(error))
                return
            except PublishError as error:
                since_s = self._live_at_s
                wait_s = backoff.after(0.0 if since_s is None else time.monotonic() - since_s)
                self._become(
                    PublicationState.RETRYING, f"{error}; it is tried again in {wait_s:g} s"
                )
            await asyncio.sleep(wait_s)

    async def _shown(self) -> MediaHub:
        while (hub := self._hub()) is None:
            await asyncio.sleep(_LOOK_S)
        return hub

    def _is_live(self) -> None:
        self._live_at_s = time.monotonic()
        self._num_live += 1
        self._become(PublicationState.LIVE, "")

    def _become(self, state: PublicationState, detail: str) -> None:
        self._state, self._detail = state, detail
        self._tell("publication", **self.told)


class Publications:
    """All of one session; any thread may use it."""

    def __init__(
        self,
        *,
        hub: Callable[[], MediaHub | None],
        tell: Callable[..., int],
        ice_servers: tuple[IceServer, ...] = (),
    ) -> None:
        """`hub` is None until anything is shown; `tell` publishes an event of the session."""
        self._hub, self._tell, self._ice_servers = hub, tell, ice_servers
        self._lock = threading.Lock()
        self._all: dict[str, Publication] = {}
        self._has_ended = False

    def begin(self, url: str) -> dict[str, Any]:
        """Publish there from now on; returns what is told of it.

        Raises:
            UserInputError: the URL cannot be used, the session ends, or it has as many as it may.
        """
        target = target_of(url)
        with self._lock:
            if self._has_ended:
                raise UserInputError("the session has ended; start another")
            if len(self._all) >= MOST_PUBLICATIONS:
                raise UserInputError(f"{MOST_PUBLICATIONS} publications are there; delete one")
            send: Send = push if target.format else self._by_whip
            publication = Publication(target, hub=self._hub, send=send, tell=self._tell)
            self._all[publication.id] = publication
        publication.start()
        return publication.told

    @property
    def told(self) -> list[dict[str, Any]]:
        """As JSON has it, the oldest first."""
        with self._lock:
            return [each.told for each in self._all.values()]

    def end(self, name: str) -> bool:
        """End one; False where there is none of that id."""
        with self._lock:
            publication = self._all.pop(name, None)
        if publication is None:
            return False
        publication.stop()
        return True

    def close(self) -> None:
        """End all, and take no more."""
        with self._lock:
            self._has_ended = True
            publications = list(self._all.values())
            self._all.clear()
        for each in publications:
            each.ask_to_stop()
        for each in publications:
            each.stop()

    async def _by_whip(self, target: Target, hub: MediaHub, on_live: Callable[[], None]) -> None:
        await send_by_whip(target, hub, ice_of(self._ice_servers), on_live)
