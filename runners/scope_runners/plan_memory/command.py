"""`scope-rt plan-memory`: bytes of every rank, by line, before anything starts; and what to change.

The exit code is 1 where a GPU was named and a rank does not fit it.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from scope_contracts.tensor_spec import DType
from scope_rt.setup_choices import stream_dtype
from scope_runners.exit_codes import FAILED
from scope_runners.plan_memory.plan import Place, RankMemory, fits, fitting_changes, shown_size
from scope_runners.plan_memory.request import MemoryRequest
from scope_runners.plan_memory.video import VideoRequirement


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What the command found out. Bytes a token and a sequence are those of one generator rank."""

    title: str
    dtype: DType
    is_stream: bool
    ranks: tuple[RankMemory, ...]
    bytes_per_token: int
    bytes_per_sequence: int
    available_bytes: int | None
    """Of each GPU; None where none was named."""
    fits: bool | None
    """Whether every rank does; None where no GPU was named."""
    changes: tuple[str, ...]
    """Any one of them makes it fit."""
    options: tuple[str, ...]
    """What can be changed at all, as it is typed."""

    @property
    def num_gpus(self) -> int:
        return sum(part.num_gpus for part in self.ranks)


def run_plan_memory(namespace: argparse.Namespace) -> int:
    """Print the plan; the exit code says whether it fits."""
    report = report_of(MemoryRequest.from_arguments(namespace))
    print(json.dumps(as_json(report), indent=2) if namespace.json else table(report))
    return FAILED if report.fits is False else 0


def report_of(request: MemoryRequest) -> MemoryReport:
    """The plan that the arguments ask for."""
    requirement, available = request.requirement, request.available_bytes
    if isinstance(requirement, VideoRequirement):
        spec, dtype = requirement.spec, requirement.spec.dtype
        per_token = spec.num_layers * requirement.shared_rows.bytes_per_row
        per_sequence = requirement.shared_spec.num_bytes(requirement.tp) // spec.batch
        frames = f"{spec.capacity_frames} latent frames of {spec.frame_tokens:,} tokens"
        what = f"batch {spec.batch}, {frames}, plan {requirement.plan_id}"
    else:
        domain, dtype = requirement.domain, requirement.domain.spec.row_format.dtype
        per_token = domain.spec.bytes_per_token(requirement.tp)
        per_sequence = requirement.bytes_per_sequence
        batch = f"batch {domain.batch} of {domain.max_tokens:,} tokens"
        what = f"models {requirement.num_domains}, {batch}"
    options = [option.flag for option in requirement.options() if option.values]
    return MemoryReport(
        title=f"{request.model}, {dtype}, {what}, tp {requirement.tp}",
        dtype=dtype,
        is_stream=isinstance(requirement, VideoRequirement),
        ranks=requirement.rank_memory(),
        bytes_per_token=per_token,
        bytes_per_sequence=per_sequence,
        available_bytes=available,
        fits=None if available is None else fits(requirement, available),
        changes=() if available is None else fitting_changes(requirement, available),
        options=tuple(dict.fromkeys(options)),
    )


def table(report: MemoryReport) -> str:
    """The plan for a person at a terminal."""
    size = "" if report.available_bytes is None else f" of {shown_size(report.available_bytes)}"
    gpus = f"1 GPU{size}" if report.num_gpus == 1 else f"{report.num_gpus} GPUs{size}"
    if report.num_gpus > 1 and all(part.place is Place.OWN_GPU for part in report.ranks):
        gpus += ", one a rank"
    lines = [
        report.title,
        f"{gpus}; a rank that generates keeps {report.bytes_per_token:,} B a token, "
        f"{shown_size(report.bytes_per_sequence)} a sequence",
    ]
    own_dtype = stream_dtype(on_gpu=report.available_bytes is not None)
    if report.is_stream and report.dtype is not own_dtype:
        lines.append(
            "scope-rt stream runs float32 on CPUs and bfloat16 on GPUs unless --dtype says "
            f"otherwise; this plans {report.dtype}"
        )
    for part in report.ranks:
        lines += _rank_lines(part, report.available_bytes)
    lines.append("(~ is an estimate; a GiB is 2^30 bytes, a MiB 2^20)")
    if report.changes:
        one_of = "any one of: " if len(report.changes) > 1 else ""
        lines.append(f"fits with {one_of}{'; '.join(report.changes)}")
    elif report.fits is False:
        options = " or ".join(report.options)
        lines.append(
            f"no change of {options} makes it fit" if options else "nothing can be changed"
        )
    return "\n".join(lines)


def _rank_lines(part: RankMemory, available_bytes: int | None) -> Iterator[str]:
    first, last = part.ranks[0], part.ranks[-1]
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}, each"
    if part.place is Place.ONE_GPU:
        ranks = f"ranks {first} and {last}, together on one GPU"
    elif part.place is Place.CPU:
        ranks += ", on the CPU"
    yield f"{ranks}: {part.role}"
    for line in part.plan.lines:
        mark = "~" if line.is_estimate and line.is_known else " "
        size = shown_size(line.num_bytes) if line.is_known else "?"
        yield f"  {line.name:<22}{size:>14} {mark}  {line.because}"
    lacks = f"    without what is not known ({', '.join(part.plan.unknown)})"
    total = f"  {'total':<22}{shown_size(part.plan.num_bytes):>14}"
    yield total + (lacks if part.plan.unknown else "")
    if available_bytes is not None and part.num_gpus:
        spare_bytes = available_bytes - part.plan.num_bytes
        has, spare = shown_size(available_bytes), shown_size(abs(spare_bytes))
        has += ", without that" if part.plan.unknown else ""
        fitting = f"fits {has}: {spare} to spare"
        yield f"  {fitting}" if spare_bytes >= 0 else f"  does not fit {has}: {spare} too much"


def as_json(report: MemoryReport) -> dict[str, object]:
    """The plan for a program; sizes in bytes, those of `ranks` of each rank."""
    return {
        "title": report.title,
        "dtype": report.dtype,
        "num_gpus": report.num_gpus,
        "ranks": [_rank_json(part, report.available_bytes) for part in report.ranks],
        "bytes_per_token": report.bytes_per_token,
        "bytes_per_sequence": report.bytes_per_sequence,
        "available_bytes": report.available_bytes,
        "fits": report.fits,
        "changes": list(report.changes),
    }


def _rank_json(part: RankMemory, available_bytes: int | None) -> dict[str, object]:
    return {
        "role": part.role,
        "ranks": list(part.ranks),
        "place": part.place,
        "lines": [
            {
                "name": line.name,
                "bytes": line.num_bytes,
                "estimate": line.is_estimate,
                "known": line.is_known,
                "because": line.because,
            }
            for line in part.plan.lines
        ],
        "total_bytes": part.plan.num_bytes,
        "unknown": list(part.plan.unknown),
        "fits": None if available_bytes is None else part.fits(available_bytes),
    }
