"""A value from a person becomes a value of its setting's type, or one sentence that names it."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from scope_contracts.errors import UserInputError
from scope_contracts.tensor_spec import DType

_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def converted(name: str, value: object, kind: Any, *, is_read: bool = False) -> Any:
    """`value` as the annotation `kind` wants it; `is_read`: it is text, as of the environment.

    Raises:
        UserInputError: it is not of that kind.
    """
    kinds = get_args(kind) or (kind,)
    if value is None and NoneType in kinds:
        return None
    (wanted,) = (k for k in kinds if k is not NoneType)
    if is_read:
        value = _read(name, str(value), wanted)
    if wanted is DType:
        value = dtype_name(value)
    if issubclass(wanted, StrEnum):
        return _member(name, value, wanted)
    if wanted is Path and isinstance(value, str | Path):
        return Path(value)
    if wanted is str and isinstance(value, Path | StrEnum):
        return str(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise UserInputError(f"{name}: got {value!r}, want {_WORDS.get(wanted, wanted.__name__)}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a number must lie between; `above` excludes its own value, and `or_zero` adds 0."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    or_zero: bool = False
    unit: str = ""

    def check(self, name: str, value: float | None) -> None:
        """Refuse a number outside; None is a setting that was left open.

        Raises:
            UserInputError: naming the bounds.
        """
        if value is None or self._holds(value):
            return
        low = f"above {self.above:g}" if self.above is not None else f"at least {self.least:g}"
        high = "" if self.most is None else f" and at most {self.most:g}"
        unit = f" {self.unit}" if self.unit else ""
        zero = "0 or " if self.or_zero else ""
        raise UserInputError(f"{name}: got {value!r}, want {zero}a number {low}{high}{unit}")

    def _holds(self, value: float) -> bool:
        return (self.or_zero and value == 0) or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserInputError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserInputError(
            f"cannot read the configuration {path} ({error.strerror}); give a TOML file"
        ) from error
    except ValueError as error:
        raise UserInputError(f"the configuration {path} is no TOML: {error}; mend it") from error


def unknown_name(name: str, known: Collection[str], what: str) -> str:
    """The sentence for a name that nobody knows, with the nearest one that is known."""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(sorted(known))}"
    return f"{name!r} is no {what}; {hint}"


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}


def _read(name: str, text: str, wanted: type) -> object:
    """What the text of an environment variable says."""
    if wanted is bool:
        if text not in ("0", "1"):
            raise UserInputError(f"{name} is {text!r}; set it to 0 or 1")
        return text == "1"
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            raise UserInputError(f"{name} is {text!r}; give {_WORDS[wanted]}") from None
    return text


def dtype_name(value: object) -> str:
    """`bf16` and torch's own `torch.bfloat16` are `bfloat16`."""
    name = str(value).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def _member(name: str, value: object, wanted: type[StrEnum]) -> StrEnum:
    try:
        return wanted(str(value))
    except ValueError:
        choices = ", ".join(wanted)
        raise UserInputError(f"{name} {value!r} is unknown; choose one of {choices}") from None
