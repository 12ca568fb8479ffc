"""The example's numbers are golden values, and what it claims holds on the video model too."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_lab.kv_proof import VIDEO_BAR, AttentionProof, prove_on_attention, report
from scope_lab.kv_proof_video import prove_on_video
from scope_rt.lm.cache.contiguous import ContiguousCache
from tests.rounding import dot_bound

PROMPT_CONTEXT = [
    [0.4976, 0.9655, 0.7614],
    [0.7674, 1.2199, 1.2528],
    [0.8186, 1.2667, 1.3497],
    [0.7324, 1.1287, 1.2029],
    [0.6963, 1.0718, 1.1713],
    [0.6824, 1.0370, 1.1307],
]
NEW_TOKENS = [
    [0.2961, 0.5166, 0.2517],
    [0.6886, 0.0740, 0.8665],
    [0.1366, 0.1025, 0.1841],
    [0.7264, 0.3153, 0.6871],
]
DECODED = [
    [0.6538, 0.9875, 1.0863],
    [0.6674, 1.0268, 1.1071],
    [0.5850, 0.9149, 0.9716],
    [0.6361, 0.9934, 1.0588],
]


@pytest.fixture(scope="module")
def proof() -> AttentionProof:
    return prove_on_attention()


def printed(table: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in table.tolist()]


def test_the_numbers_are_the_known_ones(proof: AttentionProof) -> None:
    assert printed(proof.prompt_context_TC) == PROMPT_CONTEXT
    assert printed(proof.longer_context) == [*PROMPT_CONTEXT, DECODED[0]]
    assert printed(proof.new_tokens_NC) == NEW_TOKENS
    assert printed(proof.decoded_NC) == DECODED
    assert printed(proof.full_NC) == DECODED


def test_every_claim_holds_and_the_cache_grows_by_one_row_per_token(proof: AttentionProof) -> None:
    assert all(proof.claims.values())
    assert len(proof.claims) == 4
    assert [len(rows.keys) for rows in proof.cached] == [6, 7, 8, 9, 10]
    tokens, weights = torch.cat([proof.inputs_TC, proof.new_tokens_NC]), proof.weights
    for rows, weight in (
        (proof.cached[-1].keys, weights.keys),
        (proof.cached[-1].values, weights.values),
    ):
        assert ((rows - tokens @ weight).abs() <= 2 * dot_bound(tokens, weight)).all()


@pytest.mark.parametrize("plane", [0, 1], ids=["keys", "values"])
def test_a_cache_whose_earlier_rows_change_with_a_step_is_detected(
    monkeypatch: pytest.MonkeyPatch, plane: int
) -> None:
    advance = ContiguousCache.advance

    def advance_and_change(cache: ContiguousCache) -> None:
        advance(cache)
        if cache.lengths[0] == 10:  # after the last token was decoded: no context vector shows it
            cache.view(0)[plane][0, 2] += 1

    monkeypatch.setattr(ContiguousCache, "advance", advance_and_change)
    found = prove_on_attention()
    assert list(found.claims.values()) == [True, False, True, True]


def test_a_claim_that_does_not_hold_is_reported_as_failed(proof: AttentionProof) -> None:
    wrong = replace(proof, decoded_NC=proof.decoded_NC.flip(0))
    assert list(wrong.claims.values()) == [True, True, False, False]
    assert sum(line.startswith("FAILS") for line in report(wrong)) == 2


def test_cached_chunks_of_the_embedded_model_equal_full_attention() -> None:
    found = prove_on_video(num_chunks=3, window_frames=6)
    assert 0 < found.largest <= VIDEO_BAR
    assert torch.get_default_dtype() is torch.float32
