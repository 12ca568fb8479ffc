"""What a rank, a message or a file suffers; nothing here looks beyond the value it is given.

An action takes the value and returns the one to use in its place. It changes copies: what the rank
itself holds stays as it was, unless that is what the action is about.
"""

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgpack
from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT, PPEnvelope, PPResult
from scope_rt.kv_cache.heavy_frames import HeavyFrames
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.generator import ChunkGenerator

Value = TypeVar("Value")
M = TypeVar("M", PPEnvelope, PPResult)
Message = tuple[PPEnvelope, dict[str, Tensor]]


def _kill(value: Value, *, after_s: float = 0.0) -> Value:
    """SIGKILL, now or in the middle of what follows."""
    if after_s:
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def _kill_in_message(frames: Sequence[Tensor], *, after_s: float = 0.05) -> Sequence[Tensor]:
    """The message's bytes leave, its tensors never do."""
    return _kill(frames[:1], after_s=after_s)


def _stop(value: Value) -> Value:
    """Stopped by the kernel, as by a debugger or in a frozen container; SIGCONT continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return value


def _delay(value: Value, *, seconds: float) -> Value:
    time.sleep(seconds)
    return value


def _raise(value: Value, *, message: str = "injected by the break-it suite") -> Value:
    raise ZeroDivisionError(message)


def _fill_disk(value: bytes) -> bytes:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _count(calls: int, *, instead: int) -> int:
    """The rank counts `instead` generator calls for one."""
    return instead


def _edit(pair: tuple[M, Any], **changed: Any) -> tuple[M, Any]:
    """Other fields in a message."""
    message, tensors = pair
    fields: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in changed.items()}
    return replace(message, **fields), tensors


def _edit_sent(messages: Sequence[Message], **changed: Any) -> list[Message]:
    """Other fields in what leaves."""
    return [_edit(message, **changed) for message in messages]


def _shift(pair: tuple[M, Any], **amounts: int) -> tuple[M, Any]:
    """Numbers of a message that are off by some amount."""
    message, _ = pair
    return _edit(pair, **{name: getattr(message, name) + by for name, by in amounts.items()})


def _shift_sent(messages: Sequence[Message], **amounts: int) -> list[Message]:
    """Numbers that are off in what leaves."""
    return [_shift(message, **amounts) for message in messages]


def _drop_tensor(message: Message, *, name: str) -> Message:
    """A tensor is neither announced nor sent."""
    envelope, tensors = message
    announced = tuple(spec for spec in envelope.tensors if spec.name != name)
    left = {key: tensor for key, tensor in tensors.items() if key != name}
    return replace(envelope, tensors=announced), left


def _drop_sent_tensor(messages: Sequence[Message], *, name: str) -> list[Message]:
    """The same in what leaves."""
    return [_drop_tensor(message, name=name) for message in messages]


def _trim_tensor(message: Message, *, name: str) -> Message:
    """A tensor comes without its first latent frame, and is announced so."""
    envelope, tensors = message
    trimmed = tensors[name][:, 1:].contiguous()
    announced = tuple(
        replace(spec, shape=tuple(trimmed.shape)) if spec.name == name else spec
        for spec in envelope.tensors
    )
    return replace(envelope, tensors=announced), tensors | {name: trimmed}


def _lengthen_steps(message: Message, *, is_planned: bool) -> Message:
    """One denoising step more; `is_planned` tells whether the counts of calls know of it."""
    envelope, tensors = message
    steps = (*envelope.denoising_step_list, envelope.denoising_step_list[-1] / 2)
    longer = replace(envelope, denoising_step_list=steps)
    if is_planned:
        calls = envelope.expected_generator_calls + 1
        longer = replace(longer, num_denoise_steps=len(steps), expected_generator_calls=calls)
    return longer, tensors


def _start_epoch_unannounced(message: Message) -> Message:
    """The cache is reset as in a hard cut, but the epoch stays the same."""
    envelope, _ = message
    start = {"init_cache": True, "reset_kv_cache": True, "reset_crossattn_cache": True}
    return _edit(message, current_start_frame=0, cache_epoch=envelope.cache_epoch, **start)


def _reset_ring(generator: ChunkGenerator) -> ChunkGenerator:
    """The cache is emptied out of band."""
    generator.cache.reset()
    return generator


def _misjudge_frames(generator: ChunkGenerator) -> ChunkGenerator:
    """The scores of heavy hitters are turned round, so that others are evicted."""
    cache = generator.cache
    assert isinstance(cache, SlotCache), "this kind of cache has no scores"
    assert isinstance(cache.policy, HeavyFrames), "this kind of cache has no scores"
    cache.policy.scores.neg_()
    return generator


def _alter_weight(owner: Value) -> Value:
    """One bit of one sharded weight: the sign of its largest element."""
    model = owner.model if isinstance(owner, ChunkGenerator) else owner
    assert isinstance(model, CausalWanModel)
    weight = dict(model.named_parameters())["blocks.0.attn1.to_q.weight"].detach().view(-1)
    weight[weight.abs().argmax()].neg_()
    return owner


def _spoil_result(answer: tuple[PPResult, dict[str, Tensor]]) -> Any:
    """A result without a finite number."""
    result, tensors = answer
    return result, tensors | {LATENTS_OUT: tensors[LATENTS_OUT] * math.nan}


def _flip_bit(frames: Sequence[Tensor], *, frame: int) -> list[Tensor]:
    """One bit of a tensor on its way: the sign of its largest element."""
    damaged = frames[frame].clone()
    flat = damaged.view(-1)
    flat[flat.abs().argmax()].neg_()
    return [*frames[:frame], damaged, *frames[frame + 1 :]]


def _set_version(frames: Sequence[Tensor], *, version: int) -> list[Tensor]:
    """The message's bytes are those of another version."""
    plain = msgpack.unpackb(frames[0].numpy().tobytes())
    body = msgpack.packb(plain | {"pp_envelope_version": version})
    return [frames[0].new_tensor(list(body)), *frames[1:]]


