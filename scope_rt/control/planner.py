"""Plans are pure: the next chunk follows from the last one and what a person asked for.

No device, no clock, no network. Only the planner bumps an epoch or sets a reset bit.
"""

from dataclasses import dataclass, replace

from scope_contracts.envelope import MessageKind, PlanId, PPEnvelope
from scope_rt.models.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What stays the same over a stream. Sizes in pixels."""

    plan_id: PlanId
    recipe: Recipe
    height: int
    width: int
    base_seed: int
    kv_cache_attention_bias: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The position of a stream; `next` gives the plan of a chunk and the position after it."""

    settings: StreamSettings
    next_call_id: int = 0
    next_chunk_index: int = 0
    cache_epoch: int = -1
    next_start_frame: int = 0

    def next(self, *, hard_cut: bool, new_text: bool) -> tuple[PPEnvelope, "Planner"]:
        """Plan the next chunk; tensors are announced when the controller packs them.

        The first chunk of a stream is a hard cut whatever is asked for.
        """
        recipe = self.settings.recipe
        cut = hard_cut or self.cache_epoch < 0
        epoch = self.cache_epoch + cut
        start_frame = 0 if cut else self.next_start_frame
        timesteps = recipe.timesteps
        envelope = PPEnvelope(
            plan_id=self.settings.plan_id,
            call_id=self.next_call_id,
            chunk_index=self.next_chunk_index,
            cache_epoch=epoch,
            kind=MessageKind.INFER,
            init_cache=cut,
            reset_kv_cache=cut,
            reset_crossattn_cache=cut or new_text,
            current_start_frame=start_frame,
            do_kv_recompute=False,
            clean_pass=recipe.clean_pass,
            num_denoise_steps=len(timesteps),
            expected_generator_calls=len(timesteps) + recipe.clean_pass,
            kv_cache_attention_bias=self.settings.kv_cache_attention_bias,
            denoising_step_list=timesteps,
            height=self.settings.height,
            width=self.settings.width,
            base_seed=self.settings.base_seed,
        )
        following = replace(
            self,
            next_call_id=self.next_call_id + 1,
            next_chunk_index=self.next_chunk_index + 1,
            cache_epoch=epoch,
            next_start_frame=start_frame + recipe.frames_per_block,
        )
        return envelope, following
