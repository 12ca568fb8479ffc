"""What is not encoded again has the bytes that it would get."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts import DType, FieldError, PPEnvelope, PPResult, TensorSpec, encode
from scope_contracts.field_encoder import FieldEncoder
from scope_contracts.log_records import Closed, encode_record
from scope_contracts.plain import to_plain
from scope_lab.sample_log import finished, planned
from tests.contracts.test_wire import messages

ENVELOPE = planned(3).envelope


def whole(message: Any) -> bytes:
    data: bytes = msgpack.packb(to_plain(message))
    return data


@pytest.mark.parametrize("kind", [PPEnvelope, PPResult])
def test_messages_in_a_row_have_the_bytes_that_each_has_alone(kind: type[Any]) -> None:
    encoder = FieldEncoder(kind)

    @given(st.lists(messages(kind), min_size=1, max_size=4), st.data())
    def check(row: list[Any], data: st.DataObject) -> None:
        for before, message in zip((row[-1], *row), row, strict=False):
            names = data.draw(st.sets(st.sampled_from(list(kind.__dataclass_fields__))))
            repeated = {name: getattr(before, name) for name in names}
            assert encoder.encode(replace(message, **repeated)) == whole(
                replace(message, **repeated)
            )

    check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("base_seed", True), ("base_seed", 0.0), ("clean_pass", 1), ("kv_cache_attention_bias", 1)],
)
def test_an_equal_value_of_another_kind_is_still_refused(name: str, value: object) -> None:
    right: dict[str, Any] = {name: type(getattr(ENVELOPE, name))(value)}
    wrong: dict[str, Any] = {name: value}
    encode(replace(ENVELOPE, **right))
    with pytest.raises(FieldError, match=name):
        encode(replace(ENVELOPE, **wrong))


def test_a_refused_message_leaves_nothing_behind() -> None:
    wide: Any = "wide"
    encoder, bad = FieldEncoder(PPEnvelope), replace(ENVELOPE, call_id=7, width=wide)
    encoder.encode(ENVELOPE)
    with pytest.raises(FieldError, match="width"):
        encoder.encode(bad)
    with pytest.raises(FieldError, match="width"):
        encoder.encode(replace(bad))
    assert encoder.encode(ENVELOPE) == whole(ENVELOPE)


def test_a_field_that_changed_in_memory_is_encoded_as_it_is_now() -> None:
    encoder, envelope = FieldEncoder(PPEnvelope), replace(ENVELOPE)
    encoder.encode(envelope)
    specs = (TensorSpec("latents_in", DType.FLOAT32, (1,)),)
    object.__setattr__(envelope, "tensors", specs)
    assert encoder.encode(envelope) == whole(replace(ENVELOPE, tensors=specs))


def test_a_record_names_its_kind_among_its_fields() -> None:
    for record in (finished(1)[0], finished(2)[0], Closed(at_s=1.0), Closed(at_s=2.0)):
        want = to_plain(record) | {"kind": str(record.kind)}
        assert encode_record(record) == msgpack.packb(dict(sorted(want.items())))
