"""What rank0 remembers is what a recompute needs: sinks and window, or anchor and last latents."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import OrderError, UserInputError
from scope_rt.config import RECOMPUTE_NEVER
from scope_rt.control.anchor import AnchorFrames
from scope_rt.control.context import ContextMemory
from scope_rt.control.recompute import RecomputeAnchor, choose_recompute
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import CacheUpkeep
from tests.tiny_folder import RECIPE

KREA = replace(
    RECIPE,
    cache_upkeep=CacheUpkeep.RECOMPUTE,
    kv_cache_num_frames=3,
    window_frames=6,
    sink_frames=0,
)


def anchor(frames_BTHWC: Tensor) -> Tensor:
    """Stands for the VAE: the number of the first frame it was given, negative."""
    return -frames_BTHWC[:, :1, 0, 0, :1].float()[..., None, None]


def memory(recipe: Recipe, kind: RecomputeAnchor) -> ContextMemory:
    frames = AnchorFrames(
        anchor, num_latents=recipe.context_frames, first_latent_frames=1, temporal_stride=4
    )
    return ContextMemory(recipe, frames, anchor=kind)


def remember(kept: ContextMemory, chunk: int) -> None:
    """Latent frame i holds the number i, decoded frame j the number j."""
    latents = torch.arange(3 * chunk, 3 * chunk + 3).float()
    first = 0 if chunk == 0 else 12 * chunk - 3
    frames = torch.arange(first, 12 * chunk + 9, dtype=torch.uint8)
    kept.remember_latents(latents[None, :, None, None, None])
    kept.remember_frames(frames[None, :, None, None, None])


def seen(kept: ContextMemory) -> list[float]:
    return kept.context().flatten().tolist()


def test_clean_pass_models_get_sinks_and_all_of_the_window_that_stays() -> None:
    kept = memory(replace(RECIPE, sink_frames=1, window_frames=6), RecomputeAnchor.LATENT)
    contexts = []
    for chunk in range(4):
        remember(kept, chunk)
        contexts.append(seen(kept))
    assert contexts == [[0, 1, 2], [0, 3, 4, 5], [0, 6, 7, 8], [0, 9, 10, 11]]


def test_the_anchor_is_the_oldest_decoded_frame_once_the_epoch_s_first_is_out_of_reach() -> None:
    kept = memory(KREA, RecomputeAnchor.DECODED)
    contexts = []
    for chunk in range(4):
        remember(kept, chunk)
        contexts.append(seen(kept))
    # The last 9 decoded frames begin at frame 12 after the second chunk, at 24 after the third.
    assert contexts == [[0, 1, 2], [-12, 4, 5], [-24, 7, 8], [-36, 10, 11]]


def test_a_latent_anchor_needs_no_decoded_frame() -> None:
    kept = memory(KREA, RecomputeAnchor.LATENT)
    assert not kept.needs_frames
    for chunk in range(3):
        remember(kept, chunk)
    assert seen(kept) == [6, 7, 8]


def test_a_resumed_epoch_knows_its_sinks_and_how_long_it_is() -> None:
    recipe = replace(RECIPE, sink_frames=1, window_frames=6)
    kept = memory(recipe, RecomputeAnchor.LATENT)
    for chunk in range(3):
        remember(kept, chunk)
    again = memory(recipe, RecomputeAnchor.LATENT)
    again.resume(num_frames=3, sinks=kept.sinks)
    for chunk in (1, 2):
        remember(again, chunk)
    assert seen(again) == seen(kept) == [0, 6, 7, 8]


def test_a_new_epoch_has_no_context() -> None:
    kept = memory(KREA, RecomputeAnchor.DECODED)
    with pytest.raises(OrderError, match="no finished chunk in this epoch"):
        kept.context()
    remember(kept, 0)
    kept.reset()
    with pytest.raises(OrderError, match="no finished chunk in this epoch"):
        kept.context()
    remember(kept, 0)
    assert seen(kept) == [0, 1, 2]


@pytest.mark.parametrize(
    ("recipe", "mode", "every", "message"),
    [
        (RECIPE, "r0a", None, "clean passes and has no recompute"),
        (RECIPE, None, 2, "clean passes and has no recompute"),
        (KREA, "r1", 2, "drop one of them"),
        (KREA, "r9", None, "choose one of r1, r0a, r0"),
    ],
)
def test_contradicting_recompute_settings_are_one_sentence(
    recipe: Recipe, mode: str | None, every: int | None, message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        choose_recompute(recipe, mode, every=every)


def test_a_recompute_model_recomputes_every_chunk_with_its_decoded_anchor() -> None:
    chosen = choose_recompute(KREA, None, every=None)
    assert (chosen.every, chosen.anchor) == (1, RecomputeAnchor.DECODED)
    assert choose_recompute(KREA, "r1", every=None).every == RECOMPUTE_NEVER
    assert choose_recompute(KREA, "r0", every=3).anchor is RecomputeAnchor.LATENT
