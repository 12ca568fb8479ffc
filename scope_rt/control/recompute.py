"""How a model's cache is rebuilt is chosen once, by name: never by accident, never per rank."""

from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.errors import UserInputError
from scope_rt.config import RECOMPUTE_NEVER
from scope_rt.models.recipe import Recipe


class RecomputeAnchor(StrEnum):
    """Where the oldest context frame of a recompute model comes from."""

    DECODED = "decoded"
    """The oldest decoded frame, encoded again by rank0: what the model was trained on."""
    LATENT = "latent"
    """The latent as it was generated: needs no decode, and costs quality."""


class RecomputeMode(StrEnum):
    """The three ways of bringing up a recompute model on many ranks."""

    R1 = "r1"
    """Off: chunks append to the cache. To prove links and lifecycle first."""
    R0A = "r0a"
    """On, with rank0's decoded anchor: the semantics of one machine. The default."""
    R0 = "r0"
    """On, with the latent anchor: decode overlaps generation, at the price of quality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The effective choice: chunks from one recompute to the next, and the anchor."""

    every: int
    anchor: RecomputeAnchor


def choose_recompute(recipe: Recipe, mode: str | None, *, every: int | None) -> Recompute:
    """The choice that follows from the model, the argument and the environment.

    Raises:
        UserInputError: they contradict each other; the sentence names what to change.
    """
    if mode not in (None, *RecomputeMode):
        choices = ", ".join(RecomputeMode)
        raise UserInputError(f"recompute {mode!r} is unknown; choose one of {choices}")
    if recipe.clean_pass:
        if mode not in (None, RecomputeMode.R1) or every not in (None, RECOMPUTE_NEVER):
            raise UserInputError(
                "this model keeps its cache by clean passes and has no recompute; drop "
                "recompute and kv_cache_recompute_every (SCOPE_KV_CACHE_RECOMPUTE_EVERY)"
            )
        rolls = recipe.rollout_frames > 0
        anchor = RecomputeAnchor.DECODED if rolls else RecomputeAnchor.LATENT
        return Recompute(every=RECOMPUTE_NEVER, anchor=anchor)
    if mode == RecomputeMode.R1:
        if every not in (None, RECOMPUTE_NEVER):
            raise UserInputError(
                "recompute r1 switches it off, and kv_cache_recompute_every "
                f"(SCOPE_KV_CACHE_RECOMPUTE_EVERY) is {every}; drop one of them"
            )
        every = RECOMPUTE_NEVER
    is_latent = mode == RecomputeMode.R0
    return Recompute(
        every=1 if every is None else every,
        anchor=RecomputeAnchor.LATENT if is_latent else RecomputeAnchor.DECODED,
    )
