"""One table maps TP v1.1 names to canonical names, so that no third name can appear.

Fields that are not in the table have the same name in both.
"""

from collections.abc import Mapping

from scope_contracts.envelope import CONTEXT_FRAMES_OVERRIDE, PPEnvelope
from scope_contracts.errors import FieldError, mismatch
from scope_contracts.plain import field_types, from_plain, to_plain

CANONICAL_BY_TP = {
    "tp_plan": "plan_id",
    "tp_envelope_version": "pp_envelope_version",
    "tp_do_kv_recompute": "do_kv_recompute",
    "tp_num_denoise_steps": "num_denoise_steps",
    "tp_expected_generator_calls": "expected_generator_calls",
    "tp_reset_kv_cache": "reset_kv_cache",
    "tp_reset_crossattn_cache": "reset_crossattn_cache",
}

CANONICAL_BY_TENSOR_ALIAS = {"context_frames": CONTEXT_FRAMES_OVERRIDE}
"""Older names of tensors: understood when read, never written."""

_TP_BY_CANONICAL = {canonical: tp for tp, canonical in CANONICAL_BY_TP.items()}


def to_tp(envelope: PPEnvelope) -> dict[str, object]:
    """The envelope's plain values under their TP v1.1 names; raises `FieldError` as `encode`."""
    return {_TP_BY_CANONICAL.get(name, name): value for name, value in to_plain(envelope).items()}


def from_tp(mapping: Mapping[str, object]) -> PPEnvelope:
    """The envelope that a TP v1.1 mapping stands for; the inverse of `to_tp`.

    Raises `FieldError` for a missing, unknown or wrongly typed field; a field that has a TP name
    is unknown under its canonical one.
    """
    names = {_TP_BY_CANONICAL.get(name, name): name for name in field_types(PPEnvelope)}
    if set(mapping) != set(names):
        unknown, missing = sorted(set(mapping) - set(names)), sorted(set(names) - set(mapping))
        got = f"unknown {unknown}, missing {missing}"
        raise FieldError(mismatch("TP message", got=got, want="exactly the TP v1.1 fields"))
    plain = {canonical: mapping[tp] for tp, canonical in names.items()}
    return from_plain(PPEnvelope, plain | {"tensors": _canonical_tensors(plain["tensors"])})


def _canonical_tensors(specs: object) -> object:
    """Rename aliased tensors; anything that is not a list of specs is left to `from_plain`."""
    if not isinstance(specs, list):
        return specs
    return [_canonical_tensor(spec) if isinstance(spec, dict) else spec for spec in specs]


def _canonical_tensor(spec: dict[str, object]) -> dict[str, object]:
    name = spec.get("name")
    if isinstance(name, str) and name in CANONICAL_BY_TENSOR_ALIAS:
        return spec | {"name": CANONICAL_BY_TENSOR_ALIAS[name]}
    return spec
