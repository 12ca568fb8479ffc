"""Without its tripwire a fault gets through, and the suite says whether it hung or drifted."""

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.tripwires import Tripwire
from scope_runners.break_it.catalogue import CASES, case_named, chosen
from scope_runners.break_it.detectors import TRIALS, Outcome, Trial, detectors_table
from scope_runners.break_it.suite import Suite


def test_every_tripwire_is_disarmed_in_some_trial_of_a_fault_that_exists() -> None:
    assert {tripwire for trial in TRIALS for tripwire in trial.disarmed} == set(Tripwire)
    assert all(case_named(trial.case) for trial in TRIALS)


def test_a_named_fault_is_the_only_one_whose_detectors_are_tried(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Suite, "trial", lambda suite, trial: trial.case)
    tried: list[object] = list(suite.trials(chosen(["bit-flip", "slow-rank"])))
    assert tried == ["bit-flip/inputs", "slow-rank"]
    assert len(list(suite.trials(CASES))) == len(TRIALS)
    with pytest.raises(UserInputError, match="no detector is tried on disk-full"):
        suite.trials(chosen(["disk-full"]))


def test_without_the_scalar_digest_another_bias_on_one_rank_drifts(suite: Suite) -> None:
    result = suite.trial(Trial(disarmed=(Tripwire.SCALAR_DIGEST,), case="bias-on-one-rank"))
    assert (result.outcome, result.shows_it) == (Outcome.DRIFT, True)
    assert result.what_happened.startswith("5 of 8 chunks")


def test_without_the_heartbeat_a_stopped_rank_hangs_its_group(suite: Suite) -> None:
    result = suite.trial(Trial(disarmed=(Tripwire.HEARTBEAT,), case="stop/follower"))
    assert (result.outcome, result.shows_it) == (Outcome.HANG, True)
    assert result.disarmed.num_left_behind == 0


def test_a_tripwire_that_does_not_stop_a_fault_is_not_credited_with_it(suite: Suite) -> None:
    trial = Trial(disarmed=(Tripwire.EPOCH_DROP,), case="bias-on-one-rank")
    result = suite.trial(trial)
    assert (result.outcome, result.shows_it) == (Outcome.CAUGHT, False)
    assert "**caught**: rank" in detectors_table([result])
