"""Any bytes end in whole records or in a named ContractError; a crash costs the torn tail only."""

import hashlib
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts.errors import ContractError, FieldError, VersionError, WireError
from scope_contracts.log_file import MAGIC, Entry, LogReader, end_of_whole, pack
from scope_contracts.log_records import (
    MAX_BLOB_BYTES,
    MAX_RECORD_BYTES,
    Closed,
    Control,
    Failed,
    Record,
    decode_record,
    encode_record,
)
from scope_contracts.plain import to_plain
from scope_contracts.tensor_spec import DType, TensorSpec
from scope_lab.sample_log import finished, opened, packed, planned, start_frame, story

DATA = packed(story())
START_FRAME, START_LATENTS = start_frame()
GOLDEN = "5237101b9f16a735bf495cd42ce10fbd6a588208b80561d3e7d24d5df4b946eb"
"""SHA-256 of the story in version 7: change it with the version only."""
ENDS = [len(packed(story()[:count])) for count in range(len(story()) + 1)]


def read(data: bytes) -> tuple[list[Entry], int]:
    reader = LogReader(io.BytesIO(data))
    return list(reader), reader.torn_bytes


def records(entries: Sequence[Entry]) -> list[Record]:
    return [entry.record for entry in entries]


def framed(body: bytes) -> bytes:
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def plain_of(record: Record) -> dict[str, Any]:
    plain: dict[str, Any] = msgpack.unpackb(encode_record(record))
    return plain


def test_the_bytes_of_this_version_never_change() -> None:
    assert hashlib.sha256(DATA).hexdigest() == GOLDEN


def test_a_planned_record_is_canonical_around_its_encoded_envelope() -> None:
    record = planned(3)
    plain = {"at_s": record.at_s, "envelope": to_plain(record.envelope), "kind": "planned"}
    assert encode_record(record) == msgpack.packb(plain)
    wrong: Any = 5
    for at_s in (float("nan"), wrong):
        with pytest.raises(FieldError, match=r"at_s: got .*, want a finite number"):
            encode_record(replace(record, at_s=at_s))


def test_a_file_holds_what_was_written_and_where() -> None:
    reader = LogReader(io.BytesIO(DATA))
    entries = list(reader)
    assert records(entries) == [record for record, _ in story()]
    assert [reader.blob(entry) for entry in entries] == [blob for _, blob in story()]
    assert [entry.end for entry in entries] == ENDS[1:]
    assert reader.torn_bytes == 0
    assert list(reader) == entries


@pytest.mark.parametrize(
    "record", [*{record.kind: record for record, _ in story()}.values(), START_FRAME]
)
def test_every_kind_has_one_byte_string(record: Record) -> None:
    data = encode_record(record)
    assert decode_record(data) == record
    longer = msgpack.packb(dict(reversed(plain_of(record).items())))
    with pytest.raises(WireError, match="canonical"):
        decode_record(longer)
    with pytest.raises(FieldError, match="zzz"):
        decode_record(msgpack.packb(plain_of(record) | {"zzz": 1}))


@pytest.mark.parametrize("last", {item[0].kind: item for item in story()}.values())
def test_a_crash_at_any_byte_of_a_kind_costs_that_record_and_no_other(
    last: tuple[Record, bytes],
) -> None:
    first = story()[0]
    before, data = packed([first]), packed([first, last])
    for length in range(len(before), len(data)):
        entries, torn_bytes = read(data[:length])
        assert records(entries) == [first[0]]
        assert torn_bytes == length - len(before)


def test_a_crash_costs_the_record_it_hit_and_no_other() -> None:
    for length in [*range(ENDS[1]), *range(ENDS[1], len(DATA), 7)]:
        entries, torn_bytes = read(DATA[:length])
        num_whole = sum(end <= length for end in ENDS[1:])
        assert records(entries) == [record for record, _ in story()[:num_whole]]
        kept = ENDS[num_whole] if length >= len(MAGIC) else 0
        assert torn_bytes == length - kept


@pytest.mark.parametrize("tail", [bytes(1), bytes(5000), b"\x20\x00\x00\x00" + bytes(60)])
def test_a_tail_that_the_file_system_never_filled_is_torn(tail: bytes) -> None:
    entries, torn_bytes = read(DATA + tail)
    assert len(entries) == len(story())
    assert torn_bytes == len(tail)


