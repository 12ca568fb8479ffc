"""Every plan is worked out a second time, from what was asked for alone, before it leaves rank0.

Generator ranks verify what they make of an envelope. That the envelope is the one that was asked
for, only rank0 can tell: sizes and steps are those of the stream's start; a cut, a prompt, a seed,
a bias, a rebuild and each step of a transition happen at the chunk that took them. Nothing here
calls what plans: neither the planner nor the transition.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.envelope import PPEnvelope
from scope_contracts.integrity import suspect_from
from scope_rt.checks import Checks
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.planner import StreamSettings
from scope_rt.control.position import Position
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.models.recipe_choices import TransitionWeights
from scope_rt.models.schedule import NOISE_LEVELS, NUM_TRAIN_TIMESTEPS
from scope_rt.tensors import sha256_of

Planned = tuple[str, object, object]
"""What was planned: its name, the value, and what it must be."""
_BIAS_ROUNDING, _TURN_ROUNDING = 1e-12, 4
"""Of a bias, absolute; of embeddings between two prompts, in units in the last place of the
longest number."""
_SMALLEST_SINE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """A transition under way, of which `step` chunks were planned."""

    source: Conditioning
    target: Conditioning
    spec: TransitionSpec
    """Not the one that is planned by."""
    step: int
    weights: TransitionWeights

    @property
    def share(self) -> float:
        """Of the way from source to target, in this chunk."""
        if self.weights is TransitionWeights.OFF_SOURCE:
            return self.step / self.spec.num_chunks
        return (self.step - 1) / max(1, self.spec.num_chunks - 1)

    @property
    def is_over(self) -> bool:
        return self.step == self.spec.num_chunks

    def bias(self, rest: float) -> float:
        """Farthest from rest in the middle, where the logarithm is that of the floor."""
        away = (1 - math.cos(2 * math.pi * self.step / self.spec.num_chunks)) / 2
        return float(rest * (self.spec.bias_floor / rest) ** away)

    def distance(self, embeds: Tensor) -> tuple[float, float]:
        """The largest difference of `embeds` from what they must be here, and its bound."""
        source, target = (x.embeds.double().cpu().numpy() for x in (self.source, self.target))
        want = source + self.share * (target - source)
        if self.spec.method is Interpolation.SLERP:
            want = _turned(source, target, self.share, straight=want)
        info = torch.finfo(embeds.dtype)
        want = want.clip(-info.max, info.max)
        bound = _TURN_ROUNDING * info.eps * float(abs(want).max(initial=info.tiny))
        return float(abs(embeds.double().cpu().numpy() - want).max()), bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What is in effect after a chunk, by what was asked for."""

    text: Conditioning | None
    way: _Way | None
    is_first: bool
    """Whether no chunk was planned in this process."""
    weights: TransitionWeights
    base_seed: int
    rest: float
    """The resting bias."""

    @classmethod
    def at(cls, position: Position) -> "Asked":
        """Where this process begins; what it resumed is taken as it is."""
        text, under_way, way = position.text, position.transition, None
        settings = position.planner.settings
        weights = settings.recipe.transition_weights
        if text is not None and under_way is not None:
            way = _Way(
                source=Conditioning("", under_way.source),
                target=Conditioning(text.prompt, under_way.target),
                spec=replace(under_way.spec),
                step=under_way.step,
                weights=weights,
            )
        return cls(
            text=text,
            way=way,
            is_first=True,
            weights=weights,
            base_seed=settings.base_seed,
            rest=settings.kv_cache_attention_bias,
        )

    def after(self, directive: Directive, *, is_cut: bool) -> "Asked":
        """What is in effect at the chunk that takes `directive`."""
        text, way = self.text, self.way
        if directive.conditioning is not None:
            posted, spec, way = directive.conditioning, directive.transition, None
            if spec is not None and text is not None and not is_cut:
                own, weights = replace(spec), self.weights
                way = _Way(source=text, target=posted, spec=own, step=0, weights=weights)
            else:
                text = posted
        elif is_cut and way is not None:
            text, way = way.target, None
        if way is not None:
            way = replace(way, step=way.step + 1)
            text = way.target if way.is_over else text
        is_under_way = way is not None and not way.is_over
        return Asked(
            text=text,
            way=way if is_under_way else None,
            is_first=False,
            weights=self.weights,
            base_seed=self.base_seed if directive.seed is None else directive.seed,
            rest=self.rest if directive.bias is None else directive.bias,
        )


