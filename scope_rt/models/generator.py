"""One envelope in, one chunk of latents out; every step reads the plan and decides nothing.

All calls of a chunk write the same window of the ring, and the indices advance once. Every call is
announced to its budget before the model (and its collectives) is entered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import CONDITIONING_EMBEDS, LATENTS_IN, PPEnvelope
from scope_contracts.errors import OrderError
from scope_rt.attention.backend import AttentionBackend, key_log_bias
from scope_rt.kv_cache.ring import RingCache, WriteWindow
from scope_rt.models.causal_wan import CausalWanModel, Modulation, TextKV
from scope_rt.models.noise import NoiseSource
from scope_rt.models.rope import rotations
from scope_rt.models.schedule import FlowSchedule


class CallObserver(Protocol):
    """Sees every generator call: timestep, first token, and the window it wrote."""

    def __call__(self, timestep: float, start_token: int, indices: CacheIndices) -> None: ...


def ignore_calls(timestep: float, start_token: int, indices: CacheIndices) -> None:
    """The observer of a stream that is not being recorded."""


@dataclass(slots=True, kw_only=True)
class CachedSelfAttention:
    """Self-attention of one chunk: write its K/V into the ring, attend to all that is visible."""

    ring: RingCache
    window: WriteWindow
    backend: AttentionBackend
    log_bias: Tensor | None

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        self.ring.write(layer, self.window, k_BTHD, v_BTHD)
        k, v = self.ring.view(layer, self.window)
        return self.backend.attend(q_BTHD, k, v, self.log_bias)


@dataclass(slots=True, kw_only=True)
class ChunkGenerator:
    """Owns what a rank's model carries from chunk to chunk: the ring and the text K/V."""

    model: CausalWanModel
    ring: RingCache
    schedule: FlowSchedule
    backend: AttentionBackend
    noise: NoiseSource
    observe: CallObserver = ignore_calls
    _text: Sequence[TextKV] = ()
    _modulations: dict[float, Modulation] = field(default_factory=dict)

    @torch.inference_mode()
    def generate(
        self,
        envelope: PPEnvelope,
        tensors: Mapping[str, Tensor],
        enter_call: Callable[[], None],
    ) -> Tensor:
        """The chunk's latents `[B, F, C, H/8, W/8]`, in the dtype of `latents_in`.

        `tensors` hold `latents_in`, and `conditioning_embeds` where `reset_crossattn_cache` is set.
        `enter_call` is called before every generator call and refuses one that was not planned.

        Raises:
            CacheError: the chunk does not continue the ring.
            CallCountError: `enter_call` refused.
            OrderError: no text was ever received.
        """
        if envelope.reset_kv_cache:
            self.ring.reset()
        if envelope.reset_crossattn_cache:
            self._text = self.model.text_kv(self._on_device(tensors[CONDITIONING_EMBEDS])[:, None])
        if not self._text:
            raise OrderError(f"chunk {envelope.chunk_index}: no conditioning_embeds so far")
        x = self._on_device(tensors[LATENTS_IN])
        num_frames, start = x.shape[1], envelope.current_start_frame
        grid = (x.shape[3] // 2, x.shape[4] // 2)
        window = self.ring.window(start_frame=start, num_frames=num_frames)
        rope = self._rope(range(start, start + num_frames), grid)
        biased = self._attention(window, num_frames, envelope.kv_cache_attention_bias)
        steps = envelope.denoising_step_list
        for index, timestep in enumerate(steps):
            flow = self._call(x, timestep, rope, biased, enter_call, start)
            x0 = x - self.schedule.sigma(timestep) * flow
            if index + 1 < len(steps):
                sigma = self.schedule.sigma(steps[index + 1])
                x = (1 - sigma) * x0 + sigma * self._renoise(envelope, index + 1, x0)
        if envelope.clean_pass:
            plain = self._attention(window, num_frames, 1.0)
            self._call(x0, 0.0, rope, plain, enter_call, start)
        self.ring.commit(window)
        return x0

    def _call(
        self,
        x: Tensor,
        timestep: float,
        rope: Tensor,
        attend: CachedSelfAttention,
        enter_call: Callable[[], None],
        start_frame: int,
    ) -> Tensor:
        """One generator call: one forward over all tokens of the chunk."""
        enter_call()
        modulation = self._modulation(timestep)
        flow = self.model(x, modulation=modulation, rope=rope, text=self._text, attend=attend)
        indices = attend.window.indices
        self.observe(timestep, start_frame * self.ring.spec.frame_tokens, indices)
        return flow.to(x.dtype)  # type: ignore[no-any-return]

    def _modulation(self, timestep: float) -> Modulation:
        """The modulation of a noise level, computed when it first occurs in the stream."""
        if timestep not in self._modulations:
            times = torch.full((1, 1), timestep, dtype=torch.float64, device=self.ring.k.device)
            self._modulations[timestep] = self.model.modulation(times)
        return self._modulations[timestep]

    def _attention(self, window: WriteWindow, num_frames: int, bias: float) -> CachedSelfAttention:
        log_bias = key_log_bias(
            window.frames_in_view,
            num_current=num_frames,
            frame_tokens=self.ring.spec.frame_tokens,
            bias=bias,
            device=self.ring.k.device,
        )
        return CachedSelfAttention(
            ring=self.ring, window=window, backend=self.backend, log_bias=log_bias
        )

    def _rope(self, frames: range, grid: tuple[int, int]) -> Tensor:
        double = self.model.dtype is torch.float64
        return rotations(
            frames,
            grid=grid,
            head_dim=self.ring.spec.head_dim,
            dtype=torch.complex128 if double else torch.complex64,
        ).to(self.ring.k.device)

    def _renoise(self, envelope: PPEnvelope, step: int, x0: Tensor) -> Tensor:
        noise = self.noise.draw(
            base_seed=envelope.base_seed,
            cache_epoch=envelope.cache_epoch,
            chunk_index=envelope.chunk_index,
            step=step,
            shape=tuple(x0.shape),
        )
        return noise.to(x0.device, x0.dtype)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.ring.k.device)
