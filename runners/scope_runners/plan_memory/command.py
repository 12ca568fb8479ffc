"""`scope-rt plan-memory`: bytes a rank, by line, before anything is started; and what to change.

The exit code is 1 where a GPU was named and the plan does not fit it.
"""

import argparse
import json
from dataclasses import dataclass

from scope_runners.plan_memory.plan import MemoryPlan, fitting_changes
from scope_runners.plan_memory.request import WITHOUT_DECODER, MemoryRequest
from scope_runners.plan_memory.video import VideoRequirement

_GB = 10**9
_DOES_NOT_FIT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What the command found out; sizes in bytes of one rank."""

    title: str
    plan: MemoryPlan
    bytes_per_token: int
    bytes_per_sequence: int
    available_bytes: int | None
    changes: tuple[str, ...]
    """Any one of them makes it fit."""
    options: tuple[str, ...]
    """What can be changed at all, as it is typed."""
    beside: str = ""
    """What another rank holds that is not counted."""

    @property
    def fits(self) -> bool | None:
        """None where no GPU was named."""
        if self.available_bytes is None:
            return None
        return self.plan.fits(self.available_bytes)


def run_plan_memory(namespace: argparse.Namespace) -> int:
    """Print the plan; the exit code says whether it fits."""
    report = report_of(MemoryRequest.from_arguments(namespace))
    print(json.dumps(as_json(report), indent=2) if namespace.json else table(report))
    return _DOES_NOT_FIT if report.fits is False else 0


def report_of(request: MemoryRequest) -> MemoryReport:
    """The plan that the arguments ask for."""
    requirement, beside = request.requirement, ""
    if isinstance(requirement, VideoRequirement):
        spec = requirement.spec
        per_token = spec.num_layers * spec.row_format.shard(requirement.tp).bytes_per_row
        per_sequence = spec.num_bytes(requirement.tp) // spec.batch
        frames = f"{spec.capacity_frames} latent frames of {spec.frame_tokens:,} tokens"
        what = f"batch {spec.batch}, {frames}"
        if requirement.plan_id in WITHOUT_DECODER:
            beside = (
                f"rank0 of {requirement.plan_id} generates nothing; it holds the text encoder and "
                "the autoencoder"
            )
    else:
        domain = requirement.domain
        per_token = domain.spec.bytes_per_token(requirement.tp)
        per_sequence = requirement.bytes_per_sequence
        batch = f"batch {domain.batch} of {domain.max_tokens:,} tokens"
        what = f"models {requirement.num_domains}, {batch}"
    available = request.available_bytes
    return MemoryReport(
        title=f"{request.model}, {what}, tp {requirement.tp}",
        plan=requirement.plan(),
        bytes_per_token=per_token,
        bytes_per_sequence=per_sequence,
        available_bytes=available,
        changes=() if available is None else fitting_changes(requirement, available),
        options=tuple(
            dict.fromkeys(option.flag for option in requirement.options() if option.values)
        ),
        beside=beside,
    )


def table(report: MemoryReport) -> str:
    """The plan for a person at a terminal."""
    lines = [
        report.title,
        f"one generator rank: {report.bytes_per_token:,} B a token, "
        f"{report.bytes_per_sequence / 1e6:,.1f} MB a sequence",
        f"{'':<22}{'GB':>9}",
    ]
    lines += [
        f"{line.name:<22}{line.num_bytes / _GB:>9.2f} {'~' if line.is_estimate else ' '}  "
        f"{line.because}"
        for line in report.plan.lines
    ]
    lines.append(f"{'total':<22}{report.plan.num_bytes / _GB:>9.2f}    (~ is an estimate)")
    if report.beside:
        lines.append(report.beside)
    if report.available_bytes is not None:
        spare = (report.available_bytes - report.plan.num_bytes) / _GB
        has = f"{report.available_bytes / _GB:.2f} GB"
        if report.plan.unknown:
            has += f" without {', '.join(report.plan.unknown)}, which are not known"
        verdict = f"fits {has}: {spare:.2f} GB to spare"
        lines.append(verdict if report.fits else f"does not fit {has}: {-spare:.2f} GB too much")
    if report.changes:
        one_of = "any one of: " if len(report.changes) > 1 else ""
        lines.append(f"fits with {one_of}{'; '.join(report.changes)}")
    elif report.fits is False:
        options = " or ".join(report.options)
        lines.append(
            f"no change of {options} makes it fit" if options else "nothing can be changed"
        )
    return "\n".join(lines)


def as_json(report: MemoryReport) -> dict[str, object]:
    """The plan for a program."""
    return {
        "title": report.title,
        "lines": [
            {
                "name": line.name,
                "bytes": line.num_bytes,
                "estimate": line.is_estimate,
                "known": line.is_known,
                "because": line.because,
            }
            for line in report.plan.lines
        ],
        "total_bytes": report.plan.num_bytes,
        "bytes_per_token": report.bytes_per_token,
        "bytes_per_sequence": report.bytes_per_sequence,
        "available_bytes": report.available_bytes,
        "fits": report.fits,
        "changes": list(report.changes),
    }
