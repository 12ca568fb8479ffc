"""The one state from which a stream is resumed, in a folder of files (`snapshot_folder`).

A state is a checksum, then the header and all of it but its tensors: these are files of their own,
without the zeros at their end. A tensor that was saved before is recognised by its identity and
neither hashed nor written again, unless its file is gone: tensors must never be changed in place.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import msgpack
import torch
from torch import Tensor

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import (
    ContractError,
    FieldError,
    SnapshotError,
    UserInputError,
    mismatch,
)
from scope_contracts.field_encoder import FieldEncoder
from scope_contracts.plain import Leaf, PlainRules, from_plain, to_plain
from scope_contracts.tensor_spec import DType
from scope_contracts.wire import decode_envelope, encode
from scope_rt.disk import STALL_TIMEOUT_S, DaemonExecutor, StallError, answer, remedy
from scope_rt.record.log import Log
from scope_rt.record.snapshot_folder import DIGEST_BYTES, SnapshotFolder
from scope_rt.record.snapshot_header import SnapshotHeader
from scope_rt.tensors import NAMES, TORCH_DTYPES, bytes_of

_LOOK_TIMEOUT_S = 10.0
"""How long a disk may take to tell how far a stream has come."""
_NO_LIMIT = 2**31

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class _Saved:
    """What `state` says of a tensor; `digest` names its file."""

    digest: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A tensor that was saved, and what a state says of it: it is in one for many chunks."""

    tensor: Tensor
    digest: str
    plain: dict[str, object]

    @classmethod
    def of(cls, tensor: Tensor, saved: _Saved) -> "_Known":
        return cls(tensor, saved.digest, to_plain(saved, _NO_TENSORS))


def look(folder: Path) -> SnapshotHeader | None:
    """The header of a snapshot, for who only watches: None where none can be read in 10 s."""
    read = DaemonExecutor("snapshot").submit(SnapshotStore(folder).header)
    try:
        return answer(read, timeout_s=_LOOK_TIMEOUT_S)
    except (UserInputError, StallError):
        return None


