"""A soak is a folder: the settings of all its processes, and what they write."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_lab.soak.schedule import FaultRates, Schedule, schedule_of
from scope_rt.topology import Topology

HEARTBEAT_S = 5.0
"""How long a rank may be silent during a soak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakJob:
    """What is streamed, and how it is broken."""

    folder: str
    model: str
    plan: PlanId
    tp: int
    seed: int
    num_chunks: int
    chunk_s: float
    """Length of a chunk, at which pace it is also taken."""
    fault_every_s: float
    cue_every_s: float

    @property
    def topology(self) -> Topology:
        return Topology(plan_id=self.plan, tp_degree=self.tp)

    @property
    def schedule(self) -> Schedule:
        return schedule_of(
            self.seed,
            num_chunks=self.num_chunks,
            topology=self.topology,
            rates=FaultRates(
                chunk_s=self.chunk_s,
                fault_every_s=self.fault_every_s,
                cue_every_s=self.cue_every_s,
                most_pause_s=HEARTBEAT_S / 2,
            ),
        )

    def path(self, name: str) -> Path:
        """A file of this soak."""
        return Path(self.folder) / name

    @property
    def event_log(self) -> Path:
        return self.path("events.jsonl")

    def injected_log(self, attempt: int) -> Path:
        """Where the faults of an attempt's ranks are written down."""
        return self.path(f"faults.{attempt}.jsonl")

    def injected_logs(self) -> list[tuple[int, Path]]:
        """Those there are, by attempt."""
        paths = Path(self.folder).glob("faults.*.jsonl")
        return sorted((int(path.name.split(".")[1]), path) for path in paths)

    @property
    def rank_output(self) -> Path:
        """Standard output and standard error of the ranks."""
        return self.path("ranks.txt")

    @property
    def snapshot(self) -> Path:
        return self.path("snapshot")

    @property
    def recording(self) -> Path:
        return self.path("stream.scope")

    @property
    def video(self) -> Path:
        return self.path("stream.mp4")

    def save(self) -> None:
        """Write it where the ranks, and a resumed soak, read it."""
        self.path("job.json").write_text(json.dumps(asdict(self), indent=2))

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Let no other process run this soak meanwhile.

        Raises:
            UserInputError: another one runs it.
        """
        with self.path("job.json").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserInputError(
                    f"the soak in {self.folder} still runs; wait for its end, or end it first"
                ) from error
            yield

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The job of a folder.

        Raises:
            UserInputError: there is none.
        """
        try:
            plain: dict[str, Any] = json.loads((folder / "job.json").read_text())
            return cls(**(plain | {"folder": str(folder), "plan": PlanId(plain["plan"])}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserInputError(f"{folder} has no soak to resume ({error})") from error