def _send_twice(messages: Sequence[Message]) -> list[Message]:
    return [*messages, *messages]


def _withhold(messages: Sequence[Message]) -> list[Message]:
    return []


def _send_after(messages: Sequence[Message], earlier: Sequence[Message]) -> list[Message]:
    """What was withheld comes after its successor."""
    return [*messages, *earlier]


def _send_again(messages: Sequence[Message], earlier: Sequence[Message]) -> list[Message]:
    """What was sent before comes once more, first."""
    return [*earlier, *messages]


def _instead(value: Value, earlier: Value) -> Value:
    """What came before comes once more, in the place of this."""
    return earlier


ACTIONS: dict[str, Callable[..., Any]] = {
    "kill": _kill,
    "kill_in_message": _kill_in_message,
    "stop": _stop,
    "delay": _delay,
    "raise": _raise,
    "fill_disk": _fill_disk,
    "count": _count,
    "edit": _edit,
    "edit_sent": _edit_sent,
    "shift": _shift,
    "shift_sent": _shift_sent,
    "drop_tensor": _drop_tensor,
    "drop_sent_tensor": _drop_sent_tensor,
    "trim_tensor": _trim_tensor,
    "lengthen_steps": _lengthen_steps,
    "start_epoch_unannounced": _start_epoch_unannounced,
    "reset_ring": _reset_ring,
    "misjudge_frames": _misjudge_frames,
    "alter_weight": _alter_weight,
    "spoil_result": _spoil_result,
    "flip_bit": _flip_bit,
    "set_version": _set_version,
    "send_twice": _send_twice,
    "withhold": _withhold,
}
"""Actions by name: from the value that passes its point to the one used in its place."""

RECALLING_ACTIONS: dict[str, Callable[..., Any]] = {
    "send_after": _send_after,
    "send_again": _send_again,
    "instead": _instead,
}
"""Actions that are also given what passed the same point the time before."""
