"""What it costs to rebuild the cache at every second chunk only is measured, and told."""

from scope_runners.break_it import recompute_frequency
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.verdict import Verdict


def test_quality_and_speed_of_every_2_stand_beside_those_of_every_1(suite: Suite) -> None:
    result = recompute_frequency.compare(suite.driver.model)
    assert result.verdict is Verdict.MEASURED
    (sentence,) = result.notes
    assert "every 2 instead of every 1" in sentence
    assert "frames/s" in sentence
    assert "colours" in sentence
