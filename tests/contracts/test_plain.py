"""What else than scalars a field may hold is nil or a leaf, and each only where it was declared."""

from dataclasses import dataclass
from typing import Any

import pytest

from scope_contracts.errors import FieldError
from scope_contracts.plain import Leaf, PlainRules, from_plain, to_plain
from scope_contracts.tensor_spec import DType, TensorSpec


def _complex(plain: Any) -> complex:
    return complex(*plain)


RULES = PlainRules(
    leaves={complex: Leaf(lower=lambda z: [z.real, z.imag], lift=_complex)},
    max_string_bytes=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    at: complex
    name: str | None = None
    specs: tuple[TensorSpec | None, ...] = ()


SPEC = TensorSpec("a", DType.BOOL, (2,))
POINT = Point(at=1 + 2j, name="é", specs=(None, SPEC))
PLAIN = {
    "at": [1.0, 2.0],
    "name": "é",
    "specs": [None, {"dtype": "bool", "name": "a", "shape": [2]}],
}


def test_optional_fields_and_leaves_have_one_plain_value() -> None:
    assert to_plain(POINT, RULES) == PLAIN
    assert from_plain(Point, PLAIN, RULES) == POINT
    assert to_plain(Point(at=0j), RULES) == {"at": [0.0, 0.0], "name": None, "specs": []}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"name": 7}, "name: got 7, want str"),
        ({"name": "long "}, "name: got 'long ', want at most 4 bytes"),
        ({"specs": [7]}, r"specs\[0\]: got 7, want dict"),
        ({"specs": None}, "specs: got None, want list"),
    ],
)
def test_a_field_is_refused_by_name(changed: dict[str, object], told: str) -> None:
    with pytest.raises(FieldError, match=told):
        from_plain(Point, PLAIN | changed, RULES)


def test_a_leaf_without_a_codec_is_refused() -> None:
    with pytest.raises(FieldError, match=r"at: got .*complex.*, want a kind of value that can be"):
        to_plain(POINT)
    with pytest.raises(FieldError, match=r"at: got .*complex"):
        from_plain(Point, PLAIN)
