"""Two recordings of one stream are compared chunk by chunk: which differ, and by how much."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from scope_contracts.envelope import PPEnvelope
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Finished, Opened
from scope_rt.record.reader import open_log, read_stream
from scope_rt.tensors import TORCH_DTYPES
from scope_runners.recording_argument import Recording
from scope_runners.wording import counted

_FREE = frozenset({"call_id", "plan_id", "tensors"})
"""Envelope fields that may differ: they say where a chunk is run, not what is run."""
_FREE_AFTER_RESTART = _FREE | {"reset_crossattn_cache"}
"""New ranks are sent the conditioning; those before the restart had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs in a chunk: envelope fields, latents, or both.

    `max_abs_diff` is None where it is no number: another shape, or values that are not finite.
    """

    chunk_index: int
    fields: tuple[str, ...]
    max_abs_diff: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What the comparison found. `not_compared` counts the planned chunks that were not; of these
    `made` were finished all the same, behind a gap in the recorded latents or a restart that
    lost what no replay has."""

    recording: str
    recorded_as: str
    replayed_as: str
    recorded_with: str
    replayed_with: str
    tolerance: float
    compared: int
    not_compared: int
    made: int
    largest_diff: float
    """Over all chunks whose difference is a number, within the tolerance or not."""
    differences: tuple[Difference, ...]
    passed: bool


def compare(
    recording: Recording, replayed: Path, *, num_chunks: int, tolerance: float
) -> ReplayReport:
    """Compare the first `num_chunks` chunks of a recording with those of its replay's recording.

    `tolerance` is on the largest difference of latents; 0 wants equal bits.
    """
    recorded, differences, largest = recording.stream, list[Difference](), 0.0
    restarted = {restart.chunk_index for restart in recorded.restarts}
    indices = sorted(index for index in recorded.finished if index < num_chunks)
    with open_log(recording.path) as old_file, open_log(replayed) as new_file:
        old, new = LogReader(old_file), LogReader(new_file)
        stream, new_places = read_stream(new)
        for index in indices:
            free = _FREE_AFTER_RESTART if index in restarted else _FREE
            wrong = _fields(recorded.envelopes[index], stream.envelopes.get(index), free)
            if index not in new_places:
                differences.append(
                    Difference(chunk_index=index, fields=("no result",), max_abs_diff=None)
                )
                continue
            before = old.blob(recording.places[index])
            after = new.blob(new_places[index])
            diff = _max_abs_diff(recorded.finished[index], before, stream.finished[index], after)
            largest = max(largest, diff or 0.0)
            is_off = before != after if tolerance == 0 else not _within(diff, tolerance)
            if wrong or is_off:
                differences.append(Difference(chunk_index=index, fields=wrong, max_abs_diff=diff))
    return ReplayReport(
        recording=str(recording.path),
        recorded_as=_layout(recorded.opened),
        replayed_as=_layout(stream.opened),
        recorded_with=_versions(recorded.opened),
        replayed_with=_versions(stream.opened),
        tolerance=tolerance,
        compared=len(indices),
        not_compared=len(recorded.envelopes) - len(indices),
        made=len(recorded.finished) - len(indices),
        largest_diff=largest,
        differences=tuple(differences),
        passed=not differences,
    )


def table(report: ReplayReport) -> str:
    """The comparison for a person at a terminal."""
    want = f"within {report.tolerance:.0e}" if report.tolerance else "equal to the last bit"
    lines = [
        f"recorded   {report.recorded_as} ({report.recorded_with})",
        f"replayed   {report.replayed_as} ({report.replayed_with})",
        f"compared   {counted(report.compared, 'chunk')}, whose latents must be {want}",
    ]
    if not_made := report.not_compared - report.made:
        lines.append(f"left out   {counted(not_made, 'chunk')}: dropped or never finished")
    if report.made:
        lines.append(
            f"left out   {counted(report.made, 'chunk')} that were made: the recording has not all "
            "latents up to them, or a restart lost what no replay has"
        )
    if report.passed:
        is_equal = report.largest_diff == 0
        words = "equal" if is_equal else f"largest difference {report.largest_diff:.2g}"
        rest = f", as far as compared: {counted(report.made, 'chunk')} more were made"
        return "\n".join([*lines, f"result     {words}{rest if report.made else ''}"])
    first = report.differences[0]
    by = "" if first.max_abs_diff is None else f" (by {first.max_abs_diff:.2g})"
    lines.append(
        f"result     {counted(len(report.differences), 'chunk')} DIFFER, the first is "
        f"{first.chunk_index}{by}; the largest difference is {report.largest_diff:.2g}"
    )
    lines += [f"           {wrong}" for wrong in first.fields]
    if report.recorded_with != report.replayed_with:
        lines.append(
            "           the versions differ, which may change bits; replay with the recorded ones"
        )
    return "\n".join(lines)


def _fields(old: PPEnvelope, new: PPEnvelope | None, free: frozenset[str]) -> tuple[str, ...]:
    """The envelope fields that came out otherwise, in words."""
    if new is None:
        return ("not planned",)
    names = [field.name for field in fields(PPEnvelope) if field.name not in free]
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    return tuple(f"{name}: recorded {a!r}, replayed {b!r}" for name, a, b in pairs if a != b)


def _max_abs_diff(old: Finished, before: bytes, new: Finished, after: bytes) -> float | None:
    """The largest difference of two chunks' latents, None where no number tells it."""
    if before == after:
        return 0.0
    if old.latents is None or old.latents != new.latents:
        return None
    dtype = TORCH_DTYPES[old.latents.dtype]
    a, b = (torch.frombuffer(bytearray(raw), dtype=dtype).double() for raw in (before, after))
    diff = float((a - b).abs().max())
    return diff if diff < float("inf") else None


def _within(diff: float | None, tolerance: float) -> bool:
    return diff is not None and diff <= tolerance


def _layout(opened: Opened) -> str:
    return f"{opened.plan_id} tp {opened.tp_degree}"


def _versions(opened: Opened) -> str:
    return f"scope-rt {opened.package_version}, torch {opened.torch_version}, {opened.backend}"
