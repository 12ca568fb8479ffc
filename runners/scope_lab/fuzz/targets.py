"""What comes from outside ends in a value whose bytes are those, or in one bounded sentence.

A target reads bytes as the runtime does. Whatever else it raises is a bug of ours: the assertions
here say what else a reader may count on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from random import Random

from scope_contracts.errors import ContractError, FieldError, LifecycleError
from scope_contracts.log_file import MAGIC, LogReader, pack
from scope_contracts.parity import ParityKeys, ScalarDigest
from scope_contracts.preflight import preflight
from scope_contracts.tp_names import from_tp, to_tp
from scope_contracts.wire import decode_envelope, decode_result, encode
from scope_lab.fuzz import seeds
from scope_lab.fuzz.mutate import Mutation, message_mutation, recording_mutation

ACCEPTED = "accepted"
MOST_LETTERS = 4_000
"""Length of an error's text: no peer can fill a log with one message."""
_SCAN_BYTES = 2**20
"""What a reader may ask for at once of a file that is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`read` raises a `ContractError` or a `LifecycleError`, or nothing."""

    name: str
    seeds: tuple[bytes, ...]
    mutate: Mutation
    read: Callable[[bytes], None]

    def input(self, seed: int, index: int) -> bytes:
        """The input of that index: the same one for the same seed."""
        rng = Random(f"{self.name} {seed} {index}")
        return self.mutate(rng.choice(self.seeds), rng)

    def verdict(self, data: bytes) -> str:
        """`ACCEPTED`, or the class of the error that refused it."""
        try:
            self.read(data)
        except (ContractError, LifecycleError) as error:
            text = str(error)
            assert 0 < len(text) <= MOST_LETTERS, f"an error of {len(text)} letters"
            return type(error).__name__
        return ACCEPTED


def _read_envelope(data: bytes) -> None:
    """As a mesh rank: decode, preflight, and enter one of the states of a stream."""
    envelope = decode_envelope(data)
    assert encode(replace(envelope)) == data
    assert from_tp(to_tp(envelope)) == envelope
    preflight(envelope, {spec.name: spec for spec in envelope.tensors}, seeds.GEOMETRY)
    refusal: LifecycleError | None = None
    for machine in _LIFECYCLES:
        try:
            entered = machine.enter(envelope)
        except LifecycleError as error:
            refusal = error
        else:
            assert entered == machine.follow(envelope)
            return
    assert refusal is not None
    raise refusal


def _read_result(data: bytes) -> None:
    result = decode_result(data)
    assert encode(replace(result)) == data


def _read_parity(data: bytes) -> None:
    """As at start, and every N chunks: another rank's settings, or its scalars."""
    try:
        keys = ParityKeys.decode(data)
        assert keys.encode() == data
    except FieldError:
        digest = ScalarDigest.decode(data)
        assert digest.encode() == data


def _read_recording(data: bytes) -> None:
    """Every record and blob, as inspect and replay do: what is read is what lies there."""
    file = _MeteredFile(data)
    reader = LogReader(file)
    end = len(MAGIC) if data.startswith(MAGIC) else 0
    try:
        for entry in reader:
            assert entry.start == end
            assert pack(entry.record, reader.blob(entry)) == data[entry.start : entry.end]
            end = entry.end
    finally:
        assert reader.torn_bytes == len(data) - end, "whole and torn bytes are all bytes"
        assert file.num_read <= 4 * len(data), "a file is read a bounded number of times"


class _MeteredFile(BytesIO):
    """A file that notices when more is asked for than it has, or all of it too often."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._most = max(len(data), _SCAN_BYTES)
        self.num_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 <= size <= self._most
        found = super().read(size)
        self.num_read += len(found)
        return found


_LIFECYCLES = seeds.lifecycles()
_RECORDINGS = seeds.recordings()
_PARITY = (seeds.KEYS.encode(), seeds.DIGEST.encode())

TARGETS = {
    target.name: target
    for target in (
        Target(
            name="envelope",
            seeds=seeds.MESSAGES,
            mutate=message_mutation(seeds.MESSAGES + seeds.ANSWERS),
            read=_read_envelope,
        ),
        Target(
            name="result",
            seeds=seeds.ANSWERS,
            mutate=message_mutation(seeds.MESSAGES + seeds.ANSWERS),
            read=_read_result,
        ),
        Target(
            name="recording",
            seeds=_RECORDINGS,
            mutate=recording_mutation(_RECORDINGS),
            read=_read_recording,
        ),
        Target(
            name="parity",
            seeds=_PARITY,
            mutate=message_mutation(_PARITY + seeds.MESSAGES),
            read=_read_parity,
        ),
    )
}
