"""What every rank sends all others once it has loaded: a typed header, then the tensors it names.

Rank0 sends where the stream continues; a generator rank the checksums of the weights it holds, of
what it read of their files, and those that are known of the whole checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from scope_contracts.errors import WireError, mismatch
from scope_contracts.lifecycle import StreamPosition
from scope_contracts.plain import to_plain
from scope_contracts.tensor_spec import TensorSpec
from scope_contracts.weights import Checksums
from scope_contracts.wire import MAX_MESSAGE_BYTES, decode_plain, encode_plain, from_canonical
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.tensors import TORCH_DTYPES, bytes_of, of_bytes, specs_of

_LENGTH_BYTES, _SUM_BYTES = 4, 8
_SINKS, _TAIL = "sinks", "tail."
_NAMES, _SUMS = "weights.names.", "weights.sums."


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshResumePoint:
    """Where rank0's stream continues. From the `tail` the followers of `tp_v0` rebuild their
    decoder and context; None where nothing was resumed, and in other plans."""

    position: StreamPosition = field(default_factory=StreamPosition)
    tail: StreamTail | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """The weights of a generator rank, each table by names of its own."""

    held: Checksums
    """What lies in its memory."""
    used: Checksums
    """What it has read, in the dtype of use: the same names."""
    stored: Checksums
    """What it has read, as it is in the files."""
    known: Checksums
    """What the whole files held before, by the names of `stored`; empty where nobody knew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoaded:
    """One rank after loading. `weights` is None where the rank generates nothing."""

    resume_point: MeshResumePoint = field(default_factory=MeshResumePoint)
    weights: WeightsLoaded | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    is_generator: bool
    is_resumed: bool
    tail_start_frames: tuple[int, ...]
    tail_sha256s: tuple[str, ...]
    position: StreamPosition
    tensors: tuple[TensorSpec, ...]


def encode_loaded(loaded: RankLoaded) -> bytes:
    """The header's length in 4 bytes, the header's canonical bytes, then the tensors' bytes.

    Raises `FieldError` or `WireError` for what does not fit the header.
    """
    point, tensors = loaded.resume_point, dict[str, Tensor]()
    for table in fields(WeightsLoaded) if loaded.weights is not None else ():
        checksums = getattr(loaded.weights, table.name)
        tensors[_NAMES + table.name] = of_bytes("\n".join(checksums).encode())
        tensors[_SUMS + table.name] = _as_tensor([*checksums.values()])
    chunks = () if point.tail is None else point.tail.chunks
    tensors |= {f"{_TAIL}{index}": chunk.latents for index, chunk in enumerate(chunks)}
    if point.tail is not None and point.tail.sinks is not None:
        tensors[_SINKS] = point.tail.sinks
    header = _Header(
        is_generator=loaded.weights is not None,
        is_resumed=point.tail is not None,
        tail_start_frames=tuple(chunk.start_frame for chunk in chunks),
        tail_sha256s=tuple(chunk.latents_sha256 for chunk in chunks),
        position=point.position,
        tensors=specs_of(tensors),
    )
    head = encode_plain(to_plain(header))
    length = len(head).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((length, head, *map(bytes_of, tensors.values())))


def decode_loaded(data: bytes) -> RankLoaded:
    """What another rank encoded.

    Raises `WireError` or `FieldError` for bytes that are no message of this kind.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES + length or length > MAX_MESSAGE_BYTES:
        got = f"{len(data)} bytes with a header of {length}"
        raise WireError(mismatch("rank's report after loading", got=got, want="a whole header"))
    head = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
    header = from_canonical(_Header, head, decode_plain(head))
    tensors = _tensors(header.tensors, data[_LENGTH_BYTES + length :])
    weights = None
    if header.is_generator:
        tables = (table.name for table in fields(WeightsLoaded))
        weights = WeightsLoaded(**{table: _checksums(tensors, table) for table in tables})
    tail = _tail(tensors, header) if header.is_resumed else None
    point = MeshResumePoint(position=header.position, tail=tail)
    return RankLoaded(resume_point=point, weights=weights)


def _as_tensor(checksums: list[int]) -> Tensor:
    """Integers modulo 2^64 as the int64 of the same bits."""
    return torch.from_numpy(np.array(checksums, dtype=np.uint64).view(np.int64))


def _tensors(specs: tuple[TensorSpec, ...], raw: bytes) -> dict[str, Tensor]:
    want = sum(spec.num_bytes for spec in specs)
    if len(raw) != want or any(size < 0 for spec in specs for size in spec.shape):
        raise WireError(mismatch("tensors of a rank's report", got=len(raw), want=f"{want} bytes"))
    tensors, start = dict[str, Tensor](), 0
    for spec in specs:
        flat = of_bytes(raw[start : start + spec.num_bytes])
        tensors[spec.name] = flat.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
        start += spec.num_bytes
    return tensors


def _checksums(tensors: Mapping[str, Tensor], table: str) -> dict[str, int]:
    if missing := sorted({_NAMES + table, _SUMS + table} - tensors.keys()):
        raise WireError(mismatch("rank's report after loading", got=sorted(tensors), want=missing))
    names = bytes(bytes_of(tensors[_NAMES + table])).decode(errors="replace").split("\n")
    raw = bytes_of(tensors[_SUMS + table])
    names = names if raw else []
    if len(raw) != len(names) * _SUM_BYTES:
        got, want = f"{len(raw)} bytes of checksums", f"{len(names)} checksums"
        raise WireError(mismatch(table, got=got, want=want))
    return dict(zip(names, np.frombuffer(raw, np.uint64).tolist(), strict=True))


def _tail(tensors: Mapping[str, Tensor], header: _Header) -> StreamTail:
    start_frames, sha256s = header.tail_start_frames, header.tail_sha256s
    if len(sha256s) != len(start_frames):
        want = f"{len(start_frames)} digests"
        raise WireError(mismatch("rank's report after loading", got=len(sha256s), want=want))
    names = [f"{_TAIL}{index}" for index in range(len(start_frames))]
    if missing := [name for name in names if name not in tensors]:
        raise WireError(mismatch("rank's report after loading", got=sorted(tensors), want=missing))
    chunks = tuple(
        TailChunk(start_frame=start, latents=tensors[name], latents_sha256=sha256)
        for start, name, sha256 in zip(start_frames, names, sha256s, strict=True)
    )
    return StreamTail(chunks=chunks, sinks=tensors.get(_SINKS))
