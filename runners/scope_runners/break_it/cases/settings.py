"""Faults 1 and 9: ranks that were not started alike. They must never get to a model collective."""

from scope_contracts.envelope import PlanId
from scope_rt.topology import Topology
from scope_runners.break_it.scenario import (
    PP1_TP2,
    TP2,
    Case,
    Pace,
    Scenario,
    last_generator,
    refused_by_all,
)


def _other_plan_in_environment(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.world_size == 1:
        return None
    other = PlanId.PP0 if topology.plan_id is PlanId.TP_V1_1 else PlanId.TP_V1_1
    return Scenario(
        topology=topology,
        environ={last_generator(topology): {"SCOPE_TP_PLAN": str(other)}},
        expected=refused_by_all(topology, "ParityError"),
    )


def _other_plan_in_arguments(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.world_size != 2:
        return None
    is_tp = topology.plan_id is PlanId.TP_V1_1
    return Scenario(
        topology=topology,
        differing_rank=1,
        differing_plan=str(PlanId.PP1 if is_tp else PlanId.TP_V1_1),
        differing_tp=1 if is_tp else 2,
        expected=refused_by_all(topology, "ParityError"),
    )


def _other_backend(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.world_size == 1:
        return None
    odd = last_generator(topology)
    return Scenario(
        topology=topology,
        environ={odd: {"SCOPE_KV_BIAS_BACKEND": "reference"}},
        expected=refused_by_all(topology, "ParityError"),
    )


CASES = (
    Case(
        number=1,
        name="plan-mismatch/variable",
        description="SCOPE_TP_PLAN differs on one rank",
        default_topology=PP1_TP2,
        build=_other_plan_in_environment,
    ),
    Case(
        number=1,
        name="plan-mismatch/arguments",
        description="one rank was started with another --plan",
        default_topology=TP2,
        build=_other_plan_in_arguments,
    ),
    Case(
        number=9,
        name="backend-mismatch",
        description="SCOPE_KV_BIAS_BACKEND differs on one rank",
        default_topology=TP2,
        build=_other_backend,
    ),
)
