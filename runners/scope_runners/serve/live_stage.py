"""What was taken is shown at its time, and the next chunk is begun when the pace says so."""

import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import ScopeError
from scope_runners.serve.events import EventLog
from scope_runners.serve.given_video import GivenVideo
from scope_runners.serve.measurements import Measurements
from scope_runners.serve.media.frame import PlayedFrame
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.publish import Publications
from scope_runners.serve.messages import ChunkHeader, CommandKind, Credit, Message, RankReady
from scope_runners.serve.pacing import Pace
from scope_runners.serve.playout import Arrived, Playout, Timeline
from scope_runners.serve.receipt_book import ReceiptBook
from scope_runners.serve.receipts import command_of
from scope_runners.serve.session_files import SessionFiles
from scope_runners.serve.settings import ServeSettings

_IDLE_TICK_S = 0.05
_SLOW = 0.95
"""Below this part of its frames a second, a stream is said to be slow."""


class LiveStage:
    """Playout, viewers and credit of one session; any thread may use it."""

    def __init__(
        self,
        settings: ServeSettings,
        files: SessionFiles,
        *,
        receipts: ReceiptBook,
        measured: Measurements,
        events: EventLog,
        send: Callable[[Message, bytes], None],
        on_error: Callable[[ScopeError], None],
        clock: Callable[[], float],
    ) -> None:
        """`send` reaches rank0 where it is there, and is called with the lock; `on_error` is called
        where nothing can be shown any more."""
        self._settings, self._files, self._clock = settings, files, clock
        self._receipts, self._measured, self._events = receipts, measured, events
        self._send, self._on_error = send, on_error
        self._lock = threading.RLock()
        self._ready: RankReady | None = None
        self._is_open = False
        """Whether rank0 is there to begin chunks."""
        self._pace = Pace(settings.pace, max_outstanding=1)
        self._credit_end = 0
        self._playout: Playout | None = None
        self.hub: MediaHub | None = None
        self._is_paused = False
        self.video = GivenVideo()
        """Pictures that chunks begin with."""
        self.publications = Publications(
            hub=lambda: self.hub, tell=events.publish, ice_servers=settings.ice_servers
        )

    @property
    def ready(self) -> RankReady | None:
        """What rank0 said last; None before it was ready once."""
        return self._ready

    def open(self, ready: RankReady, *, next_chunk: int) -> None:
        """Rank0 is there, and begins chunks from `next_chunk` on."""
        with self._lock:
            self._ready, self._is_open = ready, True
            self._pace = Pace(self._settings.pace, max_outstanding=ready.max_in_flight)
            self._credit_end = next_chunk
            if self._playout is None:
                self._open_media(ready)

    def suspend(self) -> None:
        """Rank0 is gone: no chunk is begun; what is there is shown."""
        with self._lock:
            self._is_open = False

    def close(self) -> None:
        """Show no more; ends viewers, recordings, publications and video input."""
        self.suspend()
        self.video.end()
        self.publications.close()
        if self._playout is not None:
            self._playout.close()
        if self.hub is not None:
            self.hub.close()

    def wake(self) -> None:
        """Something that decides about the next chunk has changed."""
        if self._playout is not None:
            self._playout.wake()

    def pause(self, *, is_paused: bool) -> None:
        """Stop at the frame that is shown, or go on."""
        with self._lock:
            self._is_paused = is_paused
        if self._playout is not None:
            self._playout.pause(is_paused=is_paused)

    def forget(self) -> None:
        """Show nothing more of what was taken: it is made again."""
        if self._playout is not None:
            with self._playout.lock:
                self._playout.timeline.forget()

    def grant(self) -> None:
        """One chunk more may be begun, whatever the pace says."""
        with self._lock:
            self._credit_end += 1
            self._pace.granted(self._clock())
            if self._ready is not None and (given := self.video.next(self._ready)) is not None:
                self._send(*given)
            self._send(Credit(end=self._credit_end), b"")

    def grant_for_cut(self) -> None:
        """A cut was posted: nobody wants to see what would come before it. Cuts that are posted
        before a chunk comes share one: else as many chunks as cuts would be made at no pace."""
        with self._lock:
            if not self._pace.is_ahead:
                self.grant()

    def chunk_in(self, num_chunks: int) -> int:
        """The chunk that is begun so many after the next one; -1 for none."""
        return self._credit_end + num_chunks if num_chunks else -1

    def take(self, header: ChunkHeader, frames_THWC: NDArray[np.uint8]) -> None:
        """Show a chunk after those before it."""
        playout, index = self._playout, header.chunk_index
        assert playout is not None, "rank0 says what it is before it gives chunks"
        with self._lock:
            self._credit_end = max(self._credit_end, index + 1)
            self._pace.arrived(self._clock(), num_outstanding=self._credit_end - index - 1)
            chunk_s = self._pace.chunk_s
            shown = playout.timeline.num_shown
            self._measured.chunk(
                header.stage_ms,
                num_frames=header.num_frames,
                cache_epoch=header.cache_epoch,
                cache_fill=header.cache_fill,
                is_late=shown > 0 and playout.timeline.media_left_s <= 0,
            )
        arrived = Arrived(frames=frames_THWC, chunk_index=index, cache_epoch=header.cache_epoch)
        playout.add(arrived, chunk_s=chunk_s)
        self._events.publish(
            "chunk",
            chunk_index=index,
            cache_epoch=header.cache_epoch,
            prompt=header.prompt,
            num_frames=header.num_frames,
            recomputed=header.recomputed,
            stage_ms=dict(header.stage_ms),
            media_time_s=self.media_time_s,
        )

    @property
    def slowness(self) -> str:
        """Why what is shown is slower than it should be; "" where it is not."""
        playout, ready = self._playout, self._ready
        if playout is None or ready is None:
            return ""
        shown = 1 / playout.timeline.interval_s
        if shown >= _SLOW * ready.fps:
            return ""
        return f"shows {shown:.1f} of {ready.fps} frames a second"

    @property
    def shown_chunk(self) -> int:
        """The chunk that is on screen; 0 before the first."""
        return max(0, self._playout.timeline.last_chunk) if self._playout is not None else 0

    @property
    def media_time_s(self) -> float:
        """Seconds of video that were shown."""
        if self._playout is None or self._ready is None:
            return 0.0
        return self._playout.timeline.num_shown / self._ready.fps

    def stats(self) -> dict[str, Any]:
        """As JSON has it."""
        hub, playout, ready = self.hub, self._playout, self._ready
        media = hub.stats() if hub is not None else {}
        timeline = None if playout is None else playout.timeline
        drops = {
            "hard_cut": timeline.num_dropped if timeline is not None else 0,
            **media.pop("drops", {"slow_viewer": 0}),
        }
        return {
            **self._measured.told(),
            "frames_per_s": self._measured.frames_per_s(self._clock()),
            "cache_bytes": ready.cache_bytes if ready is not None else 0,
            "stalls": timeline.num_stalls if timeline is not None else 0,
            "lead_s": timeline.media_left_s if timeline is not None else 0.0,
            "expected_chunk_s": self._pace.expected_s,
            "drops": drops,
            "input": self.video.told,
            "publications": self.publications.told,
            **media,
        }

    def _open_media(self, ready: RankReady) -> None:
        self.hub = MediaHub(
            fps=Fraction(ready.fps),
            width=ready.width,
            height=ready.height,
            folder=self._files.recordings,
            max_viewers=self._settings.max_viewers,
            tell=self._events.publish,
        )
        timeline = Timeline(Fraction(ready.fps))
        self._playout = Playout(
            timeline, self._show, self._tick, self._clock, on_error=self._on_error
        )
        self._playout.pause(is_paused=self._is_paused)
        self._playout.start()

    def _show(self, frame: PlayedFrame) -> None:
        """On the playout's thread, as `_tick`."""
        self._measured.frame(self._clock())
        assert self.hub is not None, "opened before anything is shown"
        self.hub.show(frame)
        if frame.is_first:
            for receipt in self._receipts.shown(frame.chunk_index):
                if receipt.latency_ms is not None and receipt.kind is not CommandKind.REWIND:
                    self._measured.latency(receipt.latency_ms)

    def _tick(self) -> float:
        """Grant the next chunk if it is time; returns when to look again at the latest."""
        with self._lock:
            ready, playout = self._ready, self._playout
            if ready is None or playout is None or self._is_paused or not self._is_open:
                return _IDLE_TICK_S
            in_s = self._pace.grant_in_s(
                playout.timeline.media_left_s, chunk_media_s=ready.chunk_frames / ready.fps
            )
            if in_s is None:
                return _IDLE_TICK_S
            if in_s > 0:
                return min(in_s, _IDLE_TICK_S)
            for receipt in self._receipts.due(self._credit_end):
                self._receipts.post_now(receipt)
                self._send(command_of(receipt), b"")
            self.grant()
        return 0.0
