"""How much of a recorded stream can be run again."""

from scope_contracts.envelope import INPUT_LATENTS
from scope_rt.control.log_entries import recorded_transition
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import RecomputeText
from scope_rt.record.reader import StreamHistory


def num_recorded(stream: StreamHistory) -> int:
    """Chunks up to the last finished one before the first of which nothing is known, or whose
    latents found no room on the disk."""
    without = {index for index, done in stream.finished.items() if done.latents is None}
    num_planned = 0
    while num_planned in stream.envelopes and num_planned not in without:
        num_planned += 1
    return max((index + 1 for index in stream.finished if index < num_planned), default=0)


def num_before_pictures(stream: StreamHistory) -> int | None:
    """Chunks before the first that began with pictures, which no recording has; None where none
    did."""
    for index, envelope in sorted(stream.envelopes.items()):
        if any(spec.name == INPUT_LATENTS for spec in envelope.tensors):
            return index
    return None


def num_before_lost_state(stream: StreamHistory, recipe: Recipe) -> int | None:
    """Chunks before the first that followed from what ranks no longer had, where ranks that have it
    would make another; None where there is none."""
    for restart in stream.restarts:
        envelope = stream.envelopes.get(restart.chunk_index)
        if envelope is None or not envelope.do_kv_recompute:
            continue
        # A cache that is lost is rebuilt; one that is held would be made again where it lies.
        # A recompute under the text before has that of its own chunk, where none was known.
        is_before = recipe.recompute_text is RecomputeText.PREVIOUS
        if recipe.recaches or (is_before and _has_new_text(stream, restart.chunk_index)):
            return restart.chunk_index
    return None


def _has_new_text(stream: StreamHistory, chunk_index: int) -> bool:
    """Whether a chunk may have another text than the one before it. Raises `FieldError`."""
    for control in stream.controls:
        if control.embeds_sha256:
            transition = recorded_transition(control)
            num_chunks = 1 if transition is None else transition.num_chunks
            if 0 <= chunk_index - control.chunk_index < num_chunks:
                return True
    return False
