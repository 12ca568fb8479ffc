"""A number that changes is found: in strict before a chunk is shown, by default within M chunks."""

import pytest

from scope_runners.break_it.catalogue import CASES, case_named
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import LEVELS, WITHIN
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.table import rows
from scope_runners.break_it.trials import Outcome, Trial
from scope_runners.break_it.verdict import Verdict
from tests.break_it.broken import Broken, said

SAID = {
    "weight-same-sum": "FingerprintError: chunk 3: rank 1: weight blocks.1.ffn.net.0.proj.weight",
    "rows-flip": "IntegrityError: chunk 3: rank 1: cached rows of layer 1, latent frame 8, are not",
    "text-next-prompt": "IntegrityError: chunk 4: rank 1: text values of layer 1 is not what",
    "skipped-write": "IntegrityError: chunk 3: rank 1: cached rows of layer 1, latent frame 9, are",
    "noise-one-rank": "IntegrityError: chunk 3, rank 1: noise before step 1, number",
    "precision-one": "IntegrityError: chunk 3: rank 1: numeric settings changed: fp32_cpu_matmul=",
}
"""What the rank that was changed says in strict."""


@pytest.mark.parametrize("name", SAID)
def test_strict_shows_no_chunk_of_a_numeric_fault(broken: Broken, name: str) -> None:
    result = broken(f"{name}/strict")
    assert said(result, 1).startswith(SAID[name])
    chunk = int(SAID[name].split("chunk ")[1][0])
    assert (result.num_chunks, result.detected_chunks) == (chunk, 0)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param("head", "chunk 29, rank {}, call 0: head, number", marks=pytest.mark.lab),
        pytest.param("start-noise", "chunk 32, rank {}: latents_in, number", marks=pytest.mark.lab),
        ("text-made", "chunk 3, rank {}: text values of layer 0, number"),
    ],
)
def test_what_all_ranks_compute_alike_names_itself_in_strict(
    broken: Broken, name: str, stage: str
) -> None:
    result = broken(f"{name}/strict")
    assert result.detected_chunks == 0
    wants = [f"rank {rank}: IntegrityError: {stage.format(rank)}" for rank in (0, 1)]
    assert any(map(" ".join(result.sentences).__contains__, wants)), result.sentences


@pytest.mark.parametrize("name", ["latents-nan", "latents-repeated", "picture-blank"])
def test_what_no_model_computes_is_refused_by_rank0_at_any_level(broken: Broken, name: str) -> None:
    result = broken(f"{name}/default")
    assert said(result, 0).startswith("IntegrityError: chunk 3: ")
    assert (result.num_chunks, result.detected_chunks) == (3, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_another_start_frame_than_was_encoded_is_never_shown(broken: Broken, level: str) -> None:
    result = broken(f"start-picture/{level}")
    assert said(result, 0).startswith("IntegrityError: chunk 0: rank 0: latents of the start frame")
    assert (result.num_chunks, result.detected_chunks) == (0, 0)


@pytest.mark.parametrize("name", ["weight-flip", "modulation-swap"])
def test_by_default_a_changed_state_is_found_within_m_chunks(suite: Suite, name: str) -> None:
    result = suite.run(case_named(f"{name}/default"))
    assert result.verdict is Verdict.PASSED, rows(result)
    assert result.detected_chunks is not None
    assert result.num_wrong <= result.detected_chunks < WITHIN


@pytest.mark.parametrize(
    ("detector", "name"),
    [
        (Detector.ROWS, "rows-zeros/strict"),
        (Detector.REPLICATED, "output-one-rank/default"),
        (Detector.EMITTED, "frames-earlier/default"),
    ],
)
def test_without_its_layer_a_numeric_fault_is_shown(
    suite: Suite, detector: Detector, name: str
) -> None:
    result = suite.trial(Trial(disarmed=(detector,), case=name))
    assert (result.outcome, result.shows_it) == (Outcome.DRIFT, True)


def test_every_numeric_fault_is_tried_at_each_level_that_finds_it() -> None:
    numeric = [case for case in CASES if case.level is not None]
    levels = {
        fault: tuple(case.level for case in numeric if case.fault == fault)
        for fault in {case.fault for case in numeric}
    }
    only_strict = {fault for fault, tried in levels.items() if tried != LEVELS}
    rank0_once = {"decoder-memory", "frames-shifted", "codec-highlights"}
    assert only_strict == {"early-write", "masses-misplaced"} | rank0_once
    assert all(levels[fault] == LEVELS[-1:] for fault in only_strict)
