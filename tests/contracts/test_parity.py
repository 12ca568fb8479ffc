"""Two ranks that differ in any key or scalar are told which, with both values."""

import hashlib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest

from scope_contracts import (
    CacheIndices,
    DType,
    FieldError,
    MessageKind,
    ParityError,
    ParityKeys,
    PlanId,
    PPEnvelope,
    ScalarDigest,
    WireError,
    compare,
    compare_digests,
    encode,
)
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.parity import HASH_BYTES, state_hash
from scope_lab.fuzz.seeds import KEYS

OTHER: dict[str, Any] = {
    "plan_id": PlanId.PP0,
    "pp_enabled": True,
    "kv_cache_recompute_every": 2,
    "tp_allow_compile": True,
    "digest_every": 1,
    "input_digest": True,
    "heartbeat_timeout_s": 2.0,
    "slow_rank_factor": 4.0,
    "integrity": IntegrityLevel.STRICT,
    "verify_within": 1,
    "dtype": DType.FLOAT16,
    "start_frame": True,
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


INDICES = CacheIndices(global_end_index=96, local_end_index=72)
OTHER_SCALAR: dict[str, Any] = {
    "denoising_step_list": (1000.0, 937.5, 833.25, 624.0),
    "kv_cache_attention_bias": 0.5,
    "conditioning": "other text",
    "frames_kept": (0, 7, 8),
    "scores": "other scores",
}
TEXT = "0f" * 16
BY_SCORES: dict[str, Any] = {"frames_kept": (0, 6, 7), "scores": "1e" * 16}
SCALARS = [f.name for f in fields(ScalarDigest)]


def changed(digest: ScalarDigest, name: str) -> ScalarDigest:
    value = getattr(digest, name)
    changes: dict[str, Any] = {
        name: not value if isinstance(value, bool) else OTHER_SCALAR.get(name, 77)
    }
    return replace(digest, **changes)


@pytest.fixture
def digest(make_envelope: Callable[..., PPEnvelope]) -> ScalarDigest:
    plain = ScalarDigest.of(make_envelope("rebuilt"), INDICES, conditioning=TEXT)
    return replace(plain, **BY_SCORES)


def test_a_digest_takes_its_scalars_from_the_envelope_and_the_cache(
    make_envelope: Callable[..., PPEnvelope], digest: ScalarDigest
) -> None:
    envelope = make_envelope("rebuilt")
    for name in set(SCALARS) - {"conditioning", *BY_SCORES}:
        source = INDICES if name.endswith("_end_index") else envelope
        assert getattr(digest, name) == getattr(source, name)
    assert digest.conditioning == TEXT


def test_a_digest_covers_every_scalar_that_is_not_checked_elsewhere() -> None:
    elsewhere = {
        "pp_envelope_version": "wire",
        "plan_id": "parity at start",
        "kind": "a shutdown has no digest",
        "reset_kv_cache": "lifecycle: the same as init_cache",
        "expected_generator_calls": "preflight: follows from the others",
        "height": "preflight: against every tensor",
        "width": "preflight: against every tensor",
        "tensors": "preflight: the tensors in hand",
    }
    assert {f.name for f in fields(PPEnvelope)} - set(SCALARS) == set(elsewhere)


def test_ranks_about_to_run_the_same_pass(digest: ScalarDigest) -> None:
    compare_digests([digest, replace(digest)], ranks=[1, 2])


@pytest.mark.parametrize("name", SCALARS)
def test_any_differing_scalar_is_named_with_chunk_values_and_ranks(
    digest: ScalarDigest, name: str
) -> None:
    other = changed(digest, name)
    with pytest.raises(ParityError) as caught:
        compare_digests([digest, digest, other], ranks=[1, 2, 3])
    got, want = getattr(other, name), getattr(digest, name)
    assert str(caught.value) == (
        f"chunk 1: {name}: rank 1 has {want!r}, rank 3 has {got!r}; see runbooks/drift.md"
    )


@pytest.mark.parametrize("name", SCALARS)
def test_a_report_carries_every_scalar(digest: ScalarDigest, name: str) -> None:
    other = changed(digest, name)
    assert ScalarDigest.decode(other.encode()) == other != digest


def test_a_state_hash_tells_every_field_and_every_index_apart(
    make_envelope: Callable[..., PPEnvelope],
) -> None:
    envelope = make_envelope("rebuilt")
    others = {
        "tensors": envelope.tensors[1:],
        "plan_id": PlanId.PP1,
        "kind": MessageKind.SHUTDOWN,
        "denoising_step_list": (1000.0, 937.5, 833.25, 624.0),
        "kv_cache_attention_bias": 0.5,
    }
    hashes = {state_hash(replace(envelope), INDICES, conditioning=TEXT)}
    for name in {f.name for f in fields(PPEnvelope)} - {"pp_envelope_version"}:
        value = getattr(envelope, name)
        other = not value if isinstance(value, bool) else others.get(name, 77)
        changes: dict[str, Any] = {name: other}
        hashes.add(state_hash(replace(envelope, **changes), INDICES, conditioning=TEXT))
    for moved in (replace(INDICES, global_end_index=1), replace(INDICES, local_end_index=1)):
        hashes.add(state_hash(envelope, moved, conditioning=TEXT))
    hashes.add(state_hash(envelope, INDICES, conditioning=""))
    assert len(hashes) == len(fields(PPEnvelope)) + 3
    assert state_hash(envelope, INDICES, conditioning=TEXT) in hashes
    assert {len(each) for each in hashes} == {HASH_BYTES}


def test_a_digest_of_other_bytes_is_refused(digest: ScalarDigest) -> None:
    with pytest.raises(WireError):
        ScalarDigest.decode(digest.encode()[:-1])
    with pytest.raises(FieldError):
        ScalarDigest.decode(KEYS.encode())


def test_a_state_hash_is_of_the_envelope_as_it_travels_and_of_where_the_cache_stands(
    make_envelope: Callable[..., PPEnvelope],
) -> None:
    envelope = make_envelope("rebuilt")
    stands = msgpack.packb([INDICES.global_end_index, INDICES.local_end_index, TEXT])
    want = hashlib.blake2b(encode(envelope) + stands, digest_size=HASH_BYTES).digest()
    assert state_hash(envelope, INDICES, conditioning=TEXT) == want
