"""In `tp_v0` every rank runs the whole pipeline from broadcast parameters, in lockstep.

What a rank can work out for itself does not travel: it draws its own noise, decodes its own frames
and takes recompute context from them. A start frame does: rank0 alone has the picture. Simple to
bring up and easy to compare; and dear, because every rank decodes. Ranks on unlike hardware may
derive unlike context, which the digests of a link see: they cover what was derived as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from scope_contracts.envelope import (
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    LATENTS_OUT,
    MessageKind,
    PPEnvelope,
    PPResult,
)
from scope_rt.control.context import Context
from scope_rt.control.tail import StreamTail
from scope_rt.models.feedback import Feedback, own_latents
from scope_rt.models.noise import INITIAL, NoiseSource
from scope_rt.tensors import TORCH_DTYPES
from scope_rt.vae.codec import StreamingDecoder
from scope_rt.watchdog import Watchdog

_DERIVED = frozenset({LATENTS_IN, CONTEXT_FRAMES_OVERRIDE})


def derived_of(message: PPEnvelope | PPResult) -> frozenset[str]:
    """Tensors that a message of `tp_v0` announces and that every rank makes for itself: noise, and
    not a start frame."""
    is_given = isinstance(message, PPEnvelope) and not message.num_denoise_steps
    return _DERIVED - {LATENTS_IN} if is_given else _DERIVED


@dataclass(slots=True, kw_only=True)
class FullPipeline:
    """What a follower of `tp_v0` has beside its generator: noise, a decoder and a context."""

    noise: NoiseSource
    decoder: StreamingDecoder
    context: Context
    feedback: Feedback = own_latents
    watchdog: Watchdog = field(default_factory=Watchdog)
    _starts_epoch: bool = False
    _holds_cache: bool = False
    """Whether this rank has planned a chunk since it started."""

    def derive(self, envelope: PPEnvelope, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors of `envelope`, in the order it announces them; of those that `derived_of`
        names, none was received."""
        tensors = dict(received)
        if envelope.kind is MessageKind.SHUTDOWN:
            return tensors
        self._starts_epoch = envelope.init_cache
        specs = {spec.name: spec for spec in envelope.tensors}
        if LATENTS_IN not in tensors:
            latents = specs[LATENTS_IN]
            noise = self.noise.draw(
                base_seed=envelope.base_seed,
                cache_epoch=envelope.cache_epoch,
                chunk_index=envelope.chunk_index,
                step=INITIAL,
                shape=latents.shape,
            )
            tensors[LATENTS_IN] = noise.to(TORCH_DTYPES[latents.dtype])
        if CONTEXT_FRAMES_OVERRIDE in specs:
            dtype = TORCH_DTYPES[specs[CONTEXT_FRAMES_OVERRIDE].dtype]
            with self.watchdog.section("planning", chunk=envelope.chunk_index):
                context = self.context.context(holds_cache=self._holds_cache)
                tensors[CONTEXT_FRAMES_OVERRIDE] = context.to(dtype)
        self._holds_cache = True
        return {name: tensors[name] for name in specs}

    def rebuild(self, tail: StreamTail) -> None:
        """Continue a stream of which these are the last chunks."""
        for _ in tail.replay(self.decoder, self.context, self.watchdog):
            pass

    def remember(self, result: PPResult, tensors: Mapping[str, Tensor]) -> None:
        """Decode and keep what this rank generated, as rank0 does with its own."""
        if self._starts_epoch:
            self.context.reset()
            self.decoder.reset()
        latents = tensors[LATENTS_OUT]
        self.context.remember_latents(self.feedback(result.chunk_index, latents))
        with self.watchdog.section("decoding", chunk=result.chunk_index):
            frames = self.decoder.decode(latents.float())
        self.context.remember_frames(frames)
