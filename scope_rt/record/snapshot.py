"""All that rank0 must know to go on with a stream is one value, small enough to save every chunk.

A chunk is in it from its arrival until the consumer holds it, so a restart repeats none and loses
none: what the consumer lacks is decoded again from its latents, bit for bit.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
from torch import Tensor

from scope_contracts.errors import CheckpointError, UserInputError
from scope_contracts.wire import decode_envelope, encode
from scope_rt.control.chunk import Arrived
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.position import Position
from scope_rt.control.transition import Interpolation, Transition, TransitionSpec
from scope_rt.disk import (
    STALL_TIMEOUT_S,
    DaemonExecutor,
    StallError,
    answer,
)
from scope_rt.tensors import pack_tensor, unpack_tensor

_LOOK_TIMEOUT_S = 10.0
"""How long a disk may take to tell how far a stream has come."""
_CHECKSUM_BYTES = 16
_COUNTS = ("next_call_id", "next_chunk_index", "cache_epoch", "next_start_frame", "chunks_in_epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream between two chunks.

    `position` is before the first chunk that has not arrived, `coming` what was asked for from
    there on. The consumer holds `num_held` chunks and maybe some of `unheld`; `decoder` is before
    the first of these, `decoder_after` and `memory` are after the last.
    """

    position: Position
    coming: tuple[ScheduledDirective, ...]
    num_held: int
    unheld: tuple[Arrived, ...]
    decoder: Mapping[str, Tensor]
    decoder_after: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]


def num_chunks_saved(path: Path, *, unless_by: str | None = None) -> int:
    """How many chunks the stream of a checkpoint had brought.

    0 where none can be read within a bound, and where the run `unless_by` saved it.
    """
    saved = _readable(path)
    if saved is None or saved["run_id"] == unless_by:
        return 0
    return int(saved["state"]["planner"]["next_chunk_index"])


def run_that_saved(path: Path) -> str | None:
    """The `run_id` of whoever saved a checkpoint; None where no checkpoint can be read."""
    saved = _readable(path)
    return None if saved is None else str(saved["run_id"])


def _readable(path: Path) -> dict[str, Any] | None:
    read = DaemonExecutor("checkpoint").submit(Checkpoint(path, {})._read)
    try:
        return answer(read, timeout_s=_LOOK_TIMEOUT_S)
    except (UserInputError, StallError):
        return None


class Checkpoint:
    """The file that holds one `StreamState`, replaced as a whole.

    `identity` names the stream: the state of another one is refused.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, str | int | float], *, run_id: str = ""
    ) -> None:
        """`run_id` is the same for every start of the ranks by one launcher."""
        self.path = path
        self._identity, self._run_id = dict(identity), run_id
        self._wanted = b""

    def save(self, state: StreamState) -> None:
        """Replace what was saved.

        Raises:
            CheckpointError: the file cannot be written, or the disk gives no answer within
                `STALL_TIMEOUT_S`; the one before is still there.
        """
        packed = msgpack.packb(
            {"identity": self._identity, "run_id": self._run_id, "state": _plain(state)},
            default=pack_tensor,
        )
        self._wanted = _checksum(packed) + packed
        try:
            answer(self._disk.submit(self._replace, self._wanted), timeout_s=STALL_TIMEOUT_S)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {self.path} ({error.strerror}); free space there or "
                "mend the disk, then resume"
            ) from error
        finally:
            self._wanted = b""

    def load(self, settings: StreamSettings) -> StreamState | None:
        """The state that was saved last, or None.

        Raises:
            UserInputError: the file cannot be read, or belongs to another stream.
        """
        saved = self._read()
        if saved is None:
            return None
        identity = saved["identity"]
        for name in sorted(identity.keys() | self._identity.keys()):
            theirs, ours = identity.get(name), self._identity.get(name)
            if theirs != ours:
                raise UserInputError(
                    f"the checkpoint {self.path} is of a stream with {name} {theirs!r}, this one "
                    f"has {ours!r}; use that one again, or {self._fix}"
                )
        return _state(saved["state"], settings)

    def is_of_this_run(self) -> bool:
        """Whether ranks that this launcher started before have saved it."""
        saved = self._read() if self._run_id else None
        return saved is not None and saved["run_id"] == self._run_id

    def clear(self) -> None:
        """There is nothing to go on with.

        Raises:
            CheckpointError: the file cannot be removed.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove the checkpoint {self.path} ({error.strerror}); do that yourself, "
                "or choose another file"
            ) from error

    @cached_property
    def _disk(self) -> DaemonExecutor:
        """Most who read a checkpoint never save one."""
        return DaemonExecutor("checkpoint")

    def _replace(self, content: bytes) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        is_replaced = False
        try:
            # A new file: a write that stalled may still come, into the one it opened.
            partial.unlink(missing_ok=True)
            partial.write_bytes(content)
            if content is self._wanted:  # or nobody waits for it any more
                os.replace(partial, self.path)
                is_replaced = True
        finally:
            if not is_replaced:
                partial.unlink(missing_ok=True)

    @property
    def _fix(self) -> str:
        return f"delete {self.path} to start anew"

    def _read(self) -> dict[str, Any] | None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserInputError(
                f"cannot read the checkpoint {self.path} ({error.strerror}); {self._fix}"
            ) from error
        checksum, packed = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        if checksum != _checksum(packed):
            raise UserInputError(f"the checkpoint {self.path} is damaged; {self._fix}")
        saved: dict[str, Any] = msgpack.unpackb(packed, ext_hook=unpack_tensor, use_list=False)
        return saved


