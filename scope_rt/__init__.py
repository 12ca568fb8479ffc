"""scope-rt: a distributed runtime for streaming video diffusion transformers.

The public names; each is loaded when it is first used, so that importing this package costs no
PyTorch. Errors are all `ScopeError`s; the ones a caller may want to tell apart are here too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scope_rt.version import __version__

__all__ = [
    "Ack",
    "AppliedAt",
    "Chunk",
    "ContractError",
    "InputPictures",
    "IntegrityError",
    "Interpolation",
    "LinkError",
    "MotionNoise",
    "Pace",
    "ParityError",
    "Receipt",
    "RecordingError",
    "Retraction",
    "ScheduledEvent",
    "ScopeError",
    "SnapshotError",
    "Steering",
    "StreamConfig",
    "StreamSession",
    "TransitionSpec",
    "UserInputError",
    "VideoInput",
    "__version__",
    "register_codec",
    "register_text_encoder",
]

if TYPE_CHECKING:
    from scope_contracts.errors import (
        ContractError,
        IntegrityError,
        LinkError,
        ParityError,
        RecordingError,
        ScopeError,
        SnapshotError,
        UserInputError,
    )
    from scope_contracts.retraction import Retraction
    from scope_rt.config import StreamConfig
    from scope_rt.control.chunk import Chunk
    from scope_rt.control.inbox import Ack, Receipt
    from scope_rt.control.motion_noise import MotionNoise
    from scope_rt.control.pace import Pace
    from scope_rt.control.scheduled_event import ScheduledEvent
    from scope_rt.control.steering import Steering
    from scope_rt.control.transition import Interpolation, TransitionSpec
    from scope_rt.control.video_input import InputPictures, VideoInput
    from scope_rt.models.registry import register_codec, register_text_encoder
    from scope_rt.resumed import AppliedAt
    from scope_rt.session import StreamSession

_MODULES = {
    "Ack": "scope_rt.control.inbox",
    "AppliedAt": "scope_rt.resumed",
    "Chunk": "scope_rt.control.chunk",
    "InputPictures": "scope_rt.control.video_input",
    "Interpolation": "scope_rt.control.transition",
    "MotionNoise": "scope_rt.control.motion_noise",
    "Pace": "scope_rt.control.pace",
    "Receipt": "scope_rt.control.inbox",
    "Retraction": "scope_contracts.retraction",
    "ScheduledEvent": "scope_rt.control.scheduled_event",
    "Steering": "scope_rt.control.steering",
    "StreamConfig": "scope_rt.config",
    "StreamSession": "scope_rt.session",
    "TransitionSpec": "scope_rt.control.transition",
    "VideoInput": "scope_rt.control.video_input",
    "register_codec": "scope_rt.models.registry",
    "register_text_encoder": "scope_rt.models.registry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "scope_contracts.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
