"""Every chosen fault is tried on its default topology, or on the one that was asked for."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import starmap

from scope_contracts.errors import UserInputError
from scope_rt.topology import Topology
from scope_runners.break_it.catalogue import case_named
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.driver import Driver
from scope_runners.break_it.numeric_table import NumericResult
from scope_runners.break_it.observation import Observation
from scope_runners.break_it.scenario import Case, Scenario
from scope_runners.break_it.trials import TRIALS, Trial, TrialResult, judge_trial
from scope_runners.break_it.verdict import Result, judge, not_run
from scope_runners.namespaces import why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Runs cases on `driver`; on `topology` where one is given."""

    driver: Driver
    topology: Topology | None = None
    kv_cache: str | None = None
    """Of all streams, where one is given."""

    def run(self, case: Case, *, disarmed: tuple[Detector, ...] = ()) -> Result:
        """The row of one case."""
        scenario, topology = self._scenario(case), self.topology or case.default_topology
        if scenario is None:
            return not_run(case, topology, "not possible on this plan")
        if scenario.cuts_connection and (reason := why_not()) is not None:
            return not_run(case, topology, reason)
        return self._try(case, scenario, disarmed)[0]

    def trials(self, cases: Collection[Case]) -> Iterator[TrialResult]:
        """The faults of these cases that have a trial, with their detectors and without them.

        Raises:
            UserInputError: none has.
        """
        names = {case.name for case in cases}
        trials = [trial for trial in TRIALS if trial.case in names]
        if not trials:
            raise UserInputError(
                f"no detector is tried on {', '.join(sorted(names))}; --detectors alone tries all"
            )
        return map(self.trial, trials)

    def trial(self, trial: Trial) -> TrialResult:
        """A fault, with its detectors and without them.

        Raises:
            UserInputError: the topology that was asked for has no such fault.
        """
        case = case_named(trial.case)
        scenario = self._scenario(case)
        if scenario is None:
            raise UserInputError(f"{case.name} is not possible on this plan; drop --plan and --tp")
        armed, _ = self._try(case, scenario, ())
        disarmed, seen = self._try(case, scenario, trial.disarmed)
        chunk_s = self.driver.pace(scenario.topology).chunk_s
        return judge_trial(trial, armed=armed, disarmed=disarmed, seen=seen, chunk_s=chunk_s)

    def numeric(self, cases: Collection[Case]) -> Iterator[NumericResult]:
        """Those of these cases that are numeric and possible here, each at its levels, and without
        the layer that finds it.

        Raises:
            UserInputError: there is none.
        """
        levels: dict[str, list[Case]] = {}
        for case in cases:
            if case.level is not None and self._scenario(case) is not None:
                levels.setdefault(case.fault, []).append(case)
        if not levels:
            raise UserInputError("none of these faults changes numbers on this plan")
        return starmap(self._numeric, levels.items())

    def _numeric(self, fault: str, cases: list[Case]) -> NumericResult:
        *others, strictest = cases
        without = None
        if strictest.layer:
            without = self.trial(Trial(disarmed=strictest.layer, case=strictest.name))
        strict = self.run(strictest) if without is None else without.armed
        results = [*map(self.run, others), strict]
        by_level = {case.level: each for case, each in zip(cases, results, strict=True)}
        return NumericResult(fault=fault, by_level=by_level, without=without)

    def _scenario(self, case: Case) -> Scenario | None:
        topology = self.topology or case.default_topology
        scenario = case.build(topology, self.driver.pace(topology))
        if scenario is None or self.kv_cache is None or scenario.script.needs_its_cache:
            return scenario
        return replace(scenario, script=replace(scenario.script, kv_cache=self.kv_cache))

    def _try(
        self, case: Case, scenario: Scenario, disarmed: tuple[Detector, ...]
    ) -> tuple[Result, Observation]:
        seen = self.driver.run(scenario, disarmed=disarmed)
        reference = self.driver.reference(seen, scenario.topology)
        return judge(case, scenario, seen, reference), seen
