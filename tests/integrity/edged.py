"""A stream of which all but the blocks is checked, and ways to break that; not a test itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.arithmetic import ReducedSum
from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import CallPlanner
from scope_rt.integrity.edges import EdgeCheck
from scope_rt.integrity.made_state import MadeState
from scope_rt.models.causal_wan import Modulation, TextKV, time_sinusoid
from scope_rt.models.noise import NoiseSource
from scope_rt.models.rope import rotations
from scope_rt.models.schedule import FlowSchedule
from tests.integrity.audited import GENERATOR, Fault, disarmed, shift_frames
from tests.tiny_models import BLOCK, STEPS, Rollout, envelope

NUM_CONTEXT = 5
"""Latent frames of a recompute: a whole block, and a part of one."""


@dataclass
class EdgedStream:
    """Chunk by chunk, as a rank runs it."""

    rollout: Rollout
    every: int = 1
    rank: int = 0
    checks: Checks = field(default_factory=Checks)
    recomputes: bool = False
    """Whether every chunk begins with a recompute, and has no clean pass."""

    def __post_init__(self) -> None:
        generator = self.rollout.generator
        self.edges = EdgeCheck(generator, rank=self.rank, checks=self.checks, every=self.every)
        self.made = MadeState(generator, rank=self.rank, checks=self.checks)
        self.planner = CallPlanner()

    def run(self, chunks: Iterable[int], *, new_text: bool = False, seed: int = 3) -> Tensor:
        """The last chunk's latents. `seed` is that of the chunk's start; 3 is the envelope's."""
        for chunk in chunks:
            latents = self._chunk(chunk, new_text or chunk == 0, seed)
        return latents

    def report(self) -> tuple[ReducedSum, ...]:
        return self.made.report()

    def _chunk(self, chunk: int, has_text: bool, seed: int) -> Tensor:
        rollout, plan = self.rollout, replace(envelope(chunk), reset_crossattn_cache=has_text)
        tensors = {LATENTS_IN: rollout.noise(chunk) if seed == 3 else rollout.noise(chunk + seed)}
        if has_text:
            tensors[CONDITIONING_EMBEDS] = rollout.text
        if self.recomputes:
            start = 7 + chunk * BLOCK
            plan = replace(plan, do_kv_recompute=True, clean_pass=False, current_start_frame=start)
            context = torch.cat([rollout.noise(90), rollout.noise(91)], 1)[:, :NUM_CONTEXT]
            tensors[CONTEXT_FRAMES_OVERRIDE] = context
        self.made.begin(plan, tensors)
        self.edges.begin(plan, tensors, self.planner.calls(plan, tensors))
        latents = rollout.generator.generate(
            plan, tensors, CallBudget(chunk, plan.expected_generator_calls).enter
        )
        self.made.end()
        self.edges.end(latents.cpu())
        return latents


def edged_stream(
    dtype: torch.dtype = torch.float32, *, check: str = "", every: int = 1
) -> EdgedStream:
    """Without `check`, where one is named."""
    rollout = Rollout(sink=1, window=8, dtype=dtype)
    return EdgedStream(rollout, every=every, checks=disarmed(check) if check else Checks())


