"""What a person may ask of a running stream in one command; checked before it is posted."""

from dataclasses import dataclass

from scope_contracts.errors import UserInputError
from scope_rt.control.transition import TransitionSpec

MOST_SEED = 2**63 - 1
_MOST_ID_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """Takes effect at the next chunk that is planned, all of it at the same one.

    Raises:
        UserInputError: a value is out of range, or nothing is asked for.
    """

    prompt: str | None = None
    transition: TransitionSpec | None = None
    """How the prompt comes in; None is at once."""
    hard_cut: bool = False
    """A new epoch: older chunks are no longer seen, and those in flight are dropped."""
    bias: float | None = None
    """The resting `kv_cache_attention_bias` from then on, 0 < bias <= 1."""
    seed: int | None = None
    """The base seed from then on."""
    command_id: str = ""
    """Names the command: after a loss of rank0, `StreamSession.applied` says whether it took
    effect."""

    def __post_init__(self) -> None:
        if self.prompt is None and self.transition is not None:
            raise UserInputError("a transition leads to a new prompt; give one with it")
        if self.bias is not None and not 0 < self.bias <= 1:
            raise UserInputError(f"bias: got {self.bias:g}, want 0 < bias <= 1")
        if self.seed is not None and not 0 <= self.seed <= MOST_SEED:
            raise UserInputError(f"seed: got {self.seed}, want 0 to {MOST_SEED}")
        if len(self.command_id.encode(errors="replace")) > _MOST_ID_BYTES:
            raise UserInputError(f"command_id: give {_MOST_ID_BYTES} bytes of UTF-8 at most")
        if (self.prompt, self.bias, self.seed) == (None, None, None) and not self.hard_cut:
            raise UserInputError("nothing is asked for; give a prompt, a bias, a seed or hard_cut")
