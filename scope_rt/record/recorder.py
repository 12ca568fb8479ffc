"""The flight recorder never ends the stream.

A record is one write to the operating system, so a crash of this process loses none; the stream
waits for it, and so for a disk that gives no answer. What cannot be recorded (disk full, file gone)
ends the recording at its last whole record; `failure` says why.
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT, PPEnvelope
from scope_contracts.errors import ContractError, UserInputError
from scope_contracts.log_file import append, create, pack
from scope_contracts.log_records import (
    Closed,
    Control,
    Dropped,
    Failed,
    Finished,
    Opened,
    Planned,
    Record,
)
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Directive
from scope_rt.faults import FaultPoint, Faults, NoFaults
from scope_rt.tensors import spec_of

_MOST_ERROR_CHARACTERS = 4096


class Recorder:
    """Writes what rank0 does to a recording; only the controller's thread may call it.

    Args:
        path: a new file, or with `resume` one to go on with; a torn tail of it is cut off.
        opened: the stream; stamped with the time at which it is written.

    Raises:
        UserInputError: `path` cannot be written. A resumed stream goes on without it instead.
    """

    def __init__(
        self, path: Path, opened: Opened, *, resume: bool = False, faults: Faults | None = None
    ) -> None:
        self.failure: str | None = None
        """Why the recording ended early, in one sentence; None while it goes on."""
        self._path, self._faults = path, faults or NoFaults()
        self._chunk_index = -1
        self._failed = False
        self._end = 0
        self._file: FileIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = append(path) if resume else create(path)
            self._end = self._file.tell()
        except (OSError, ContractError) as error:
            if not resume:
                raise UserInputError(
                    f"recording {path}: cannot be written ({error}); choose another file"
                ) from error
            self._stop(error)
        self._write(replace(opened, at_s=time.time()))

    def control(self, chunk_index: int, directive: Directive) -> None:
        """What a person asked for takes effect at `chunk_index`; an empty directive is no news."""
        text, transition = directive.conditioning, directive.transition
        control = Control(
            at_s=time.time(),
            chunk_index=chunk_index,
            prompt="" if text is None else text.prompt,
            embeds_sha256="" if text is None else hashlib.sha256(_raw(text.embeds)).hexdigest(),
            hard_cut=directive.hard_cut,
            drop_in_flight=directive.drop_in_flight,
            transition_num_chunks=0 if transition is None else transition.num_chunks,
            transition_method="" if transition is None else str(transition.method),
            transition_bias_floor=1.0 if transition is None else transition.bias_floor,
            recompute=directive.recompute,
        )
        if control != Control(at_s=control.at_s, chunk_index=chunk_index):
            self._write(control)

    def planned(self, envelope: PPEnvelope) -> None:
        """`envelope` passed all checks and was sent."""
        self._chunk_index = envelope.chunk_index
        self._write(Planned(at_s=time.time(), envelope=envelope))

    def finished(self, chunk: Chunk) -> None:
        """`chunk` is emitted."""
        self._write(
            Finished(
                at_s=time.time(),
                chunk_index=chunk.chunk_index,
                cache_epoch=chunk.cache_epoch,
                prompt=chunk.prompt,
                num_frames=len(chunk.frames),
                observed_generator_calls=chunk.generator_calls,
                recomputed=chunk.recomputed,
                kv_cache_attention_bias=chunk.kv_cache_attention_bias,
                latents_sha256=chunk.latents_sha256,
                latents=spec_of(LATENTS_OUT, chunk.latents),
                stage_ms=tuple(chunk.stage_ms.items()),
            ),
            _raw(chunk.latents),
        )

    def dropped(self, envelope: PPEnvelope) -> None:
        """The chunk of `envelope` came after a hard cut had ended its epoch."""
        self._write(
            Dropped(
                at_s=time.time(),
                chunk_index=envelope.chunk_index,
                cache_epoch=envelope.cache_epoch,
            )
        )

    def failed(self, error: BaseException) -> None:
        """`error` ends the stream."""
        self._failed = True
        text = f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]
        text = text.encode(errors="replace").decode()
        self._write(Failed(at_s=time.time(), chunk_index=self._chunk_index, error=text))

    def close(self) -> None:
        """End the recording; without `failed` before it, the stream ended in order. Idempotent."""
        if not self._failed:
            self._write(Closed(at_s=time.time()))
        self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _write(self, record: Record, blob: bytes = b"") -> None:
        if self._file is None:
            return
        try:
            data = pack(record, blob)
            left = memoryview(self._faults.reach(FaultPoint.RECORD, self._chunk_index, data))
            while left:
                left = left[self._file.write(left) :]
            self._end += len(data)
        except (OSError, ContractError) as error:
            self._stop(error)

    def _stop(self, error: OSError | ContractError) -> None:
        """Keep the whole records, and record no more."""
        self.failure = (
            f"recording {self._path} ended after {self._end} bytes ({error}); the stream goes on; "
            "free disk space or choose another file"
        )
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(self._end)
            self._release()


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
