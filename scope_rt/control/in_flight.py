"""A chunk that was sent, with all that is needed to plan it again."""

from dataclasses import dataclass

from scope_contracts.envelope import PPEnvelope
from scope_rt.control.inbox import Directive
from scope_rt.control.position import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A chunk that was sent."""

    envelope: PPEnvelope
    prompt: str
    plan_ms: float
    before: Position
    """Where planning was, should this chunk have to be planned again."""
    directive: Directive
    state_digest: bytes
    """What the mesh must have run, and where its cache must be after it."""
