"""Two ranks that differ in any key are told which, with both values."""

from dataclasses import fields, replace
from typing import Any

import pytest

from scope_contracts import DType, FieldError, ParityError, ParityKeys, PlanId, compare

KEYS = ParityKeys(
    plan_id=PlanId.TP_V1_1,
    pp_enabled=False,
    kv_cache_recompute_every=1,
    kv_bias_backend="lse",
    tp_allow_compile=False,
    dtype=DType.FLOAT32,
    torch_version="2.13.0",
    package_version="0.1.0",
    model_fingerprint="ab12",
    world_layout="rank0+tp2",
)
OTHER: dict[str, Any] = {
    "plan_id": PlanId.PP0,
    "pp_enabled": True,
    "kv_cache_recompute_every": 2,
    "tp_allow_compile": True,
    "dtype": DType.FLOAT16,
}


def differing(name: str) -> ParityKeys:
    changes: dict[str, Any] = {name: OTHER.get(name, "other")}
    return replace(KEYS, **changes)


def test_equal_ranks_pass() -> None:
    compare([KEYS, replace(KEYS), KEYS])


@pytest.mark.parametrize("name", [f.name for f in fields(ParityKeys)])
def test_any_differing_key_is_named_with_both_values_and_ranks(name: str) -> None:
    other = differing(name)
    with pytest.raises(ParityError) as caught:
        compare([KEYS, KEYS, other, KEYS])
    text = str(caught.value)
    assert text.startswith(name)
    assert "rank 0" in text
    assert "rank 2" in text
    assert str(getattr(KEYS, name)) in text
    assert str(getattr(other, name)) in text


def test_the_message_names_the_variable_to_change() -> None:
    with pytest.raises(ParityError, match=r"SCOPE_TP_PLAN.*'tp_v1_1'.*'pp0'.*drift"):
        compare([KEYS, replace(KEYS, plan_id=PlanId.PP0)])


@pytest.mark.parametrize("name", [f.name for f in fields(ParityKeys)])
def test_the_bytes_tell_every_key_apart(name: str) -> None:
    other = differing(name)
    assert KEYS.encode() == replace(KEYS).encode()
    assert KEYS.encode() != other.encode()
    assert ParityKeys.decode(other.encode()) == other


def test_keys_of_another_package_are_refused_by_name() -> None:
    data = KEYS.encode().replace(b"world_layout", b"world_lay0ut")
    with pytest.raises(FieldError, match="world_lay0ut"):
        ParityKeys.decode(data)
