"""Plans are pure: the next chunk follows from the last one and what a person asked for.

No device, no clock, no network. Only the planner bumps an epoch, sets a reset bit or schedules a
recompute.
"""

from dataclasses import dataclass, replace

from scope_contracts.envelope import MessageKind, PlanId, PPEnvelope
from scope_contracts.lifecycle import StreamPosition
from scope_rt.config import RECOMPUTE_NEVER
from scope_rt.models.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What a chunk is planned with. All but `base_seed` and `kv_cache_attention_bias` stay the same
    over a stream. Sizes in pixels, `recompute_every` in chunks."""

    plan_id: PlanId
    recipe: Recipe
    height: int
    width: int
    base_seed: int
    start_frame: bool = False
    """Whether chunk 0 is a picture, which is not denoised."""
    kv_cache_attention_bias: float = 1.0
    """The resting value; a transition may leave it and comes back to it."""
    recompute_every: int = RECOMPUTE_NEVER
    bring_up: bool = False
    """Whether text travels with every chunk, so that the mesh can compare it with what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCounts:
    """How far a stream is planned; the defaults stand before its first chunk."""

    next_call_id: int = 0
    next_chunk_index: int = 0
    cache_epoch: int = -1
    next_start_frame: int = 0
    chunks_in_epoch: int = 0

    @property
    def position(self) -> StreamPosition:
        """The last planned ids: what ranks must know that join here."""
        return StreamPosition(
            call_id=self.next_call_id - 1,
            chunk_index=self.next_chunk_index - 1,
            cache_epoch=self.cache_epoch,
            next_start_frame=self.next_start_frame,
        )

    def cut_before(self, chunk_index: int) -> "PlannedCounts":
        """Those of a stream that continues before an earlier chunk, by a hard cut."""
        return replace(
            self,
            next_call_id=self.next_call_id - self.next_chunk_index + chunk_index,
            next_chunk_index=chunk_index,
            next_start_frame=0,
            chunks_in_epoch=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """A stream between two plans; `next` gives the plan of a chunk and the planner after it."""

    settings: StreamSettings
    counts: PlannedCounts = PlannedCounts()
    holds_cache: bool = True
    """False after ranks were started again: the mesh has no cache until one is rebuilt."""

    def steered(self, *, seed: int | None, bias: float | None) -> "Planner":
        """The same from here on with another base seed or resting bias; None leaves it."""
        if seed is None and bias is None:
            return self
        settings = self.settings
        return replace(
            self,
            settings=replace(
                settings,
                base_seed=settings.base_seed if seed is None else seed,
                kv_cache_attention_bias=settings.kv_cache_attention_bias if bias is None else bias,
            ),
        )

    def recomputes(self, *, hard_cut: bool, asked: bool, new_text: bool) -> bool:
        """Whether the next chunk would rebuild the cache, and so needs all chunks before it."""
        if self._cuts(hard_cut):
            return False
        due = self.counts.chunks_in_epoch % self.settings.recompute_every == 0
        due = due or self.settings.recipe.rolls_at(self.counts.next_start_frame)
        recached = new_text and self.settings.recipe.recaches
        return asked or due or recached or not self.holds_cache

    def next(
        self,
        *,
        hard_cut: bool,
        new_text: bool,
        recompute: bool = False,
        bias: float | None = None,
        noise_scale: float | None = None,
    ) -> tuple[PPEnvelope, "Planner"]:
        """Plan the next chunk; tensors are announced when the pipeline packs them.

        The first chunk of a stream is a hard cut whatever is asked for. `bias` is the resting one
        where it is not given; with a `noise_scale` the chunk begins with pictures, at that level.
        """
        settings, recipe, counts = self.settings, self.settings.recipe, self.counts
        cut = self._cuts(hard_cut)
        rebuild = self.recomputes(hard_cut=hard_cut, asked=recompute, new_text=new_text)
        epoch = counts.cache_epoch + cut
        start_frame = 0 if cut else counts.next_start_frame
        timesteps = self._timesteps(cut=cut)
        if noise_scale is not None:
            timesteps = recipe.timesteps_from(noise_scale, timesteps)
        envelope = PPEnvelope(
            plan_id=settings.plan_id,
            call_id=counts.next_call_id,
            chunk_index=counts.next_chunk_index,
            cache_epoch=epoch,
            kind=MessageKind.INFER,
            init_cache=cut,
            reset_kv_cache=cut,
            reset_crossattn_cache=cut or new_text or not self.holds_cache,
            current_start_frame=start_frame,
            do_kv_recompute=rebuild,
            clean_pass=recipe.clean_pass,
            num_denoise_steps=len(timesteps),
            expected_generator_calls=len(timesteps) + recipe.clean_pass + rebuild,
            kv_cache_attention_bias=settings.kv_cache_attention_bias if bias is None else bias,
            denoising_step_list=timesteps,
            height=settings.height,
            width=settings.width,
            base_seed=settings.base_seed,
        )
        following = PlannedCounts(
            next_call_id=counts.next_call_id + 1,
            next_chunk_index=counts.next_chunk_index + 1,
            cache_epoch=epoch,
            next_start_frame=start_frame + recipe.frames_per_block,
            chunks_in_epoch=1 if cut else counts.chunks_in_epoch + 1,
        )
        return envelope, Planner(settings=settings, counts=following)

    def begins_epoch(self, *, hard_cut: bool) -> bool:
        """Whether the next chunk would be the first of an epoch."""
        return self._cuts(hard_cut)

    @property
    def takes_pictures(self) -> bool:
        """Whether the next chunk may begin with pictures: a start frame is one already."""
        return not (self.settings.start_frame and self.counts.next_chunk_index == 0)

    def _timesteps(self, *, cut: bool) -> tuple[float, ...]:
        """Of the next chunk: none of a start frame, and an epoch's first of the chunk after it."""
        recipe, begins_with = self.settings.recipe, self.settings.start_frame
        if begins_with and self.counts.next_chunk_index == 0:
            return ()
        is_first = cut or (begins_with and self.counts.next_chunk_index == 1)
        return recipe.first_chunk_timesteps if is_first else recipe.timesteps

    def _cuts(self, hard_cut: bool) -> bool:
        """A lost cache that no context can rebuild leaves only a new epoch."""
        beyond_repair = not self.holds_cache and self.settings.recipe.context_frames == 0
        return hard_cut or self.counts.cache_epoch < 0 or beyond_repair
