"""Any bytes end in one canonical message or in a named ContractError."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts import (
    MAX_MESSAGE_BYTES,
    ContractError,
    DType,
    FieldError,
    MessageKind,
    PlanId,
    PPEnvelope,
    PPResult,
    TensorSpec,
    VersionError,
    WireError,
    decode_envelope,
    decode_result,
    encode,
)

integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
specs = st.builds(
    TensorSpec, texts, st.sampled_from(DType), st.lists(integers, max_size=5).map(tuple)
)
tensors = st.lists(specs, max_size=3).map(tuple)
steps = st.lists(floats, max_size=6).map(tuple)
stages = st.lists(st.tuples(texts, floats), max_size=3).map(tuple)
by_type: dict[Any, st.SearchStrategy[Any]] = {
    int: integers,
    float: floats,
    bool: st.booleans(),
    PlanId: st.sampled_from(PlanId),
    MessageKind: st.sampled_from(MessageKind),
    tuple[float, ...]: steps,
    tuple[TensorSpec, ...]: tensors,
    tuple[tuple[str, float], ...]: stages,
}


def messages(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a message type that the wire can carry."""
    free = {f.name: by_type[f.type] for f in fields(kind) if f.name != "pp_envelope_version"}
    return st.fixed_dictionaries(free).map(lambda values: kind(**values))


def pack(plain: object) -> bytes:
    data: bytes = msgpack.packb(plain)
    return data


def unpack(data: bytes) -> dict[str, Any]:
    plain: dict[str, Any] = msgpack.unpackb(data)
    return plain


@given(messages(PPEnvelope))
def test_an_envelope_survives_the_wire(envelope: PPEnvelope) -> None:
    assert decode_envelope(encode(envelope)) == envelope


@given(messages(PPResult))
def test_a_result_survives_the_wire(result: PPResult) -> None:
    assert decode_result(encode(result)) == result


def test_equal_messages_have_equal_bytes_down_to_the_sign_of_zero() -> None:
    plus, minus = (
        PPResult(
            call_id=0,
            chunk_index=0,
            cache_epoch=0,
            observed_generator_calls=5,
            stage_ms=(("decode", zero),),
        )
        for zero in (0.0, -0.0)
    )
    assert plus == minus
    assert encode(plus) == encode(minus)


def test_a_message_is_encoded_once_and_a_changed_one_anew(
    make_envelope: Callable[..., PPEnvelope],
) -> None:
    envelope = make_envelope("steady")
    data = encode(envelope)
    assert encode(envelope) is data
    assert encode(decode_envelope(data)) is data, "what arrived is passed on as it came"
    assert encode(replace(envelope)) == data
    changed = replace(envelope, call_id=envelope.call_id + 1)
    assert decode_envelope(encode(changed)) == changed


@given(st.binary(max_size=200))
def test_any_bytes_give_only_contract_errors(data: bytes) -> None:
    for decode in (decode_envelope, decode_result):
        with pytest.raises(ContractError):
            decode(data)


msgpack_values = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | texts | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_any_value_in_any_field_is_accepted_canonically_or_refused_by_name(
    make_envelope: Callable[..., PPEnvelope], data: st.DataObject
) -> None:
    plain = unpack(encode(make_envelope("recompute")))
    plain[data.draw(st.sampled_from(sorted(plain)))] = data.draw(msgpack_values)
    changed = pack(plain)
    try:
        decoded = decode_envelope(changed)
    except ContractError:
        return
    assert encode(replace(decoded)) == changed


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_damaged_byte_never_makes_a_second_spelling(
    make_envelope: Callable[..., PPEnvelope], position: int, byte: int
) -> None:
    data = bytearray(encode(make_envelope("recompute")))
    data[position % len(data)] = byte
    try:
        decoded = decode_envelope(bytes(data))
    except ContractError:
        return
    assert encode(replace(decoded)) == bytes(data)


def test_every_truncation_is_refused(make_envelope: Callable[..., PPEnvelope]) -> None:
    data = encode(make_envelope())
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode_envelope(data[:length])


def test_trailing_bytes_are_refused(make_envelope: Callable[..., PPEnvelope]) -> None:
    with pytest.raises(WireError):
        decode_envelope(encode(make_envelope()) + b"\x00")


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 60_000 + b"\xc0",
        b"\x81\xa1a" * 20_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xd6\xff\xff\xff\xff\xff",
        b"\xc7\x00\x05",
        b"\x81\x91\x01\x02",
        b"\x81\xc4\x01a\x02",
        b"",
    ],
    ids=[
        "deep lists",
        "deep maps",
        "endless list",
        "endless map",
        "endless bytes",
        "timestamp",
        "extension",
        "list as key",
        "bytes as key",
        "nothing",
    ],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_envelope(data)


@pytest.mark.parametrize("depth", [1, 100, 500, 900, 1000, 1020, 1023, 1100, 20_000])
def test_a_deeply_nested_field_is_a_contract_error_at_every_depth(
    make_envelope: Callable[..., PPEnvelope], depth: int
) -> None:
    data = encode(make_envelope(height=1))
    one_field = b"\xa6height\x01"
    assert one_field in data
    with pytest.raises(ContractError):
        decode_envelope(data.replace(one_field, one_field[:-1] + b"\x91" * depth + b"\xc0"))


