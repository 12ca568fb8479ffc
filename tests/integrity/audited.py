"""A stream whose arithmetic is checked, and ways to break it; not a test itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_IN
from scope_contracts.integrity import IntegrityLevel
from scope_rt.attention.key_bias import KeyBias, key_bias
from scope_rt.checks import Checks
from scope_rt.integrity.arithmetic import ArithmeticCheck
from scope_rt.integrity.audit_plan import CallPlanner
from scope_rt.models.rope import rotations
from tests.tiny_models import STEPS, Rollout, envelope

GENERATOR = "scope_rt.models.generator."
EVERY = 2
NUM_TURNS = EVERY * (len(STEPS) + 1)
"""Chunks within which every call is audited."""
BIAS = 0.6


def nothing(*_: Any, **__: Any) -> None:
    """In place of a check that is disarmed."""


def disarmed(*names: str) -> Checks:
    """All checks but these."""
    without: dict[str, Any] = dict.fromkeys(names, nothing)
    return replace(Checks(), **without)


class AuditedStream:
    """Chunk by chunk, as a rank runs it."""

    def __init__(
        self,
        rollout: Rollout,
        level: IntegrityLevel,
        checks: Checks | None = None,
        every: int = EVERY,
    ) -> None:
        self.rollout, self.planner = rollout, CallPlanner()
        self.check = ArithmeticCheck(
            rollout.generator, level=level, rank=0, checks=checks, every=every
        )

    def run(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            plan, tensors = envelope(chunk, bias=BIAS), {LATENTS_IN: self.rollout.noise(chunk)}
            self.check.begin(plan, tensors, self.planner.calls(plan, tensors))
            self.rollout.chunk(chunk, bias=BIAS)
            self.check.end()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is computed wrong from now on."""

    name: str
    check: str
    """The field of `Checks` that finds it."""
    names: str
    """What the error says of it."""
    bring_about: Callable[[Rollout, pytest.MonkeyPatch], None]

    def __str__(self) -> str:
        return self.name


def _skip_writes(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    rows = rollout.generator.cache.storage.rows  # type: ignore[attr-defined]
    write = rows.write

    def skipping(layer: int, *args: Any) -> None:
        if layer != 1:
            write(layer, *args)

    patch.setattr(rows, "write", skipping)


def _alter_row(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    cache = rollout.generator.cache
    update = cache.update

    def altering(layer: int, window: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        k, v = update(layer, window, *args, **named)
        if layer == 1:
            v[0, window.segments[0].slot, 0, 0] += 1e-5
        return k, v

    patch.setattr(cache, "update", altering)


def _alter_bias(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    real = key_bias
    patch.setattr(
        GENERATOR + "key_bias", lambda *a, **k: real(*a, **k | {"bias": k["bias"] * 0.99})
    )


def shift_frames(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    real = rotations
    patch.setattr(GENERATOR + "rotations", lambda frames, **k: real([f + 1 for f in frames], **k))


def _alter_rotation(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    real = rotations

    def altered(*args: Any, **named: Any) -> Tensor:
        table = real(*args, **named)
        table[:, 0, 2] *= torch.polar(torch.ones(1), torch.full((1,), 1e-3))[0]
        return table

    patch.setattr(GENERATOR + "rotations", altered)


def to_tensor_float(x: Tensor) -> Tensor:
    """Rounded to the 10 bits that tensor cores multiply."""
    return (x.float().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32).to(x.dtype)


def _multiply_coarsely(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear
    patch.setattr(
        torch.nn.functional,
        "linear",
        lambda x, w, b=None: real(to_tensor_float(x), to_tensor_float(w), b),
    )


class _DropsAKey:
    """A backend that forgets the first key in view."""

    name = "drops a key"

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: KeyBias | None) -> Tensor:
        if bias is not None:
            first, *rest = bias.runs
            bias = KeyBias((replace(first, num_tokens=first.num_tokens - 1), *rest))
        return self._backend.attend(q, k[:, 1:], v[:, 1:], bias)  # type: ignore[no-any-return]


def _drop_a_key(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    rollout.generator.backend = _DropsAKey(rollout.generator.backend)


def _alter_weight(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """The sign of the largest one."""
    weight = rollout.model.get_parameter("blocks.1.ffn.net.2.weight").detach().view(-1)
    weight[weight.abs().argmax()].neg_()


def _replace_weight(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """Who digests the tensors that were loaded sees no change."""
    linear = rollout.model.get_submodule("blocks.1.attn1.to_q")
    assert isinstance(linear, torch.nn.Linear)
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 1.0001, requires_grad=False)


FAULTS = (
    Fault("skipped write", "cached_rows", "rows that attention saw changed", _skip_writes),
    Fault("row altered", "cached_rows", "rows that attention saw changed", _alter_row),
    Fault("bias", "arithmetic", "self-attention", _alter_bias),
    Fault("frames shifted", "arithmetic", "to_q, normed and rotated", shift_frames),
    Fault("rotation altered", "arithmetic", "to_q, normed and rotated", _alter_rotation),
    Fault("coarse products", "linear_sums", "sum of to_q", _multiply_coarsely),
    Fault("key dropped", "arithmetic", "self-attention", _drop_a_key),
    Fault("weight altered", "linear_sums", "sum of ffn down", _alter_weight),
    Fault("weight replaced", "linear_sums", "sum of to_q", _replace_weight),
)
