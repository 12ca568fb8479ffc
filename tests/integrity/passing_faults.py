"""Faults of one call, layer, head or token, gone when the call is over; not a test itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_rt.models import causal_wan, rope
from scope_rt.models.causal_wan import Block, CausalWanModel, FeedForward
from scope_rt.models.chunk_attention import CachedSelfAttention
from tests.tiny_models import Rollout

CALL, LAYER, TOKEN = 1, 1, 7


class Now:
    """Where the stream is; each method patches in something that is wrong in `CALL`, `LAYER`."""

    def __init__(self, rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
        self.rollout, self._patch = rollout, patch
        self._call = self._layer = -1
        forward = CausalWanModel.forward

        def counting(model: CausalWanModel, *args: Any, **named: Any) -> Tensor:
            self._call += 1
            return forward(model, *args, **named)

        self.replace(CausalWanModel, "forward", counting)
        run = Block.forward

        def entering(block: Block, *args: Any) -> Tensor:
            self._layer = block.layer
            return run(block, *args)

        self.replace(Block, "forward", entering)

    @property
    def call(self) -> int:
        return self._call

    @property
    def is_here(self) -> bool:
        return (self._call, self._layer) == (CALL, LAYER)

    def replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self._patch.setattr(owner, name, new)

    def after(self, owner: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """`change` what the function gives in that call and layer."""
        real = getattr(owner, name)

        def changing(*args: Any, **named: Any) -> Tensor:
            out = real(*args, **named)
            return change(out) if self.is_here else out

        self.replace(owner, name, changing)


def _attention(change: Callable[[Tensor], None]) -> Callable[[Now], None]:
    def bring_about(now: Now) -> None:
        def changed(out: Tensor) -> Tensor:
            out = out.clone()
            change(out)
            return out

        now.after(CachedSelfAttention, "__call__", changed)

    return bring_about


def _one_product(now: Now) -> None:
    real = torch.nn.functional.linear
    down = now.rollout.model.get_parameter(f"blocks.{LAYER}.ffn.net.2.weight")

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = real(x, weight, bias)
        if weight is down and now.call == CALL:
            out.view(-1, out.shape[-1])[TOKEN, 3] *= 1.01
        return out

    now.replace(torch.nn.functional, "linear", linear)


def _layers_swapped(now: Now) -> None:
    forward = CausalWanModel.forward

    def swapped(model: CausalWanModel, *args: Any, **named: Any) -> Tensor:
        if now.call + 1 != CALL:
            return forward(model, *args, **named)
        blocks = model.blocks._modules
        blocks["0"], blocks["1"] = blocks["1"], blocks["0"]
        out = forward(model, *args, **named)
        blocks["0"], blocks["1"] = blocks["1"], blocks["0"]
        return out

    now.replace(CausalWanModel, "forward", swapped)


def _input_changed(now: Now) -> None:
    call = torch.nn.Module.__call__

    def changing(block: Block, x: Tensor, *args: Any) -> Any:
        is_here = (now.call, block.layer) == (CALL, LAYER)
        return call(block, x + 1e-6 * x.abs().mean() if is_here else x, *args)

    now.replace(Block, "__call__", changing)


def _other_modulation(now: Now) -> None:
    call = torch.nn.Module.__call__

    def changing(block: Block, x: Tensor, mod: Tensor, *args: Any) -> Any:
        if (now.call, block.layer) == (CALL, LAYER):
            mod = next(iter(now.rollout.generator.modulations.values())).layers[0]
        return call(block, x, mod, *args)

    now.replace(Block, "__call__", changing)


def _rows(now: Now) -> Tensor:
    rows: Tensor = now.rollout.generator.cache.storage.rows.parts[0][0]  # type: ignore[attr-defined]
    return rows[LAYER]


@contextmanager
def _changed_past(now: Now, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    rows = _rows(now)
    kept = rows[:, 20:32].clone()  # frames 5 to 7: chunk 3 writes at 4 to 15
    rows[:, 20:32] = change(kept)
    yield
    rows[:, 20:32] = kept


def _past(change: Callable[[Tensor], Tensor]) -> Callable[[Now], None]:
    def bring_about(now: Now) -> None:
        attend = CachedSelfAttention.__call__

        def changing(self: CachedSelfAttention, *args: Any) -> Tensor:
            if not now.is_here:
                return attend(self, *args)
            with _changed_past(now, change):
                return attend(self, *args)

        now.replace(CachedSelfAttention, "__call__", changing)

    return bring_about


def _past_of_a_call(now: Now) -> None:
    forward = CausalWanModel.forward

    def changing(model: CausalWanModel, *args: Any, **named: Any) -> Tensor:
        if now.call + 1 != CALL:
            return forward(model, *args, **named)
        with _changed_past(now, torch.zeros_like):
            return forward(model, *args, **named)

    now.replace(CausalWanModel, "forward", changing)


def _other_view(now: Now) -> None:
    cache = now.rollout.generator.cache
    update = cache.update

    def altered(layer: int, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        k, v = update(layer, *args, **named)
        if layer == LAYER:
            v = v.clone()
            v[:, 20:24] = v[:, 20:24].roll(1, 1)
        return k, v

    now.replace(cache, "update", altered)


def _token_turned(now: Now) -> None:
    real = rope.rotate

    def rotate(x: Tensor, rotations: Tensor) -> Tensor:
        if now.is_here:
            rotations = rotations.clone()
            rotations[TOKEN] = rotations[TOKEN - 1]
        return real(x, rotations)

    now.replace(causal_wan, "rotate", rotate)


def _gate_of_a_frame(now: Now) -> None:
    def changed(out: Tensor) -> Tensor:
        out[:, 1] *= 1.01
        return out

    now.after(Block, "self_attention", changed)


def _scale(tokens: slice) -> Callable[[Tensor], None]:
    def change(out: Tensor) -> None:
        out[:, tokens] *= 1.01

    return change


def _zero_head(out: Tensor) -> None:
    out[:, :, 0] = 0


@dataclass(frozen=True, slots=True)
class PassingFault:
    """Found in the chunk it happens in, by `checks`, which say `names` of it."""

    name: str
    checks: tuple[str, ...]
    names: str
    bring_about: Callable[[Now], None]

    def __str__(self) -> str:
        return self.name


_HERE = f"call {CALL}, layer {LAYER}"
_EITHER = ("arithmetic", "linear_sums")
PASSING_FAULTS = (
    PassingFault(
        "attention of a token",
        ("arithmetic",),
        f"{_HERE}, token {TOKEN}: self-attention",
        _attention(_scale(slice(TOKEN, TOKEN + 1))),
    ),
    PassingFault(
        "a head", ("arithmetic",), f"{_HERE}, token .*: self-attention", _attention(_zero_head)
    ),
    PassingFault(
        "half of the tokens",
        ("arithmetic",),
        f"{_HERE}, token .*: self-attention",
        _attention(_scale(slice(6, 12))),
    ),
    PassingFault(
        "one product",
        ("linear_sums",),
        f"{_HERE}, token {TOKEN}: sum of ffn down",
        _one_product,
    ),
    PassingFault(
        "residual skipped",
        ("arithmetic",),
        f"{_HERE}, token .*: block output",
        lambda now: now.after(FeedForward, "forward", torch.zeros_like),
    ),
    PassingFault("layers swapped", _EITHER, f"call {CALL}, layer 1: modulation", _layers_swapped),
    PassingFault("block input", ("arithmetic",), f"{_HERE}: block input", _input_changed),
    PassingFault("modulation", _EITHER, f"{_HERE}: modulation", _other_modulation),
    PassingFault(
        "past zeroed in attention",
        ("arithmetic",),
        f"{_HERE}, token .*: self-attention",
        _past(torch.zeros_like),
    ),
    PassingFault(
        "past rolled in attention",
        ("arithmetic",),
        f"{_HERE}, token .*: self-attention",
        _past(lambda rows: rows.roll(4, 1)),
    ),
    PassingFault(
        "past zeroed for a call",
        ("cached_rows",),
        f"{_HERE}: cached past rows",
        _past_of_a_call,
    ),
    PassingFault(
        "other values shown", ("cached_rows",), f"layer {LAYER}: cached past rows", _other_view
    ),
    PassingFault(
        "a token rotated",
        ("arithmetic",),
        f"{_HERE}, token {TOKEN}: to_q, normed and rotated",
        _token_turned,
    ),
    PassingFault(
        "gate of a frame",
        ("arithmetic",),
        f"{_HERE}, token [4-7]: residual of self-attention",
        _gate_of_a_frame,
    ),
)