def _one_pixel(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    def other(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        x[0, 1, 2] *= 1.001
        return (x, *args[1:])

    rollout.model.blocks[0].register_forward_pre_hook(other)


def _patch_bias(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    assert rollout.model.patch_embedding.bias is not None
    rollout.model.patch_embedding.bias.detach()[3] += 0.01


def _one_token(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    def other(linear: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        out = out.clone()
        out[0, 2, 1] *= 1.001
        return out

    rollout.model.proj_out.register_forward_hook(other)


def _head_weight(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    rollout.model.proj_out.weight.detach()[5] *= 1.001


def _head_swapped(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """Scale and shift of the head, while the model runs."""
    model = rollout.model
    forward = model.forward

    def swapped(x: Tensor, *, modulation: Modulation, **named: Any) -> Tensor:
        return forward(
            x, modulation=Modulation(modulation.layers, modulation.head.flip(0)), **named
        )

    patch.setattr(model, "forward", swapped)


def _other_flow(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    forward = rollout.model.forward
    patch.setattr(rollout.model, "forward", lambda *x, **named: forward(*x, **named) * 1.001)


def _other_sigma(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    rollout.generator.schedule = FlowSchedule(shift=5.01)


@dataclass(frozen=True, slots=True)
class _Noise:
    noise: NoiseSource
    factor: float = 1.0
    more: int = 0

    def draw(self, *, base_seed: int, **of: Any) -> Tensor:
        return self.noise.draw(base_seed=base_seed + self.more, **of) * self.factor


def _scaled_noise(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    rollout.generator.noise = _Noise(rollout.generator.noise, factor=1.0001)


def _other_noise(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    rollout.generator.noise = _Noise(rollout.generator.noise, more=1)


def _shift_latents(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """What leaves the rank is not what the last step gave."""
    generator = rollout.generator
    real = type(generator).generate
    patch.setattr(
        type(generator),
        "generate",
        lambda self, *args: real(self, *args) + 1e-3 * (self is generator),
    )


def _in_call(timestep: float, **other: Callable[[Any], Any]) -> Callable[..., None]:
    """Change what the generator calls its model with at one timestep."""

    def bring_about(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
        real = type(rollout.generator)._call

        def changed(self: Any, x: Tensor, time: float, *rest: Any) -> Tensor:
            if time == timestep:
                x, time = other.get("x", _same)(x), other.get("time", _same)(time)
            return real(self, x, time, *rest)

        patch.setattr(type(rollout.generator), "_call", changed)

    return bring_about


def _same(value: Any) -> Any:
    return value


def _roll_text(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """The model is called with the text of other layers."""
    model = rollout.model
    forward = model.forward
    model.register_forward_pre_hook(
        lambda _, args, named: (args, named | {"text": [*named["text"][1:], named["text"][0]]}),
        with_kwargs=True,
    )
    assert forward == model.forward


def _shift_rows(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """Rows and columns change places, which tokens of a square picture cannot tell by number."""
    real = rotations

    def turned(frames: Any, *, grid: tuple[int, int], **named: Any) -> Tensor:
        table = real(frames, grid=grid, **named)
        places: Tensor = table.unflatten(0, (len(frames), *grid))
        return places.transpose(1, 2).flatten(0, 2)

    patch.setattr(GENERATOR + "rotations", turned)


EDGE_FAULTS = (
    Fault("one pixel", "edges", "call 0: patch embedding", _one_pixel),
    Fault("patch bias", "edges", "call 0: patch embedding", _patch_bias),
    Fault("one token", "edges", "call 0: head", _one_token),
    Fault("head weight", "edges", "call 0: head", _head_weight),
    Fault("head swapped", "edges", "call 0: head", _head_swapped),
    Fault("flow", "edges", "call 0: head", _other_flow),
    Fault("sigma", "edges", "call 0: step", _other_sigma),
    Fault("noise scaled", "noise", "noise before step", _scaled_noise),
    Fault("other noise", "noise", "noise before step", _other_noise),
    Fault("latents shifted", "edges", "call 3: input", _shift_latents),
    Fault(
        "clean pass at another timestep",
        "edges",
        "call 3: modulation of timestep 0",
        _in_call(0.0, time=lambda time: STEPS[-1]),
    ),
    Fault(
        "clean pass of other latents",
        "edges",
        "call 3: input",
        _in_call(0.0, x=lambda x: x + 1e-3),
    ),
    Fault(
        "step at another timestep",
        "edges",
        "call 1: modulation of timestep",
        _in_call(STEPS[1], time=lambda time: STEPS[2]),
    ),
    Fault("first input", "edges", "call 0: input", _in_call(STEPS[0], x=lambda x: x + 1e-3)),
    Fault("text of other layers", "edges", "call 0: text keys of layer 0", _roll_text),
    Fault("frames shifted", "edges", "call 0: rotations", shift_frames),
    Fault("rows and columns swapped", "edges", "call 0: rotations", _shift_rows),
)


def _scale_text(key: float, value: float) -> Callable[[Rollout, pytest.MonkeyPatch], None]:
    """While text K/V are made."""

    def bring_about(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
        real = rollout.model.text_kv
        patch.setattr(
            rollout.model,
            "text_kv",
            lambda text: [TextKV(kv.k * key, kv.v * value) for kv in real(text)],
        )

    return bring_about


def _other_text(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    real = rollout.model.text_kv
    patch.setattr(rollout.model, "text_kv", lambda text: real(text.roll(1, 2)))


def _text_bias(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """A weight that text alone is made with."""
    bias = rollout.model.get_parameter("blocks.1.attn2.to_k.bias").detach()
    bias[2] += 0.01


def _coarse_text(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """The text embedder's activation is the exact GELU, not the one by tanh."""
    real = torch.nn.functional.gelu
    patch.setattr(torch.nn.functional, "gelu", lambda x, approximate="none": real(x))


def _remade(rollout: Rollout) -> None:
    rollout.generator.modulations.clear()


def _other_time(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    _remade(rollout)
    patch.setattr(
        "scope_rt.models.causal_wan.time_sinusoid",
        lambda times, *rest: time_sinusoid(times + 1, *rest),
    )


def _other_table(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    _remade(rollout)
    table = rollout.model.get_parameter("blocks.1.scale_shift_table").detach()
    table[0, 4, 3] += 0.01


def _one_modulation(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """That of one timestep, while it is made."""
    _remade(rollout)
    real = rollout.model.modulation

    def other(times: Tensor) -> Modulation:
        made = real(times)
        if times.item() == STEPS[1]:
            made.layers[2, 1, 0, 0, 0, 7] *= 1.01
        return made

    patch.setattr(rollout.model, "modulation", other)


def _replaced_text(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """By text that was made well, and its digests with it."""
    generator = rollout.generator
    generator.text = generator.model.text_kv(torch.randn(1, 1, 5, rollout.text.shape[-1]))


MADE_FAULTS = (
    Fault("text keys scaled", "made", "text keys of layer 0", _scale_text(1.01, 1.0)),
    Fault("text values scaled", "made", "text values of layer 0", _scale_text(1.0, 1.01)),
    Fault("other embeddings", "made", "conditioning_embeds", _other_text),
    Fault("text bias", "made", "sum of to_k of layer 1", _text_bias),
    Fault("text GELU", "made", "GELU of the text", _coarse_text),
    Fault("other timestep", "made", "sinusoid of timestep", _other_time),
    Fault("table", "made", "modulation of timestep 1000, layers", _other_table),
    Fault("one modulation", "made", "modulation of timestep 937.5, layers", _one_modulation),
)
REPLACED = Fault("text replaced", "made", "text K/V made for the chunk", _replaced_text)
