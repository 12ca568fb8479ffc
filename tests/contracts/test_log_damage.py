"""A flipped bit anywhere in a log is named, whatever follows it; only a torn end is cut off."""

import io

import pytest

from scope_contracts.errors import ContractError, WireError
from scope_contracts.log_file import MAGIC, LogReader, end_of_whole, pack
from scope_lab.sample_log import durable, finished, opened, packed, planned, story

DATA = packed(story())
ENDS = [len(packed(story()[:count])) for count in range(len(story()) + 1)]


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def is_named(data: bytes) -> bool:
    try:
        list(LogReader(io.BytesIO(data)))
    except ContractError:
        return True
    return False


def test_no_bit_of_a_log_can_be_flipped_without_a_word() -> None:
    bits = ((position, position % 8) for position in range(0, len(DATA), 3))
    assert [flip for flip in bits if not is_named(flipped(DATA, *flip))] == []


@pytest.mark.parametrize(
    "last", {record.kind: index for index, (record, _) in enumerate(story())}.values()
)
def test_nor_can_one_of_the_last_record_whichever_kind_it_is(last: int) -> None:
    data = packed(story()[:1]) + (pack(*story()[last]) if last else b"")
    bits = ((at, bit) for at in range(ENDS[1] if last else 0, len(data)) for bit in range(8))
    assert [flip for flip in bits if not is_named(flipped(data, *flip))] == []


def test_a_length_that_was_changed_hides_nothing_that_follows_it() -> None:
    """It may reach behind the end of the file, as that of a record that was cut off does."""
    for start in ENDS[1:]:
        for bit in range(16):
            if start == len(DATA):
                continue
            with pytest.raises(WireError, match=f"byte {start}: the log is damaged"):
                list(LogReader(io.BytesIO(flipped(DATA, start + bit // 8, bit % 8))))


@pytest.mark.parametrize("num_lost", [1, 300, 700])
def test_a_record_cut_off_behind_many_latents_is_torn(num_lost: int) -> None:
    whole = packed(story()[:3]) + pack(planned(0))
    torn = pack(*finished(0, values=range(200)))[:-num_lost]
    assert end_of_whole(io.BytesIO(whole + torn)) == len(whole)


@pytest.mark.parametrize("first_zero", [1024, 1536])
def test_a_sector_that_was_never_filled_is_torn(first_zero: int) -> None:
    whole = packed(story()[:1])
    data = bytearray(whole + pack(*finished(0, values=[0.1] * 300)))
    assert len(whole) < 1024 < len(data)
    data[first_zero : first_zero + 512] = bytes(len(data[first_zero : first_zero + 512]))
    assert end_of_whole(io.BytesIO(data)) == len(whole)


def test_latents_are_checked_again_when_they_are_asked_for() -> None:
    file = io.BytesIO(MAGIC + pack(opened()) + pack(*finished(0, values=range(9))))
    reader = LogReader(file)
    entry = list(reader)[-1]
    file.getbuffer()[entry.end - 1] ^= 1
    with pytest.raises(WireError, match="the log is damaged"):
        reader.blob(entry)


def test_a_durable_record_at_the_end_is_no_crash() -> None:
    data = packed([(opened(), b""), (durable(0), b"")])
    with pytest.raises(ContractError):
        end_of_whole(io.BytesIO(flipped(data, len(data) - 20)))
