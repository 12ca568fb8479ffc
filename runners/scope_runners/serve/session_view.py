"""What a client is told of a session, as JSON has it."""

from dataclasses import asdict, dataclass
from typing import Any

from scope_contracts.retraction import Retraction
from scope_runners.serve.live_stage import LiveStage
from scope_runners.serve.messages import RankEvent, RankReady
from scope_runners.serve.recoveries import Recovery
from scope_runners.serve.session_record import SessionRecord
from scope_runners.serve.session_states import SessionState


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session at one moment."""

    record: SessionRecord
    state: SessionState
    detail: str
    prompt: str
    ready: RankReady | None
    """What rank0 said last; None before it was ready once."""
    ranks: tuple[RankEvent, ...]
    newest: tuple[int, int]
    """Index and epoch of the newest chunk."""
    is_paused: bool
    retractions: tuple[Retraction, ...]
    recoveries: tuple[Recovery, ...]

    def told(self, stage: LiveStage) -> dict[str, Any]:
        """With what `stage` shows."""
        hub, stats = stage.hub, stage.stats()
        return {
            "id": self.record.id,
            "state": str(self.state),
            "detail": self.detail,
            "prompt": self.prompt,
            **self._of_rank0(),
            "lease_s": self.record.lease_s,
            "created_at": self.record.created_at,
            "forked_from": self.record.forked_from,
            "chunk_index": self.newest[0],
            "cache_epoch": self.newest[1],
            "media_time_s": stage.media_time_s,
            "lead_s": stats["lead_s"],
            "ranks": [
                {"rank": each.rank, "state": str(each.state), "pid": each.pid}
                for each in sorted(self.ranks, key=lambda each: each.rank)
            ],
            "stats": stats,
            "paused": self.is_paused,
            "viewers": hub.num_viewers if hub is not None else 0,
            "recording": hub.recording if hub is not None else None,
            "recordings": hub.recordings() if hub is not None else [],
            "retractions": [told_of(each) for each in self.retractions],
            "recoveries": [asdict(each) for each in self.recoveries],
            "urls": _urls(self.record.id),
        }

    def _of_rank0(self) -> dict[str, Any]:
        ready = self.ready
        if ready is None:
            unknown = (
                "fps",
                "width",
                "height",
                "plan",
                "tp",
                "world_size",
                "chunk_s",
                "resting_bias",
            )
            return dict.fromkeys(unknown) | {"broken_on_purpose": "", "prompt_words": []}
        return {
            "fps": ready.fps,
            "width": ready.width,
            "height": ready.height,
            "plan": ready.plan,
            "tp": ready.tp,
            "world_size": ready.world_size,
            "chunk_s": ready.chunk_frames / ready.fps,
            "broken_on_purpose": ready.broken_on_purpose,
            "resting_bias": ready.resting_bias,
            "prompt_words": list(ready.prompt_words),
        }


def told_of(retraction: Retraction) -> dict[str, Any]:
    """A retraction."""
    return {
        "first_chunk": retraction.first_chunk,
        "last_chunk": retraction.last_chunk,
        "reason": retraction.reason,
    }


def _urls(session_id: str) -> dict[str, str]:
    base = f"/v1/sessions/{session_id}"
    ways = (
        "events",
        "commands",
        "whep",
        "stream.fmp4",
        "stream.mjpeg",
        "recordings",
        "publications",
    )
    return {"page": f"/?session={session_id}"} | {
        way.removeprefix("stream."): f"{base}/{way}" for way in ways
    }
