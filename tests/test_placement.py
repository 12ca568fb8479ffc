"""Every generator rank has a GPU of its own; a control rank may share one, or have none."""

import pytest

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.placement import Host, device_of
from scope_rt.setup_choices import host_of
from scope_rt.topology import Topology


def devices(
    plan: PlanId, tp: int, num_gpus: int, *, control: str | None = None, first: int = 0
) -> list[str]:
    """Of the ranks of one host, of which there are as many as the plan has, or those from `first`
    on."""
    topology = Topology(plan_id=plan, tp_degree=tp)
    ranks = range(first, topology.world_size)
    host = Host(first_rank=first, num_ranks=len(ranks), num_gpus=num_gpus)
    return [str(device_of(rank, topology, host, control_device=control)) for rank in ranks]


@pytest.mark.parametrize(
    ("plan", "tp", "num_gpus", "control", "want"),
    [
        (PlanId.SINGLE, 1, 0, None, ["cpu"]),
        (PlanId.PP1, 2, 0, None, ["cpu", "cpu", "cpu"]),
        (PlanId.SINGLE, 1, 1, None, ["cuda:0"]),
        (PlanId.TP_V1_1, 2, 2, None, ["cuda:0", "cuda:1"]),
        (PlanId.PP1, 1, 1, None, ["cuda:0", "cuda:0"]),
        (PlanId.PP1, 1, 2, None, ["cuda:0", "cuda:1"]),
        (PlanId.PP0, 4, 4, None, ["cuda:0", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (PlanId.PP0, 2, 8, None, ["cuda:0", "cuda:1", "cuda:2"]),
        (PlanId.PP1, 2, 2, "cpu", ["cpu", "cuda:0", "cuda:1"]),
        (PlanId.PP1, 2, 3, "cpu", ["cpu", "cuda:0", "cuda:1"]),
        (PlanId.PP1, 2, 2, "cuda:1", ["cuda:1", "cuda:0", "cuda:1"]),
    ],
)
def test_where_each_rank_computes(
    plan: PlanId, tp: int, num_gpus: int, control: str | None, want: list[str]
) -> None:
    assert devices(plan, tp, num_gpus, control=control) == want


def test_a_host_without_the_control_rank_gives_its_gpus_to_generators() -> None:
    assert devices(PlanId.PP0, 4, 2, first=3) == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("plan", "tp", "num_gpus", "control", "message"),
    [
        (PlanId.TP_V1_1, 4, 2, None, "4 generator ranks of this host have 2 GPUs; give each"),
        (PlanId.PP0, 2, 1, "cpu", "2 generator ranks of this host have 1 GPUs"),
        (PlanId.PP0, 1, 1, "cuda:1", "control_device: got 'cuda:1', want cpu, or cuda:0 to cuda:0"),
        (PlanId.PP0, 1, 0, "cuda", "control_device: got 'cuda', want cpu; no GPU is here"),
        (PlanId.PP0, 1, 1, "tpu", "control_device: got 'tpu'"),
    ],
)
def test_what_cannot_be_placed_is_said_in_a_sentence(
    plan: PlanId, tp: int, num_gpus: int, control: str | None, message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        devices(plan, tp, num_gpus, control=control)


def test_a_launcher_that_says_nothing_of_its_hosts_has_all_ranks_here() -> None:
    topology = Topology(plan_id=PlanId.PP0, tp_degree=4)
    ours = LaunchEnvironment(launched=True, rank=3, local_rank=3, world_size=5)
    assert host_of(ours, topology, num_gpus=4) == Host(first_rank=0, num_ranks=5, num_gpus=4)
    theirs = LaunchEnvironment(
        launched=True, rank=4, local_rank=1, local_world_size=2, world_size=5
    )
    assert host_of(theirs, topology, num_gpus=2) == Host(first_rank=3, num_ranks=2, num_gpus=2)
