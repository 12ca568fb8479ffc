"""Every field has exactly one TP v1.1 name, and no third name exists."""

from collections.abc import Callable
from dataclasses import fields

import pytest

from scope_contracts import (
    CANONICAL_BY_TP,
    CONTEXT_FRAMES_OVERRIDE,
    FieldError,
    PPEnvelope,
    from_tp,
    to_tp,
)

MakeEnvelope = Callable[..., PPEnvelope]


@pytest.mark.parametrize("chunk", ["first", "steady", "recompute"])
def test_every_envelope_survives_the_renaming(make_envelope: MakeEnvelope, chunk: str) -> None:
    envelope = make_envelope(chunk)
    assert from_tp(to_tp(envelope)) == envelope


def test_every_field_has_one_name_on_each_side(make_envelope: MakeEnvelope) -> None:
    canonical = {f.name for f in fields(PPEnvelope)}
    assert set(CANONICAL_BY_TP.values()) <= canonical
    translated = [CANONICAL_BY_TP.get(name, name) for name in to_tp(make_envelope())]
    assert len(translated) == len(set(translated))
    assert set(translated) == canonical


def test_the_names_are_those_of_tp_v1_1() -> None:
    assert set(CANONICAL_BY_TP) == {
        "tp_plan",
        "tp_envelope_version",
        "tp_do_kv_recompute",
        "tp_num_denoise_steps",
        "tp_expected_generator_calls",
        "tp_reset_kv_cache",
        "tp_reset_crossattn_cache",
    }


@pytest.mark.parametrize(("tp", "canonical"), sorted(CANONICAL_BY_TP.items()))
def test_a_canonical_name_is_unknown_in_a_tp_message(
    make_envelope: MakeEnvelope, tp: str, canonical: str
) -> None:
    message = to_tp(make_envelope())
    message[canonical] = message.pop(tp)
    with pytest.raises(FieldError, match=canonical):
        from_tp(message)


def test_a_missing_or_mistyped_field_is_refused(make_envelope: MakeEnvelope) -> None:
    message = to_tp(make_envelope())
    with pytest.raises(FieldError, match="tp_plan"):
        from_tp({name: value for name, value in message.items() if name != "tp_plan"})
    for wrong in (3, [3], [{"name": 3}]):
        with pytest.raises(FieldError, match="tensors"):
            from_tp(message | {"tensors": wrong})


def test_context_frames_is_read_as_the_override_and_never_written(
    make_envelope: MakeEnvelope,
) -> None:
    envelope = make_envelope("recompute")
    message = to_tp(envelope)
    specs = message["tensors"]
    assert isinstance(specs, list)
    assert specs[-1]["name"] == CONTEXT_FRAMES_OVERRIDE
    aliased = [*specs[:-1], specs[-1] | {"name": "context_frames"}]
    assert from_tp(message | {"tensors": aliased}) == envelope
