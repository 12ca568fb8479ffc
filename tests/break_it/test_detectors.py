"""Without its detector a fault gets through, and the suite says whether it hung or drifted."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from scope_contracts.errors import UserInputError
from scope_runners.break_it import driver
from scope_runners.break_it.catalogue import CASES, case_named, chosen
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.scenario import PP0, Scenario, unaffected
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.trials import TRIALS, Outcome, Trial, detectors_table
from scope_runners.break_it.watch import Watch
from tests.tiny_folder import RECIPE

pytestmark = pytest.mark.timeout(300)  # a trial is five runs, and one of them hangs


def test_every_detector_is_disarmed_in_some_trial_of_a_fault_that_exists() -> None:
    tried = {detector for trial in TRIALS for detector in trial.disarmed}
    assert tried == set(Detector)
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


def test_a_disarmed_run_has_as_long_as_a_clean_one_before_it_counts_as_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds_s = list[float]()

    class SeenWatch(Watch):
        def __init__(self, *, bound_s: float) -> None:
            bounds_s.append(bound_s)
            super().__init__(bound_s=bound_s)

    monkeypatch.setattr(driver, "Watch", SeenWatch)
    clean = SimpleNamespace(length_s=31.0)
    monkeypatch.setattr(driver.Driver, "clean", lambda *where: clean)
    suite = driver.Driver(
        model="",
        family=None,
        recomputing_family=None,
        recipe=RECIPE,
        prompt="",
        folder=tmp_path,
        bound_s=60.0,
        hang_bound_s=12.0,
        launch=lambda *how, **more: 0,
    )
    scenario = Scenario(topology=PP0, expected=unaffected(PP0, headline=""))
    suite.run(scenario)
    suite.run(scenario, disarmed=[Detector.HEARTBEAT])
    assert bounds_s == [60.0, 43.0]


def test_without_the_scalar_digest_another_bias_on_one_rank_drifts(suite: Suite) -> None:
    result = suite.trial(Trial(disarmed=(Detector.SCALAR_DIGEST,), case="bias-on-one-rank"))
    assert (result.outcome, result.shows_it) == (Outcome.DRIFT, True)
    assert result.what_happened.startswith("5 of 8 chunks")


@pytest.mark.lab
def test_without_the_heartbeat_a_stopped_rank_hangs_its_group(suite: Suite) -> None:
    result = suite.trial(Trial(disarmed=(Detector.HEARTBEAT,), case="stop/follower"))
    assert (result.outcome, result.shows_it) == (Outcome.HANG, True)
    assert result.disarmed.has_happened
    assert result.disarmed.num_left_behind == 0


def test_a_detector_that_does_not_stop_a_fault_is_not_credited_with_it(suite: Suite) -> None:
    trial = Trial(disarmed=(Detector.EPOCH_DROP,), case="bias-on-one-rank")
    result = suite.trial(trial)
    assert (result.outcome, result.shows_it) == (Outcome.CAUGHT, False)
    assert "**caught**: rank" in detectors_table([result])