@pytest.mark.parametrize("index", [3, len(story())])
def test_a_bad_record_is_damage_and_what_comes_before_it_is_read(index: int) -> None:
    changed = bytearray(DATA)
    changed[ENDS[index] - 1] ^= 1
    reader = iter(LogReader(io.BytesIO(changed)))
    before = [next(reader).record for _ in range(index - 1)]
    assert before == [record for record, _ in story()[: index - 1]]
    with pytest.raises(WireError, match=f"byte {ENDS[index - 1]}: the log is damaged"):
        next(reader)


@given(position=st.integers(0, len(DATA) - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_never_read_as_another_record(position: int, byte: int) -> None:
    changed = bytearray(DATA)
    changed[position] = byte
    try:
        entries, torn_bytes = read(bytes(changed))
    except ContractError:
        return
    assert records(entries) == [record for record, _ in story()[: len(entries)]]
    assert torn_bytes == len(DATA) - ENDS[len(entries)]


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_any_bytes_give_records_or_contract_errors(
    data: bytes, is_recording: bool, is_frame: bool
) -> None:
    data = framed(data) if is_frame else data
    try:
        read(packed(story()[:1]) + data if is_recording else MAGIC + data)
    except ContractError:
        return


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_any_value_in_any_field_is_read_canonically_or_refused_by_name(data: st.DataObject) -> None:
    plain = plain_of(data.draw(st.sampled_from([record for record, _ in story()])))
    plain[data.draw(st.sampled_from(sorted(plain)))] = data.draw(msgpack_values)
    changed = msgpack.packb(plain)
    try:
        decoded = decode_record(changed)
    except ContractError:
        return
    assert encode_record(decoded) == changed


def test_unknown_versions_and_kinds_are_refused_by_name() -> None:
    newer = plain_of(opened()) | {"log_version": 8, "a_new_field": 1}
    with pytest.raises(VersionError, match="log_version: got 8, want 7; read it with the package"):
        decode_record(msgpack.packb(newer))
    older = plain_of(opened()) | {"recording_version": 2}
    del older["log_version"]
    with pytest.raises(VersionError, match="recording_version: got 2, want 7; read it with the"):
        decode_record(msgpack.packb(older))
    plain = plain_of(planned(0))
    plain["envelope"] |= {"pp_envelope_version": 2, "a_new_field": 1}
    with pytest.raises(VersionError, match="pp_envelope_version: got 2, want 1"):
        decode_record(msgpack.packb(plain))
    for kind in ("paused", 1, None, ["closed"]):
        with pytest.raises(FieldError, match=r"kind: got .*, want one of opened, begun"):
            decode_record(msgpack.packb({"at_s": 0.0, "kind": kind}))


def test_a_recording_begins_with_its_stream_and_a_foreign_file_is_refused() -> None:
    with pytest.raises(WireError, match=r"first record: got .*, want opened"):
        read(packed(story()[1:]))
    for foreign in (b"RIFF....", b"\x89PNG\r\n\x1a\n", bytes(8), b"\x89SCOPE\n\n"):
        with pytest.raises(WireError, match="is this a stream log of scope-rt"):
            read(foreign + DATA[8:])


def test_a_prompt_longer_than_a_message_string_is_kept_and_one_over_the_cap_refused() -> None:
    long = Control(at_s=0.0, chunk_index=0, prompt="é" * 20_000, embeds_sha256="a" * 64)
    assert decode_record(encode_record(long)) == long
    with pytest.raises(WireError, match=str(MAX_RECORD_BYTES)):
        pack(replace(long, prompt="x" * MAX_RECORD_BYTES))
    with pytest.raises(FieldError, match=r"prompt: .* UTF-8"):
        pack(replace(long, prompt="\ud800"))
    with pytest.raises(FieldError, match="error: got 7, want str"):
        decode_record(
            msgpack.packb(plain_of(Failed(at_s=0.0, chunk_index=0, error="")) | {"error": 7})
        )


@pytest.mark.parametrize("shape", [(-1,), (2**62,) * 256, (MAX_BLOB_BYTES // 4 + 1,)])
def test_no_record_can_ask_for_more_memory_than_the_cap(shape: tuple[int, ...]) -> None:
    record, _ = finished(0)
    hostile = replace(record, latents=TensorSpec("latents_out", DType.FLOAT32, shape))
    with pytest.raises(FieldError, match=r"latents.shape"):
        read(packed(story()[:1]) + framed(encode_record(hostile)))
    with pytest.raises(FieldError, match=r"latents.shape"):
        pack(hostile, b"")


def test_a_frame_over_the_cap_is_damage_and_its_bytes_are_not_read() -> None:
    class Counting(io.BytesIO):
        most = 0

        def read(self, size: int | None = -1, /) -> bytes:
            Counting.most = max(Counting.most, size or 0)
            return super().read(size)

    with pytest.raises(WireError, match="damaged"):
        list(LogReader(Counting(packed(story()[:1]) + b"\xff\xff\xff\x7f1234" + DATA)))
    assert Counting.most <= 2**20


def test_a_blob_must_have_the_size_its_record_says() -> None:
    record, latents = finished(0)
    with pytest.raises(FieldError, match="blob bytes: got 9, want the 8 of the record"):
        pack(record, latents + b"\x00")
    with pytest.raises(FieldError, match="blob"):
        pack(Closed(at_s=0.0), b"x")
    body = framed(encode_record(record))
    with pytest.raises(WireError, match="damaged"):
        read(packed(story()[:1]) + body + framed(latents + b"\x00") + DATA)
    with pytest.raises(WireError, match="damaged"):
        read(packed(story()[:1]) + body + framed(bytes(2**20))[:-1])


def test_a_torn_tail_is_not_of_the_whole_records_and_nothing_else_is_cut_off() -> None:
    whole = packed(story()[:5])
    assert end_of_whole(io.BytesIO(whole + pack(*finished(1))[:-1])) == len(whole)


@pytest.mark.parametrize("count", range(1, len(story()) + 1))
def test_of_a_whole_file_only_the_end_is_read(count: int) -> None:
    data = packed(story()[:count])
    assert LogReader(io.BytesIO(data)).ends_whole()
    assert not LogReader(io.BytesIO(data[:-1])).ends_whole()
    assert not LogReader(io.BytesIO(data + bytes(16))).ends_whole()
    assert end_of_whole(io.BytesIO(data)) == len(data)


def test_a_start_frame_lies_in_the_log_with_its_latents() -> None:
    data = packed([*story()[:2], (START_FRAME, START_LATENTS)])
    (*_, entry), torn = read(data)
    assert (entry.record, torn) == (START_FRAME, 0)
    assert LogReader(io.BytesIO(data)).blob(entry) == START_LATENTS
    flipped = bytearray(data)
    flipped[-1] ^= 1
    with pytest.raises(WireError, match="the log is damaged"):
        LogReader(io.BytesIO(flipped)).blob(entry)
    with pytest.raises(FieldError, match="blob bytes: got 7, want the 8 of the record"):
        pack(START_FRAME, START_LATENTS[:7])
    empty = replace(START_FRAME, latents=replace(START_FRAME.latents, shape=(1, -1)))
    with pytest.raises(FieldError, match=r"latents\.shape"):
        pack(empty)


def test_a_record_without_its_blob_does_not_end_a_file() -> None:
    record, latents = finished(0)
    head = packed(story()[:1]) + pack(record, latents)[: -len(latents) - 8]
    assert not LogReader(io.BytesIO(head)).ends_whole()
    assert read(head)[1] == len(head) - ENDS[1]


def test_the_end_of_a_damaged_or_foreign_file_is_refused() -> None:
    """A wrong length must not make what follows it look like a torn tail."""
    damaged = bytearray(DATA)
    damaged[ENDS[2] + 2] ^= 1
    damaged[ENDS[3] - 1] ^= 1
    for data in (bytes(damaged), b"a letter to a friend"):
        with pytest.raises(ContractError):
            end_of_whole(io.BytesIO(data))


@pytest.mark.parametrize("left", [b"", MAGIC[:3], MAGIC, MAGIC + b"\x01"])
def test_a_file_without_a_whole_record_has_no_end(left: bytes) -> None:
    assert end_of_whole(io.BytesIO(left)) == 0