def _checksum(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()


def _plain(state: StreamState) -> dict[str, Any]:
    position = state.position
    return {
        "planner": {name: getattr(position.planner, name) for name in _COUNTS},
        "text": _plain_text(position.text),
        "transition": _plain_transition(position.transition),
        "coming": [
            (event.chunk_index, _plain_directive(event.directive)) for event in state.coming
        ],
        "num_held": state.num_held,
        "unheld": [
            (encode(a.envelope), a.prompt, a.latents, a.generator_calls, a.stage_ms)
            for a in state.unheld
        ],
        "decoder": dict(state.decoder),
        "decoder_after": dict(state.decoder_after),
        "memory": dict(state.memory),
    }


def _state(plain: Any, settings: StreamSettings) -> StreamState:
    return StreamState(
        position=Position(
            planner=Planner(settings=settings, holds_cache=False, **plain["planner"]),
            text=_text(plain["text"]),
            transition=_transition(plain["transition"]),
        ),
        coming=tuple(
            ScheduledDirective(chunk_index=index, directive=_directive(directive))
            for index, directive in plain["coming"]
        ),
        num_held=plain["num_held"],
        unheld=tuple(
            Arrived(
                envelope=decode_envelope(envelope),
                prompt=prompt,
                latents=latents,
                generator_calls=calls,
                stage_ms=stage_ms,
            )
            for envelope, prompt, latents, calls, stage_ms in plain["unheld"]
        ),
        decoder=plain["decoder"],
        decoder_after=plain["decoder_after"],
        memory=plain["memory"],
    )


def _plain_text(text: Conditioning | None) -> Any:
    return None if text is None else (text.prompt, text.embeds)


def _text(plain: Any) -> Conditioning | None:
    return None if plain is None else Conditioning(*plain)


def _plain_spec(spec: TransitionSpec | None) -> Any:
    return None if spec is None else (spec.num_chunks, str(spec.method), spec.bias_floor)


def _spec(plain: Any) -> TransitionSpec:
    num_chunks, method, bias_floor = plain
    return TransitionSpec(
        num_chunks=num_chunks, method=Interpolation(method), bias_floor=bias_floor
    )


def _plain_transition(transition: Transition | None) -> Any:
    if transition is None:
        return None
    return (transition.source, transition.target, _plain_spec(transition.spec), transition.step)


def _transition(plain: Any) -> Transition | None:
    if plain is None:
        return None
    source, target, spec, step = plain
    return Transition(source=source, target=target, spec=_spec(spec), step=step)


def _plain_directive(directive: Directive) -> Any:
    bits = (directive.hard_cut, directive.drop_in_flight, directive.recompute)
    return (_plain_text(directive.conditioning), _plain_spec(directive.transition), bits)


def _directive(plain: Any) -> Directive:
    text, spec, (hard_cut, drop_in_flight, recompute) = plain
    return Directive(
        conditioning=_text(text),
        transition=None if spec is None else _spec(spec),
        hard_cut=hard_cut,
        drop_in_flight=drop_in_flight,
        recompute=recompute,
    )