def test_a_hostile_value_cannot_fill_the_log(make_envelope: Callable[..., PPEnvelope]) -> None:
    plain = unpack(encode(make_envelope()))
    with pytest.raises(FieldError, match="height") as caught:
        decode_envelope(pack(plain | {"height": "x" * 60_000}))
    assert len(str(caught.value)) < 300
    with pytest.raises(FieldError) as caught:
        decode_envelope(pack(plain | {"x" * 60_000: 1}))
    assert len(str(caught.value)) < 300


def test_a_message_over_the_size_cap_is_refused_on_both_sides(
    make_envelope: Callable[..., PPEnvelope],
) -> None:
    with pytest.raises(WireError, match="65536"):
        decode_envelope(b"\xc0" * (MAX_MESSAGE_BYTES + 1))
    large = TensorSpec("x" * 256, DType.BOOL, (2**62,) * 256)
    with pytest.raises(WireError, match="65536"):
        encode(make_envelope(tensors=(large,) * 256))


def test_unknown_version_is_refused_before_its_unknown_fields(
    make_envelope: Callable[..., PPEnvelope],
) -> None:
    plain = unpack(encode(make_envelope())) | {"pp_envelope_version": 2, "a_new_field": 1}
    with pytest.raises(VersionError, match="pp_envelope_version: got 2, want 1"):
        decode_envelope(pack(plain))
    with pytest.raises(VersionError):
        encode(make_envelope(pp_envelope_version=2))


def test_unknown_missing_and_repeated_fields_are_refused(
    make_envelope: Callable[..., PPEnvelope],
) -> None:
    data = encode(make_envelope(height=1))
    with pytest.raises(FieldError, match="zzz"):
        decode_envelope(pack(unpack(data) | {"zzz": 1}))
    for name in unpack(data):
        with pytest.raises(FieldError, match=name):
            decode_envelope(pack({k: v for k, v in unpack(data).items() if k != name}))
    num_fields = len(fields(PPEnvelope))
    assert data[:3] == bytes([0xDE, 0, num_fields])
    with pytest.raises(FieldError, match="height twice"):
        decode_envelope(bytes([0xDE, 0, num_fields + 1]) + data[3:] + b"\xa6height\x01")


def test_a_result_is_not_an_envelope(make_envelope: Callable[..., PPEnvelope]) -> None:
    with pytest.raises(FieldError, match="only fields of this version"):
        decode_result(encode(make_envelope()))


WRONG = [
    ("height", True),
    ("height", 64.0),
    ("height", "64"),
    ("height", None),
    ("height", 2**63),
    ("init_cache", 1),
    ("kv_cache_attention_bias", 1),
    ("kv_cache_attention_bias", float("nan")),
    ("kv_cache_attention_bias", float("inf")),
    ("denoising_step_list", [1000.0, 1]),
    ("denoising_step_list", 1000.0),
    ("denoising_step_list", [1.0] * 257),
    ("plan_id", "tp_v9"),
    ("kind", b"infer"),
    ("tensors", {}),
    ("tensors", [{"name": "x", "dtype": "float32"}]),
    ("tensors", [{"name": "x", "dtype": "float8", "shape": []}]),
    ("tensors", [{"name": "x" * 257, "dtype": "float32", "shape": []}]),
    ("tensors", [{"name": "x", "dtype": "float32", "shape": [True]}]),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_its_field_named(
    make_envelope: Callable[..., PPEnvelope], name: str, value: object
) -> None:
    with pytest.raises(FieldError, match=name):
        decode_envelope(pack(unpack(encode(make_envelope())) | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("height", True),
        ("height", 2**63),
        ("kv_cache_attention_bias", float("nan")),
        ("kv_cache_attention_bias", 1),
        ("denoising_step_list", [1000.0]),
        ("plan_id", "pp0"),
        ("tensors", ("latents_in",)),
        ("tensors", (TensorSpec("\ud800", DType.BOOL, ()),)),
    ],
)
def test_a_wrong_value_never_leaves_the_sender(
    make_envelope: Callable[..., PPEnvelope], name: str, value: object
) -> None:
    with pytest.raises(FieldError, match=name):
        encode(make_envelope(**{name: value}))


@pytest.mark.parametrize(
    ("canonical", "longer"),
    [
        (b"\xa6height\x01", b"\xa6height\xcc\x01"),
        (b"\xa6height\x01", b"\xa6height\xd2\x00\x00\x00\x01"),
        (b"\xa6height\x01", b"\xd9\x06height\x01"),
        (
            b"\xb7kv_cache_attention_bias\xcb\x3f\xf0" + bytes(6),
            b"\xb7kv_cache_attention_bias\xca\x3f\x80\x00\x00",
        ),
        (b"\xa7tensors\x90", b"\xa7tensors\xdc\x00\x00"),
    ],
    ids=["uint8", "int32", "str8", "float32", "array16"],
)
def test_a_longer_spelling_of_the_same_value_is_refused(
    make_envelope: Callable[..., PPEnvelope], canonical: bytes, longer: bytes
) -> None:
    data = encode(make_envelope(height=1, tensors=()))
    assert data.count(canonical) == 1
    with pytest.raises(WireError, match="canonical"):
        decode_envelope(data.replace(canonical, longer))


def test_another_key_order_is_refused(make_envelope: Callable[..., PPEnvelope]) -> None:
    plain = unpack(encode(make_envelope()))
    with pytest.raises(WireError, match="canonical"):
        decode_envelope(pack(dict(reversed(plain.items()))))
