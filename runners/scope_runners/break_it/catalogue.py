"""Every fault has a number, every way to bring it about a name, and both find it."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from scope_contracts.errors import UserInputError
from scope_runners.break_it.cases import (
    arithmetic,
    cached_rows,
    consumers,
    data,
    derived,
    edges,
    envelopes,
    kept_frames,
    link,
    one_rank_computes,
    origin,
    rank0,
    ranks,
    recompute,
    settings,
    values,
    weights,
)
from scope_runners.break_it.scenario import Case
from scope_runners.wording import nearest

CASES: tuple[Case, ...] = tuple(
    sorted(
        (
            *settings.CASES,
            *envelopes.CASES,
            *recompute.CASES,
            *data.CASES,
            *ranks.CASES,
            *consumers.CASES,
            *weights.CASES,
            *cached_rows.CASES,
            *derived.CASES,
            *one_rank_computes.CASES,
            *values.CASES,
            *link.CASES,
            *origin.CASES,
            *arithmetic.CASES,
            *edges.CASES,
            *kept_frames.CASES,
            *rank0.CASES,
        ),
        key=lambda case: case.number,
    )
)

MEASURED_ELSEWHERE = {"10", "recompute-every-2"}
WHERE_MEASURED = (
    "recompute-every-2 breaks nothing: `scripts/lab recompute_experiment` of the repository "
    "measures it"
)


def chosen(names: Sequence[str], *, among: Sequence[Case] = CASES) -> tuple[Case, ...]:
    """The cases of `names`: of a fault's number, or of a name or the beginning of one.

    Raises:
        UserInputError: there is none of that name, or it is measured elsewhere.
    """
    found: list[Case] = []
    for name in names:
        if name in MEASURED_ELSEWHERE:
            raise UserInputError(f"fault 10, {WHERE_MEASURED}")
        hits = [case for case in among if _is_meant(name, case)]
        if not hits:
            raise UserInputError(
                f"no fault is called {name!r}{_nearest(name, among)}; see scope-rt break-it --list"
            )
        found += [case for case in hits if case not in found]
    return tuple(found)


def case_named(name: str) -> Case:
    """The one case of this name."""
    (case,) = (case for case in CASES if case.name == name)
    return case


def _is_meant(name: str, case: Case) -> bool:
    return name in (str(case.number), case.name) or case.name.startswith(f"{name}/")


def _nearest(name: str, among: Sequence[Case]) -> str:
    paths = (PurePosixPath(case.name) for case in among)
    known = sorted({str(each) for path in paths for each in (path, *path.parents)})
    return nearest(name, known)