class SnapshotStore:
    """The folder of one stream. A save is written by the log's thread where there is a log.

    The folder need not exist before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, SnapshotFolder(folder)
        self._saved: dict[int, _Known] = {}
        """The tensors of the last state that was saved or loaded, by their `id`."""
        self._wanted: object = None
        """The save or removal that began last; any other must change nothing."""
        self._under_way: Callable[[], None] | None = None
        """Waits for a save."""
        self.leads_to = -1
        """The chunk before which the state continues that this process saved or loaded last; -1
        where there is none."""
        self._headers = FieldEncoder(SnapshotHeader, _NO_TENSORS)

    def save(self, header: SnapshotHeader, state: object, *, log: Log | None = None) -> None:
        """As `begin`, and wait for it."""
        self.begin(header, state, log=log)()

    def begin(
        self, header: SnapshotHeader, state: object, *, log: Log | None = None
    ) -> Callable[[], None]:
        """Have what was saved replaced, on the thread of the disk. `state`: dataclasses of scalars,
        texts, tuples and CPU tensors, none of which may change any more.

        With a `log`, all that was appended to it so far is written first, and `log_offset` is where
        that ends; where it has failed, nothing is saved.

        Returns at once what waits for it, `STALL_TIMEOUT_S` at most, and raises `SnapshotError`
        where the folder cannot be written, or the disk gives no answer in time: the snapshot before
        is still there. A save that nobody waits for comes all the same, until another begins.

        Raises:
            DamageError: the log is damaged.
        """
        save = self._wanted = object()
        write = partial(self._write, save, header, state)
        if log is not None:
            self._under_way = log.when_written(write)
        else:
            written = self._disk.submit(write, header.log_offset)
            self._under_way = partial(answer, written, timeout_s=STALL_TIMEOUT_S)
        return partial(self._await, save, self._under_way)

    def _await(self, save: object, wait: Callable[[], None]) -> None:
        try:
            wait()
        except OSError as error:
            raise SnapshotError(
                f"cannot write the snapshot {self.folder} ({error.strerror}), the one before it is "
                f"kept; {remedy(error)}"
            ) from error
        finally:
            if self._wanted is save:
                self._wanted = self._under_way = None

    def _write(self, save: object, header: SnapshotHeader, state: object, log_offset: int) -> None:
        """On the disk's thread."""
        tensors: dict[int, _Known] = {}
        new: dict[str, bytes] = {}
        rules = _rules(Leaf(lower=partial(self._lower, tensors, new), lift=_refuse_lift))
        packed_state = msgpack.packb(to_plain(state, rules))
        named = {
            known.digest: partial(_bytes_to_write, known.tensor, new.get(known.digest))
            for known in tensors.values()
        }
        packed_header = self._headers.encode(replace(header, log_offset=log_offset))
        packed = b"".join((_MAP_OF_2, _HEADER, packed_header, _STATE, packed_state))
        content = _checksum(packed) + packed
        self._files.write(content, named, is_wanted=lambda: save is self._wanted)
        if save is self._wanted:
            self._saved, self.leads_to = tensors, header.next_chunk_index

    def load(self, kind: type[State]) -> tuple[SnapshotHeader, State] | None:
        """What was saved last, `state` as the `kind` that it was; None where there is nothing.

        Raises:
            UserInputError: a file cannot be read or is damaged.
        """
        plain = self._read()
        if plain is None:
            return None
        tensors: dict[int, _Known] = {}
        rules = _rules(Leaf(lower=_refuse_lift, lift=partial(self._lift, tensors)))
        try:
            header = from_plain(SnapshotHeader, cast(Any, plain["header"]), rules)
            state = from_plain(kind, cast(Any, plain["state"]), rules)
        except (ContractError, KeyError, TypeError) as error:
            raise self._foreign(error) from error
        self._saved, self.leads_to = tensors, header.next_chunk_index
        return header, state

    def header(self) -> SnapshotHeader | None:
        """The header of what was saved last, without its tensors; None where there is nothing.

        Raises:
            UserInputError: the file cannot be read or is damaged.
        """
        plain = self._read()
        if plain is None:
            return None
        try:
            return from_plain(SnapshotHeader, cast(Any, plain["header"]), _NO_TENSORS)
        except (ContractError, KeyError, TypeError) as error:
            raise self._foreign(error) from error

    def close(self) -> None:
        """A save that is under way, because its disk gives no answer, changes nothing any more."""
        self._wanted = None

    def clear(self) -> None:
        """Remove the snapshot, its states first: there is nothing to resume. Foreign files stay.

        Waits for a save that nobody has waited for, and for the removal, `STALL_TIMEOUT_S` at most
        each.

        Raises:
            SnapshotError: a file cannot be removed, or the disk gives no answer.
        """
        removal = self._wanted = object()
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with suppress(OSError):
                under_way()
        self._saved, self.leads_to = {}, -1
        remove = partial(self._files.clear, is_wanted=lambda: removal is self._wanted)
        try:
            answer(self._disk.submit(remove), timeout_s=STALL_TIMEOUT_S)
        except OSError as error:
            raise SnapshotError(
                f"cannot remove the snapshot {self.folder} ({error.strerror}); do that yourself, "
                "or choose another folder"
            ) from error
        finally:
            self._wanted = None

    @cached_property
    def _disk(self) -> DaemonExecutor:
        """Most who read a snapshot never save one."""
        return DaemonExecutor("snapshot")

    def _lower(
        self,
        tensors: dict[int, _Known],
        new: dict[str, bytes],
        tensor: Tensor,
    ) -> object:
        """What `state` says of `tensor`; its bytes are kept in `new` if they must be written."""
        known = tensors.get(id(tensor)) or self._saved.get(id(tensor))
        if known is None or known.tensor is not tensor:
            raw = _kept_of(tensor)
            digest = blake2b(raw, digest_size=DIGEST_BYTES).hexdigest()
            saved = _Saved(digest, NAMES[tensor.dtype], tuple(tensor.shape))
            known, new[digest] = _Known.of(tensor, saved), raw
        tensors[id(tensor)] = known
        return known.plain

    def _lift(self, tensors: dict[int, _Known], plain: object) -> Tensor:
        saved = from_plain(_Saved, cast(Any, plain), _NO_TENSORS)
        try:
            raw = self._files.tensor(saved.digest)
        except OSError as error:
            raise self._damaged(f"{saved.digest}: {error.strerror}") from error
        if blake2b(raw, digest_size=DIGEST_BYTES).hexdigest() != saved.digest:
            raise self._damaged(f"the bytes of {saved.digest} are others")
        tensor = torch.zeros(saved.shape, dtype=TORCH_DTYPES[saved.dtype])
        if raw:
            flat = tensor.flatten().view(torch.uint8)
            flat[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        tensors[id(tensor)] = _Known.of(tensor, saved)
        return tensor

    def _read(self) -> dict[str, object] | None:
        """The newest state. Raises `UserInputError`."""
        try:
            name, data = self._files.newest()
        except OSError as error:
            raise UserInputError(
                f"cannot read the snapshot {self.folder} ({error.strerror}); {self._way_out}"
            ) from error
        packed = data[DIGEST_BYTES:]
        if not name:
            return None
        if data[:DIGEST_BYTES] != _checksum(packed):
            raise self._damaged(f"the checksum of {name} is another")
        plain: dict[str, object] = msgpack.unpackb(packed)
        return plain

    @property
    def _way_out(self) -> str:
        return f"to start the stream anew, delete {self.folder}"

    def _foreign(self, error: Exception) -> UserInputError:
        return UserInputError(
            f"the snapshot {self.folder} is of another version ({error}); {self._way_out}"
        )

    def _damaged(self, why: str) -> UserInputError:
        return UserInputError(f"the snapshot {self.folder} is damaged ({why}); {self._way_out}")


def _refuse_lift(value: object) -> Any:
    raise AssertionError("one rule reads, the other writes")


_ENCODED = Leaf(lower=encode, lift=lambda data: decode_envelope(_bytes(data)))
"""An envelope is encoded already."""


def _rules(tensor: Leaf) -> PlainRules:
    return PlainRules(
        leaves={Tensor: tensor, PPEnvelope: _ENCODED},
        max_list_length=_NO_LIMIT,
        max_string_bytes=_NO_LIMIT,
    )


_NO_TENSORS = _rules(Leaf(lower=_refuse_lift, lift=_refuse_lift))
_MAP_OF_2, _HEADER, _STATE = b"\x82", msgpack.packb("header"), msgpack.packb("state")


def _bytes_to_write(tensor: Tensor, known: bytes | None) -> bytes:
    return known or _kept_of(tensor)


def _kept_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor without the zeros at its end."""
    return bytes(bytes_of(tensor)).rstrip(b"\0")


def _bytes(plain: object) -> bytes:
    if not isinstance(plain, bytes):  # a map, as in earlier versions
        raise FieldError(mismatch("envelope", got=plain, want="its canonical bytes"))
    return plain


def _checksum(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=DIGEST_BYTES).digest()
