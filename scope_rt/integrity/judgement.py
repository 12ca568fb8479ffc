"""What blocks computed is refused by the stage that was wrong first."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from scope_contracts.arithmetic import Deviation
from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import Audit
from scope_rt.integrity.block_record import BlockRecord
from scope_rt.integrity.oracle import Stage
from scope_rt.integrity.reduced_sums import ReducedSums
from scope_rt.models.causal_wan import TextKV
from scope_rt.models.generator import ChunkGenerator

WhereOf = Callable[[Audit, int | None], str]


class Compared(NamedTuple):
    """What some records came to; on their device until the chunk ends."""

    records: Sequence[BlockRecord]
    stages: list[Stage]
    is_right: Tensor
    past_rows_changed: Tensor
    sums: list[ReducedSums]


def judge(compared: Compared, generator: ChunkGenerator, checks: Checks, where_of: WhereOf) -> None:
    """The first stage of the first call and layer that is off is where the fault is: a NaN that
    a block gave equals nothing in the next one.

    `where_of` names an audit, and one of its tokens. Waits for the device.

    Raises:
        IntegrityError: naming the stage.
    """
    stages = () if bool(compared.is_right) else compared.stages
    for number, record in enumerate(compared.records):
        _check_inputs(record, generator, checks, where_of(record.audit, None))
        for stage in stages:
            _check_stage(record, stage, number, checks, where_of)


def _check_stage(
    record: BlockRecord, stage: Stage, number: int, checks: Checks, where_of: WhereOf
) -> None:
    got, want = stage.got[number], stage.want[number]
    excess = (got - want).abs() - stage.bound.expand_as(stage.got)[number]
    if bool((excess <= 0).all()):
        return
    column, token = divmod(int(excess.argmax()), excess.shape[-1])
    check = checks.linear_sums if stage.is_linear else checks.arithmetic
    where_token = token % record.plan.num_tokens if record.audit.token is None else None
    check(
        Deviation(
            where=where_of(record.audit, where_token),
            stage=stage.name,
            got=float(got[column, token]),
            want=float(want[column, token]),
            bound=float(stage.bound.expand_as(stage.got)[number, column, token]),
        )
    )


def _check_inputs(
    record: BlockRecord, generator: ChunkGenerator, checks: Checks, where: str
) -> None:
    """A block gets what the one before gave, and what was made for its layer and call."""
    changed = sum(map(bool, record.differ))
    if changed:
        checks.cached_rows(where, "rows that attention saw changed", changed, 0, 0)
    layer = record.audit.layer
    text = text_of(generator, record)[layer]
    modulation = generator.modulations[record.plan.timestep].layers[layer]
    inputs = [
        ("modulation", record.modulation, modulation),
        ("text keys", record.text.k, text.k),
        ("text values", record.text.v, text.v),
    ]
    if record.not_before is not None:
        inputs.append(("block input", *record.not_before))
    for name, got, want in inputs:
        if got.data_ptr() == want.data_ptr() and got.shape == want.shape:
            continue
        off = (got.double() - want.double()).abs() if got.shape == want.shape else None
        if off is not None and bool((off == 0).all()):
            continue
        at = 0 if off is None else int(off.argmax())
        checks.arithmetic(
            Deviation(
                where=where,
                stage=name,
                got=float(got.flatten()[at]),
                want=float(want.flatten()[at]),
                bound=0.0,
            )
        )


def text_of(generator: ChunkGenerator, record: BlockRecord) -> Sequence[TextKV]:
    """Under which its call must run."""
    return generator.text_of_recompute if record.plan.is_recompute else generator.text
