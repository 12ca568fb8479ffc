"""The role of every rank follows from the plan, the TP degree and nothing else."""

from dataclasses import dataclass
from typing import Self

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError

SHARED = frozenset({PlanId.TP_V0, PlanId.TP_V1_1})
PIPELINED = frozenset({PlanId.PP0, PlanId.PP1})
RUNNABLE = tuple(PlanId)


def plan_named(plan: str) -> PlanId:
    """The plan called `plan`.

    Raises:
        UserInputError: there is none of that name.
    """
    try:
        return PlanId(plan)
    except ValueError:
        choices = ", ".join(RUNNABLE)
        raise UserInputError(f"plan {plan!r} is unknown; choose one of {choices}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A control rank (rank0) and a tensor-parallel group of generator ranks.

    In `single`, `tp_v0` and `tp_v1_1` rank0 is also the first generator rank; in `pp0` and `pp1`
    it plans, encodes text and decodes, and rank 1 leads the generator group.
    """

    plan_id: PlanId
    tp_degree: int

    def __post_init__(self) -> None:
        if self.tp_degree < 1:
            raise UserInputError(f"tp is {self.tp_degree}; give at least 1")
        if self.plan_id is PlanId.SINGLE and self.tp_degree != 1:
            raise UserInputError(
                f"plan single runs in one process; use tp 1 or plan tp_v1_1, not tp "
                f"{self.tp_degree}"
            )
        if self.plan_id in SHARED and self.tp_degree < 2:
            raise UserInputError(f"plan {self.plan_id} shares the heads; give tp 2 or more")

    @classmethod
    def of(cls, plan: PlanId, tp_degree: int | None) -> Self:
        """The topology of a plan; None is its smallest degree.

        Raises:
            UserInputError: the plan cannot have this degree.
        """
        smallest = 2 if plan in SHARED else 1
        return cls(plan_id=plan, tp_degree=smallest if tp_degree is None else tp_degree)

    @property
    def pipelined(self) -> bool:
        """Whether rank0 is apart from the generator group."""
        return self.plan_id in PIPELINED

    @property
    def world_size(self) -> int:
        return self.tp_degree + self.pipelined

    @property
    def generator_ranks(self) -> tuple[int, ...]:
        """World ranks of the generator group, its leader first."""
        return tuple(range(int(self.pipelined), self.world_size))

    @property
    def leader(self) -> int:
        return self.generator_ranks[0]

    @property
    def max_in_flight(self) -> int:
        """Chunks planned but not finished: 2 lets decode of one overlap generation of the next."""
        return 2 if self.plan_id is PlanId.PP1 else 1

    def check_world_size(self, world_size: int) -> None:
        """Raises UserInputError when the launcher started another number of processes."""
        if world_size != self.world_size:
            raise UserInputError(
                f"plan {self.plan_id} with tp {self.tp_degree} needs {self.world_size} "
                f"processes, got {world_size}; start it with torchrun --nproc-per-node "
                f"{self.world_size}, or let `scope-rt stream` start the ranks"
            )
