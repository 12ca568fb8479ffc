"""One envelope in, one chunk of latents out; every step reads the plan and decides nothing.

All calls of a chunk write the same window of the cache, which advances once. A recompute re-bases
the cache: its context sits at positions 0..n-1, the chunk follows. Every call is announced to its
budget before the model (and its collectives) is entered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    INPUT_LATENTS,
    LATENTS_IN,
    RECOMPUTE_EMBEDS,
    PPEnvelope,
)
from scope_contracts.errors import OrderError, ParityError
from scope_rt.attention.backend import AttentionBackend
from scope_rt.attention.key_bias import key_bias
from scope_rt.kv_cache.frame_cache import FrameCache, WriteWindow
from scope_rt.models.causal_wan import CausalWanModel, Modulation, TextKV
from scope_rt.models.chunk_attention import (
    BlockCausalSelfAttention,
    CachedSelfAttention,
    TurnInWindow,
)
from scope_rt.models.feedback import Feedback, own_latents
from scope_rt.models.noise import NoiseSource
from scope_rt.models.precision import wide
from scope_rt.models.recipe_choices import Positions, RecomputeText
from scope_rt.models.rope import rotations
from scope_rt.models.schedule import FlowSchedule
from scope_rt.tensor_digests import TensorDigests
from scope_rt.tensors import digest_of


class CallObserver(Protocol):
    """Sees every generator call: timestep, the chunk's first token, and the window it wrote."""

    def __call__(self, timestep: float, start_token: int, indices: CacheIndices) -> None: ...


def ignore_calls(timestep: float, start_token: int, indices: CacheIndices) -> None:
    """The observer of a stream that is not being recorded."""


