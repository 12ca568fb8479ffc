"""A request that cannot be used is refused by one sentence that names what to change."""

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from scope_runners.serve.api_sessions import NewSession
from scope_runners.serve.api_state import first_wrong
from scope_runners.serve.commands import AnyCommand


def refusal(kind: Any, text: str) -> str:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_json(text)
    return first_wrong(refused.value.errors(include_url=False))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('{"kind": "jump"}', "kind: is not known; give one of prompt, hard_cut, bias, seed, "),
        ("{}", "kind: is missing; give one of prompt, hard_cut, bias, seed, rewind, pause, "),
        ('{"kind": "prompt"}', "prompt.text: is missing; add it"),
        ('{"kind": "prompt", "text": ""}', "prompt.text: is empty; fill it in"),
        ('{"kind": "hard_cut", "now": 1}', "hard_cut.now: is not known; leave it out"),
        ('{"kind": "bias", "value": 2}', "bias.value: must be less than or equal to 1"),
        ('{"kind": "record_start", "name": "../a"}', "record_start.name: has other characters"),
    ],
)
def test_a_wrong_command_is_told_what_to_change(command: str, said: str) -> None:
    assert refusal(AnyCommand, command).startswith(said)


def test_a_body_that_is_no_object_and_no_json_is_told_so() -> None:
    assert refusal(NewSession, "[]") == "the request: must be a JSON object"
    wrong = {"type": "json_invalid", "loc": ("body", 1), "msg": "", "ctx": {"error": "no colon"}}
    error = RequestValidationError([wrong])
    assert first_wrong(error.errors()) == "the request is not JSON (no colon); send one JSON object"
