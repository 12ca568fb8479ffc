"""Fault 10 breaks nothing but the picture: the cache is rebuilt at every second chunk only.

It looks like a bargain, so its figures are measured again wherever the suite runs. They are told,
and not judged.
"""

from pathlib import Path

from scope_runners.break_it.scenario import SINGLE, Case
from scope_runners.break_it.verdict import Result, Verdict
from scope_runners.recompute_experiment import regression
from scope_runners.recompute_report import verdicts

LISTED = Case(
    number=10,
    name="recompute-every-2",
    what="the cache of a recompute model is rebuilt at every second chunk only: figures",
    natural=SINGLE,
    build=lambda topology, pace: None,
)
"""Its row in the list."""


def compare(model: Path) -> Result:
    """Quality and speed of every 2 instead of every 1, in this process."""
    experiment = regression(model)
    return Result(
        number=LISTED.number,
        name=LISTED.name,
        what=LISTED.what,
        plan=str(LISTED.natural.plan_id),
        tp=LISTED.natural.tp_degree,
        expected="figures",
        verdict=Verdict.MEASURED,
        num_chunks=experiment.num_chunks * sum(len(row.samples) for row in experiment.rows),
        notes=tuple(verdict.sentence() for verdict in verdicts(experiment)),
    )
