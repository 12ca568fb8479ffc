"""A resume point is kept in a snapshot folder, with the place in the log that it belongs to."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from scope_rt.control.resume_point import ResumePoint
from scope_rt.record.log import Log
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.snapshot_header import SnapshotHeader


@dataclass(slots=True, kw_only=True)
class SavedResumePoints:
    """Resume points in a snapshot folder."""

    store: SnapshotStore
    log: Path
    run_id: str
    identity: tuple[tuple[str, str], ...]
    _absolute_log: str = field(init=False)

    def __post_init__(self) -> None:
        self._absolute_log = str(self.log.absolute())

    def begin(self, point: ResumePoint, *, log: Log) -> Callable[[], None]:
        """As `ResumePoints.begin`."""
        header = SnapshotHeader(
            run_id=self.run_id,
            identity=self.identity,
            log=self._absolute_log,
            log_offset=0,
            next_chunk_index=point.counts.next_chunk_index,
        )
        kept = replace(point, later=())  # the log has it, once
        begun = None if log.failure is not None else self.store.begin(header, kept, log=log)

        def wait() -> None:
            if begun is not None:
                begun()
            # It may have failed in that save.
            if log.failure is not None and header.next_chunk_index <= self.store.leads_to:
                self.store.save(replace(header, log_offset=log.offset), kept)

        return wait
