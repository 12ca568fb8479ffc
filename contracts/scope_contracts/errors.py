"""Every failure this project can name is one class here, and tells its reader what to change.

A caller never needs `except Exception`: the tree below is the documentation of what can go wrong.
Errors with a runbook carry its name, and their text ends by pointing at it.
"""

import reprlib
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from scope_contracts.retraction import Retraction

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 120
_SHOWN.maxlist = _SHOWN.maxtuple = 16


def shown(value: object) -> str:
    """`value` for a sentence, bounded in length and in depth: it may come from a hostile peer."""
    return _SHOWN.repr(value)


def mismatch(field: str, *, got: object, want: object, fix: str = "") -> str:
    """Phrase an error the one way we do: field, got, want and what to change."""
    sentence = f"{field}: got {shown(got)}, want {want}"
    return f"{sentence}; {fix}" if fix else sentence


class ScopeError(Exception):
    """Something the runtime refuses or has lost; the root of every error we raise on purpose."""

    runbook: ClassVar[str | None] = None

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.runbook is None else f"{message}; see runbooks/{self.runbook}.md"


class UserInputError(ScopeError):
    """A flag, prompt, size or path cannot be used. Change it as the message says; exit code 2."""


class ContractError(ScopeError):
    """A message breaks the contract between ranks. Nothing was run on it; fix the sender."""


class VersionError(ContractError):
    """The peer speaks another envelope version. Install the same package on every rank."""


class FieldError(ContractError):
    """A message field is missing, unknown, repeated or of the wrong type. Fix the sender."""


class WireError(ContractError):
    """The bytes are not one canonical message. Look for another encoder or a damaged link."""


class DigestError(WireError):
    """A message arrived with other bytes than were sent. Look at the network and who is on it."""

    runbook: ClassVar[str | None] = "drift"


class PreflightError(ContractError):
    """A chunk was refused before any byte was sent. Fix the planner input the message names."""


class LifecycleError(ScopeError):
    """A chunk arrived that the cache lifecycle does not allow here. Stop: state would drift."""

    runbook: ClassVar[str | None] = "drift"


class EpochError(LifecycleError):
    """An epoch or a cache reset does not follow the hard-cut rules. Only the planner may reset."""


class OrderError(LifecycleError):
    """Envelopes were lost, repeated or reordered, or a chunk is open or closed when it must not be.

    Send every envelope once, in order, on one link.
    """


class StartFrameError(LifecycleError):
    """`current_start_frame` left the stream's progression. The planner's value is the truth."""


class CallCountError(LifecycleError):
    """More or fewer generator calls than planned; peers would wait in a collective forever."""

    runbook: ClassVar[str | None] = "hang"


class ParityError(ScopeError):
    """Ranks disagree on a setting or a digest. Give every rank the value the message names."""

    runbook: ClassVar[str | None] = "drift"


class IntegrityError(ScopeError):
    """Numbers or state are not what they must be. Chunks since the last good check are suspect."""

    runbook: ClassVar[str | None] = "drift"
    suspect_from: int | None = None
    """The first chunk that the detector has not vouched for; None where it does not say."""
    retraction: "Retraction | None" = None
    """Rank0: the chunks that were shown and are suspect; None where there are none."""


class FingerprintError(IntegrityError, ParityError):
    """Weights in memory are not the checkpoint's. Restart; if it returns, test the memory."""

    runbook: ClassVar[str | None] = "drift"


class DamageError(IntegrityError):
    """A file is not what was written. No chunk was computed wrong, and none is suspect."""

    runbook: ClassVar[str | None] = "drift"


class ModelDamageError(FingerprintError, DamageError):
    """A model folder does not hold what its manifest says. Copy it again; no chunk was made."""

    runbook: ClassVar[str | None] = "drift"


class LinkError(ScopeError):
    """The link between ranks failed. The group must be restarted; the stream then resumes."""

    runbook: ClassVar[str | None] = "hang"


class PeerLostError(LinkError):
    """A peer died or closed its link. Look at that rank's own log for the first error."""

    runbook: ClassVar[str | None] = "rank-loss"


class PeerRefusedError(PeerLostError):
    """A peer cannot use what it was given, and says itself what to change. Exit code 2."""


class LinkTimeoutError(LinkError):
    """A bounded wait ran out while the peer stayed silent. Look at the rank the message names."""


class AuthenticationError(LinkError):
    """What arrived does not prove that it is of a rank of this stream. Give every rank the same
    SCOPE_STREAM_SECRET; where they have it, look for the stranger that the message describes.
    """

    runbook: ClassVar[str | None] = "strangers"


class SlowRankError(LinkError):
    """A rank is far slower than the others and holds all of them up. Look at its machine."""

    runbook: ClassVar[str | None] = "rank-loss"


class ChunkTimeoutError(ScopeError):
    """A chunk was not computed or decoded within its bound. Look at its device."""

    runbook: ClassVar[str | None] = "hang"


class SnapshotError(ScopeError):
    """The stream could not be saved. Free space or mend the disk, then resume."""

    runbook: ClassVar[str | None] = "hang"


class RecordingError(ScopeError):
    """The video could not be written. Mend the disk or change the output, then start again."""

    runbook: ClassVar[str | None] = "hang"


class CacheError(ScopeError):
    """A cache read, write or layout is outside what was allocated. Check window, sink and size."""


class UnsupportedError(CacheError):
    """This kind of cache cannot do what was asked. The message names what to do instead."""