@dataclass(slots=True, kw_only=True)
class ChunkGenerator:
    """Owns what a rank's model carries from chunk to chunk: the cache and the text K/V."""

    model: CausalWanModel
    cache: FrameCache
    schedule: FlowSchedule
    backend: AttentionBackend
    noise: NoiseSource
    observe: CallObserver = ignore_calls
    feedback: Feedback = own_latents
    recompute_text: RecomputeText = RecomputeText.CURRENT
    recaches: bool = False
    """Whether a recompute makes again in place what is held."""
    positions: Positions = Positions.IN_EPOCH
    _origin_frame: int = 0
    """The latent frame of the epoch that sits at the cache's position 0."""
    text_digest: str = ""
    """Digest of the conditioning in effect."""
    derived: TensorDigests = field(default_factory=TensorDigests)
    """Of what was computed once and is used for many chunks, as it was when it was made."""
    text: Sequence[TextKV] = ()
    """Every layer's text K/V in effect."""
    text_of_recompute: Sequence[TextKV] = ()
    """The same under which the last recompute ran."""
    modulations: dict[float, Modulation] = field(default_factory=dict)
    """By timestep, in the order in which they were made."""
    noise_drawn: list[Tensor] = field(default_factory=list)
    """The re-noise of the last chunk, in order: equal on all ranks."""
    windows: list[WriteWindow] = field(default_factory=list)
    """Of the last chunk: a recompute's, then its own."""
    last_input: Tensor | None = None
    """What the model was called with last, `[B, F, C, H/8, W/8]`."""

    @torch.inference_mode()
    def generate(
        self,
        envelope: PPEnvelope,
        tensors: Mapping[str, Tensor],
        enter_call: Callable[[], None],
    ) -> Tensor:
        """The chunk's latents `[B, F, C, H/8, W/8]`, in the dtype of `latents_in`; of a chunk
        without steps `latents_in` themselves, which the clean pass writes into the cache.

        `tensors` hold `latents_in`, `conditioning_embeds` where `reset_crossattn_cache` is set and
        `context_frames_override` where `do_kv_recompute` is; `recompute_embeds`, if any, are the
        text of a recompute that runs under the one before; with `input_latents` the chunk begins
        with those, and `latents_in` are the noise that is added. `enter_call` is called before
        every generator call and refuses one that was not planned.

        Raises:
            CacheError: the chunk does not continue the cache.
            CallCountError: `enter_call` refused.
            OrderError: no text was ever received.
        """
        self.windows = []
        if envelope.reset_kv_cache:
            self.cache.reset()
            self._origin_frame = 0
        # Ranks that were started again are told the text before where it is another.
        if RECOMPUTE_EMBEDS in tensors:
            self.text = self._text_kv(tensors[RECOMPUTE_EMBEDS])
        is_before = self.recompute_text is RecomputeText.PREVIOUS and bool(self.text)
        if is_before:
            self._rebuild(envelope, tensors, enter_call)
        self._take_text(envelope, tensors)
        if not is_before:
            self._rebuild(envelope, tensors, enter_call)
        x = wide(self._on_device(tensors[LATENTS_IN]))
        num_frames, grid = x.shape[1], (x.shape[3] // 2, x.shape[4] // 2)
        start = envelope.current_start_frame - self._origin_frame
        window = self._opened(self.cache.window(start_frame=start, num_frames=num_frames))
        rope = self._given_rope(range(start, start + num_frames), grid)
        biased = self._attention(window, num_frames, envelope.kv_cache_attention_bias, grid)
        steps = envelope.denoising_step_list
        if INPUT_LATENTS in tensors:
            given, sigma = wide(self._on_device(tensors[INPUT_LATENTS])), self._first_sigma(steps)
            x = (1 - sigma) * given + sigma * x
        self.noise_drawn, x0 = [], x  # clean already, where no step is planned
        for index, timestep in enumerate(steps):
            biased.is_last = not envelope.clean_pass and index + 1 == len(steps)
            flow = self._call(x, timestep, rope, biased, enter_call, start)
            x0 = x - self.schedule.sigma(timestep) * flow
            if index + 1 < len(steps):
                sigma = self.schedule.sigma(steps[index + 1])
                x = (1 - sigma) * x0 + sigma * self._renoise(envelope, index + 1, x0)
        # What is fed back is what others are given: a replay feeds back what was recorded.
        x0 = x0.to(tensors[LATENTS_IN].dtype)
        if envelope.clean_pass:
            plain = self._attention(window, num_frames, 1.0, grid)
            plain.is_last = True
            past = self._on_device(self.feedback(envelope.chunk_index, x0))
            self._call(past, 0.0, rope, plain, enter_call, start)
        self.cache.advance(window)
        return x0

    def _first_sigma(self, steps: Sequence[float]) -> float:
        """The noise level at which a chunk begins that is given pictures."""
        return self.schedule.sigma(steps[0])

    def _take_text(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        """Make every layer's text K/V where a new text comes."""
        if envelope.reset_crossattn_cache:
            embeds = tensors[CONDITIONING_EMBEDS]
            self.text = self._text_kv(embeds)
            self.text_digest = digest_of(embeds)
            for layer in range(len(self.text)):
                self._note_text(layer)
        elif CONDITIONING_EMBEDS in tensors:
            self._check_text(envelope, digest_of(tensors[CONDITIONING_EMBEDS]))
        if not self.text:
            raise OrderError(f"chunk {envelope.chunk_index}: no conditioning_embeds so far")

    def _text_kv(self, embeds_BLE: Tensor) -> Sequence[TextKV]:
        return self.model.text_kv(self._on_device(embeds_BLE)[:, None])

    def _rebuild(
        self, envelope: PPEnvelope, tensors: Mapping[str, Tensor], enter_call: Callable[[], None]
    ) -> None:
        """The recompute that an envelope asks for, under the text in effect."""
        if not envelope.do_kv_recompute:
            return
        context = self._on_device(tensors[CONTEXT_FRAMES_OVERRIDE])
        self.text_of_recompute = self.text
        if self.recaches and self.cache.indices.global_end_index:
            self._recache(context, enter_call)
            return
        # A rollout begins where its context does; Krea's recompute is told at its chunk.
        at_frame = 0 if envelope.clean_pass else context.shape[1]
        self._recompute(context, tensors[LATENTS_IN].shape[1], enter_call, at_frame)
        self._origin_frame = envelope.current_start_frame - context.shape[1]

    def _check_text(self, envelope: PPEnvelope, digest: str) -> None:
        """In bring-up mode text comes with every chunk; without its bit it must be what is held."""
        if digest != self.text_digest:
            raise ParityError(
                f"chunk {envelope.chunk_index}: conditioning_embeds differ from those in effect "
                f"({digest} against {self.text_digest}), and reset_crossattn_cache is not set"
            )

    def _recompute(
        self,
        context_BFCHW: Tensor,
        block_frames: int,
        enter_call: Callable[[], None],
        at_frame: int,
    ) -> None:
        """Rebuild the cache from clean latents, under the text in effect: one call at t=0."""
        _, num_frames, _, height, width = context_BFCHW.shape
        self.cache.reset()
        window = self._opened(self.cache.window(start_frame=0, num_frames=num_frames))
        attend = BlockCausalSelfAttention(
            cache=self.cache,
            window=window,
            backend=self.backend,
            block_tokens=block_frames * self.cache.spec.frame_tokens,
            turn=self._turn(window, num_frames, (height // 2, width // 2)),
        )
        rope = self._given_rope(range(num_frames), (height // 2, width // 2))
        self._call(context_BFCHW, 0.0, rope, attend, enter_call, at_frame)
        self.cache.advance(window)

    def _recache(self, context_BFCHW: Tensor, enter_call: Callable[[], None]) -> None:
        """Make the latest frames again under the text in effect: one call at t=0, without a mask,
        at the positions that they have."""
        _, num_frames, _, height, width = context_BFCHW.shape
        end = self.cache.indices.global_end_index // self.cache.spec.frame_tokens
        start = end - num_frames
        window = self._opened(self.cache.window_in_place(start_frame=start, num_frames=num_frames))
        grid = (height // 2, width // 2)
        attend = self._attention(window, num_frames, 1.0, grid)
        attend.is_last = True
        rope = self._given_rope(range(start, end), grid)
        self._call(context_BFCHW, 0.0, rope, attend, enter_call, start)
        self.cache.advance(window)

    def _opened(self, window: WriteWindow) -> WriteWindow:
        self.windows.append(window)
        return window

    def _call(
        self,
        x: Tensor,
        timestep: float,
        rope: Tensor,
        attend: CachedSelfAttention | BlockCausalSelfAttention,
        enter_call: Callable[[], None],
        start_frame: int,
    ) -> Tensor:
        """One generator call: one forward over all tokens of the chunk."""
        enter_call()
        modulation = self._modulation(timestep)
        self.last_input = x
        flow = self.model(x, modulation=modulation, rope=rope, text=self.text, attend=attend)
        indices = attend.window.indices
        self.observe(timestep, start_frame * self.cache.spec.frame_tokens, indices)
        return flow.to(x.dtype)  # type: ignore[no-any-return]

    def _modulation(self, timestep: float) -> Modulation:
        """The modulation of a noise level, computed when it first occurs in the stream."""
        if timestep not in self.modulations:
            times = torch.full((1, 1), timestep, dtype=torch.float64, device=self.cache.device)
            self.modulations[timestep] = self.model.modulation(times)
            self._note_modulation(timestep)
        return self.modulations[timestep]

    def _attention(
        self, window: WriteWindow, num_frames: int, bias: float, grid: tuple[int, int]
    ) -> CachedSelfAttention:
        bias_of_keys = key_bias(
            window.frames_in_view,
            num_current=num_frames,
            frame_tokens=self.cache.spec.frame_tokens,
            bias=bias,
            log_weights=window.log_weights,
        )
        return CachedSelfAttention(
            cache=self.cache,
            window=window,
            backend=self.backend,
            bias=bias_of_keys,
            turn=self._turn(window, num_frames, grid),
        )

    def _turn(
        self, window: WriteWindow, num_frames: int, grid: tuple[int, int]
    ) -> TurnInWindow | None:
        """For a chunk of `num_frames`, the newest in view."""
        if self.positions is Positions.IN_EPOCH:
            return None
        view = window.frames_in_view
        place = {frame: number for number, frame in enumerate(sorted(view))}
        queries = range(len(view) - num_frames, len(view))
        return TurnInWindow(
            self._rope(queries, grid), self._rope([place[frame] for frame in view], grid)
        )

    def _given_rope(self, frames: range, grid: tuple[int, int]) -> Tensor:
        """By which the model turns queries and keys: not at all where their places may change."""
        rope = self._rope(frames, grid)
        return rope if self.positions is Positions.IN_EPOCH else torch.ones_like(rope)

    def _rope(self, frames: Sequence[int], grid: tuple[int, int]) -> Tensor:
        double = self.model.dtype is torch.float64
        return rotations(
            frames,
            grid=grid,
            head_dim=self.cache.spec.head_dim,
            dtype=torch.complex128 if double else torch.complex64,
        ).to(self.cache.device)

    def _renoise(self, envelope: PPEnvelope, step: int, x0: Tensor) -> Tensor:
        noise = self.noise.draw(
            base_seed=envelope.base_seed,
            cache_epoch=envelope.cache_epoch,
            chunk_index=envelope.chunk_index,
            step=step,
            shape=tuple(x0.shape),
        )
        self.noise_drawn.append(noise)
        return noise.to(x0.device, x0.dtype)

    def _note_text(self, layer: int) -> None:
        self.derived.note(f"text keys of layer {layer}", lambda: self.text[layer].k)
        self.derived.note(f"text values of layer {layer}", lambda: self.text[layer].v)

    def _note_modulation(self, timestep: float) -> None:
        name = f"modulation of timestep {timestep:.17g}"
        self.derived.note(f"{name}, layers", lambda: self.modulations[timestep].layers)
        self.derived.note(f"{name}, head", lambda: self.modulations[timestep].head)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.cache.device)
