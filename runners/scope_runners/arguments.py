"""What cannot be used, a length, a seed or a folder, is refused before anything starts."""

import argparse
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TypeVar

from scope_contracts.tensor_spec import DType
from scope_rt.config_values import dtype_name

_DTYPES = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
Choice = TypeVar("Choice", bound=StrEnum)
MOST = 1e6
"""Of seconds or minutes: beyond it clocks overflow, and schedules fill the memory."""


def positive_number(text: str) -> float:
    """An argument type: a length of time, in whatever unit its option says."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST:  # which nan is not either
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, {MOST:,.0f} at most")
    return number


def positive(text: str) -> int:
    """An argument type: a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seed(text: str) -> int:
    """An argument type: of random choices; equal ones make equal streams."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def dtype(text: str) -> DType:
    """An argument type: of floating-point numbers, as a stream's setting is written."""
    return one_of(_DTYPES)(dtype_name(text))


def one_of(choices: Iterable[Choice]) -> Callable[[str], Choice]:
    """An argument type: the member of an enum that is written so."""
    by_name = {str(choice): choice for choice in choices}

    def read(text: str) -> Choice:
        if text not in by_name:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(by_name)}")
        return by_name[text]

    return read