class PlanCheck:
    """One stream's; the pipeline asks it of every plan, in order."""

    def __init__(self, position: Position, checks: Checks) -> None:
        settings = position.planner.settings
        self._checks, recipe = checks, settings.recipe
        self._first = _stated(settings, recipe.first_chunk_timesteps)
        """Of the first chunk of an epoch that is denoised."""
        self._later, self._given = _stated(settings, recipe.timesteps), _stated(settings, ())
        self._has_start_frame = settings.start_frame
        self._asked = Asked.at(position)

    def verify(
        self,
        directive: Directive,
        envelope: PPEnvelope,
        following: Position,
        *,
        noise_scale: float | None = None,
    ) -> Asked:
        """Verify the plan of the next chunk, which begins with pictures where there is a
        `noise_scale`; returns what is in effect then, for `planned`.

        Reads embeddings in the middle of a transition only.

        Raises:
            IntegrityError: naming the chunk, and what was planned otherwise.
        """
        # Ranks that were started again hold no cache: a first plan may have to cut unasked.
        cuts = directive.hard_cut or (self._asked.is_first and envelope.init_cache)
        asked = self._asked.after(directive, is_cut=directive.hard_cut)
        chunk, text = envelope.chunk_index, following.text
        assert text is not None, "a plan has a text"
        with suspect_from(chunk):
            stated = self._stated_at(chunk, cuts=cuts)
            if noise_scale is not None:
                stated = stated.from_level(noise_scale, envelope.denoising_step_list)
            for what, got, want in self._all_of(
                directive, envelope, text, asked, stated, cuts=cuts
            ):
                if got != want:
                    self._checks.planned(chunk, what, got=got, asked=want)
        return asked if asked.text is text else replace(asked, text=text)

    def planned(self, asked: Asked) -> None:
        """The chunk left: the next one follows on it."""
        self._asked = asked

    def _stated_at(self, chunk: int, *, cuts: bool) -> "_Stated":
        """A start frame is the stream's first chunk, and the one after it the first with steps."""
        if self._has_start_frame and chunk < 2:
            return self._first if chunk else self._given
        return self._first if cuts else self._later

    def _all_of(
        self,
        directive: Directive,
        envelope: PPEnvelope,
        text: Conditioning,
        asked: Asked,
        as_asked: "_Stated",
        *,
        cuts: bool,
    ) -> Iterator[Planned]:
        stated = _stated_in(envelope)
        if stated != as_asked.values:
            yield from zip(_STATED, stated, as_asked.values, strict=True)
        yield "base_seed", envelope.base_seed, asked.base_seed
        yield "init_cache", envelope.init_cache, cuts
        yield "reset_kv_cache", envelope.reset_kv_cache, cuts
        if directive.recompute and not cuts:
            yield "do_kv_recompute", envelope.do_kv_recompute, True
        way, before, bias = asked.way, self._asked.text, envelope.kv_cache_attention_bias
        if way is not None:
            yield "prompt", text.prompt, way.target.prompt
            for end, kept in (("first", way.source), ("last", way.target)):
                name = f"with the transition's {end} embeddings"
                yield name, sha256_of(kept.embeds), kept.embeds_sha256
            distance, bound = way.distance(text.embeds)
            yield "embeddings beside the transition's", 0 if distance <= bound else distance, 0
            want = way.bias(asked.rest)
            is_close = abs(bias - want) <= _BIAS_ROUNDING
            yield "kv_cache_attention_bias", bias, bias if is_close else want
        elif asked.text is not None:
            yield "prompt", text.prompt, asked.text.prompt
            yield "embeddings", text.embeds_sha256, asked.text.embeds_sha256
            yield "kv_cache_attention_bias", bias, asked.rest
        if before is None or before.embeds_sha256 != text.embeds_sha256:
            yield "reset_crossattn_cache", envelope.reset_crossattn_cache, True


_STATED = ("height", "width", "denoising_step_list", "clean_pass")
_stated_in = attrgetter(*_STATED)


@dataclass(frozen=True, slots=True)
class _Stated:
    """What all envelopes of a stream have alike, as it is at its start, beside their steps."""

    values: tuple[object, ...]
    steps: tuple[float, ...]
    shift: float

    def from_level(self, noise_scale: float, planned: tuple[float, ...]) -> "_Stated":
        """Of a chunk that begins with pictures at a noise level: which step is `planned` for it may
        be any of that level, and after it come those below."""
        first = planned[0] if planned else 0.0
        # Levels lie on a grid, and the schedule's entries nowhere further apart than this.
        apart = 0.5 / NOISE_LEVELS + 0.5 * self.shift / NUM_TRAIN_TIMESTEPS
        is_near = abs(first / NUM_TRAIN_TIMESTEPS - noise_scale) <= max(apart, 1 / NOISE_LEVELS)
        below = tuple(step for step in self.steps if step < first)
        steps = (first if is_near else noise_scale * NUM_TRAIN_TIMESTEPS, *below)
        height, width, _, clean_pass = self.values
        return _Stated((height, width, steps, clean_pass), self.steps, self.shift)


def _stated(settings: StreamSettings, steps: tuple[float, ...]) -> _Stated:
    recipe = settings.recipe
    values = (settings.height, settings.width, steps, recipe.clean_pass)
    return _Stated(values, steps, recipe.shift)


def _turned(
    source: NDArray[np.float64],
    target: NDArray[np.float64],
    share: float,
    *,
    straight: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Each vector's direction in the plane of both, its length in between: by the part of the
    target that is across the source, where the transition weighs both by sines."""
    lengths = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (source, target)]
    tiny = np.finfo(np.float32).tiny
    first, last = (
        x / np.maximum(size, tiny) for x, size in zip((source, target), lengths, strict=True)
    )
    cosine = (first * last).sum(-1, keepdims=True)
    across = last - cosine * first
    sine = np.linalg.norm(across, axis=-1, keepdims=True)
    angle = share * np.arctan2(sine, cosine)
    turned = np.cos(angle) * first + np.sin(angle) * across / np.maximum(sine, _SMALLEST_SINE)
    length = lengths[0] + share * (lengths[1] - lengths[0])
    has_plane = (sine > _SMALLEST_SINE) & (lengths[0] > 0) & (lengths[1] > 0)
    return np.where(has_plane, turned * length, straight)
