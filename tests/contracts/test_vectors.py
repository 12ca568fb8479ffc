"""The bytes of every published message version never change."""

import json
from pathlib import Path

import pytest

from scope_contracts import PPEnvelope, PPResult, decode_envelope, decode_result, encode
from scope_contracts.plain import from_plain, to_plain

VECTORS = sorted((Path(__file__).parents[2] / "contracts" / "vectors").glob("*.json"))


def test_there_is_a_vector_of_every_kind() -> None:
    assert {path.stem for path in VECTORS} >= {
        "v1_envelope_first",
        "v1_envelope_steady",
        "v1_envelope_recompute",
        "v1_envelope_rebuilt",
        "v1_envelope_start_frame",
        "v1_envelope_shutdown",
        "v1_result_first",
        "v1_result_recompute",
        "v1_result_digest",
    }


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_golden_message_has_its_golden_bytes_both_ways(path: Path) -> None:
    vector = json.loads(path.read_text())
    data = bytes.fromhex(vector["hex"])
    message: PPEnvelope | PPResult
    if vector["message"] == "PPEnvelope":
        message, decoded = from_plain(PPEnvelope, vector["fields"]), decode_envelope(data)
        assert decoded == message
    else:
        message, result = from_plain(PPResult, vector["fields"]), decode_result(data)
        assert result == message
    assert encode(message) == data
    assert to_plain(message) == vector["fields"]
