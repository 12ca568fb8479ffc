"""The JSON of a command, checked before anything sees it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from scope_runners.serve.messages import CommandKind

MOST_PROMPT = 4000
_Id = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Command(_Strict):
    id: _Id | None = Field(None, description="of your own, so that a repeated post counts once")


class Transition(_Strict):
    """How a prompt comes in."""

    chunks: int = Field(ge=1, le=1000)
    method: Literal["lerp", "slerp"] = "slerp"
    bias_floor: float | None = Field(
        None, gt=0, le=1, description="attention bias in its middle; left out, the resting one"
    )


class PromptCommand(_Command):
    """Change what is seen, at the next chunk that is begun or softly from there on."""

    kind: Literal["prompt"]
    text: str = Field(min_length=1, max_length=MOST_PROMPT)
    transition: Transition | None = None
    hard_cut: bool = False
    in_chunks: int = Field(0, ge=0, le=100_000, description="scheduled: so many chunks from now")


class HardCutCommand(_Command):
    """Forget the past and begin a new epoch, at once."""

    kind: Literal["hard_cut"]
    in_chunks: int = Field(0, ge=0, le=100_000)


class BiasCommand(_Command):
    """How much past chunks weigh from now on."""

    kind: Literal["bias"]
    value: float = Field(gt=0, le=1)


class SeedCommand(_Command):
    """The base seed from now on."""

    kind: Literal["seed"]
    value: int = Field(ge=0, le=2**63 - 1)


class RewindCommand(_Command):
    """Continue before a chunk that was shown; its ranks start again for it."""

    kind: Literal["rewind"]
    chunk_index: int = Field(ge=0, le=2**31)


class PlainCommand(_Command):
    """Stop at the frame that is shown, or go on."""

    kind: Literal["pause", "resume"]


class RecordCommand(_Command):
    """Begin to record what is shown, or end it."""

    kind: Literal["record_start", "record_stop"]
    name: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9_-]*$")


AnyCommand = Annotated[
    PromptCommand
    | HardCutCommand
    | BiasCommand
    | SeedCommand
    | RewindCommand
    | PlainCommand
    | RecordCommand,
    Field(discriminator="kind"),
]


def posted(command: Any) -> tuple[CommandKind, dict[str, Any], str | None, int]:
    """What `LiveSession.post` takes: kind, fields of the message to rank0, id, and chunks from
    now."""
    fields: dict[str, Any] = {}
    in_chunks = 0
    match command:
        case PromptCommand():
            in_chunks = command.in_chunks
            fields = {"text": command.text, "hard_cut": command.hard_cut}
            if command.transition is not None:
                fields["transition_chunks"] = command.transition.chunks
                fields["transition_method"] = command.transition.method
                fields["bias"] = command.transition.bias_floor or 0.0
        case HardCutCommand():
            in_chunks = command.in_chunks
        case BiasCommand():
            fields = {"bias": command.value}
        case SeedCommand():
            fields = {"seed": command.value}
        case RewindCommand():
            fields = {"chunk_index": command.chunk_index}
        case RecordCommand():
            fields = {"name": command.name}
    return CommandKind(command.kind), fields, command.id, in_chunks
