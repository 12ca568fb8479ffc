"""The files of one session lie in its folder, under names that only this file knows."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scope_contracts.errors import UserInputError
from scope_rt.output_file import replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamJob:
    """What the ranks of a session are told."""

    session_id: str
    socket: Path
    prompt: str
    settings: Mapping[str, Any]
    """Of `StreamConfig`."""
    threads: int
    keeps_latents: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRewind:
    """That a stream is continued before a chunk it has shown."""

    chunk_index: int
    command_id: str
    """That asked for it; "" where a fork does."""


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """Of the session in this folder."""

    folder: Path

    @property
    def log(self) -> Path:
        """The stream's log, with latents: what a rewind and a fork need."""
        return self.folder / "stream.scope"

    @property
    def snapshot(self) -> Path:
        """Rank0's resume point."""
        return self.folder / "snapshot"

    @property
    def record(self) -> Path:
        """What the session was made with."""
        return self.folder / "record.json"

    @property
    def journal(self) -> Path:
        """What the server knows of the session."""
        return self.folder / "journal"

    @property
    def image(self) -> Path:
        """The picture that the stream begins with."""
        return self.folder / "start-image"

    @property
    def recordings(self) -> Path:
        """Videos that a person asked for."""
        return self.folder / "recordings"

    @property
    def group_output(self) -> Path:
        """What launcher and ranks print."""
        return self.folder / "ranks.log"

    @property
    def launcher_lock(self) -> Path:
        """Held by the launcher as long as it lives."""
        return self.folder / "launcher.lock"

    @property
    def _job(self) -> Path:
        return self.folder / "session.json"

    @property
    def _asked(self) -> Path:
        return self.folder / "rewind.json"

    def write_job(self, job: StreamJob) -> None:
        """For the processes that are about to start."""
        plain = {
            "session_id": job.session_id,
            "socket": str(job.socket),
            "prompt": job.prompt,
            "settings": dict(job.settings),
            "threads": job.threads,
            "keeps_latents": job.keeps_latents,
        }
        _write(self._job, plain)

    def read_job(self) -> StreamJob:
        """Raises `UserInputError`: there is none, or it is no job."""
        try:
            plain = json.loads(self._job.read_text())
            return StreamJob(
                session_id=plain["session_id"],
                socket=Path(plain["socket"]),
                prompt=plain["prompt"],
                settings=plain["settings"],
                threads=plain["threads"],
                keeps_latents=plain["keeps_latents"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserInputError(
                f"{self.folder} is no session of scope-rt serve ({error}); give one of its folders"
            ) from error

    def ask_for_rewind(self, chunk_index: int, *, command_id: str = "") -> None:
        """The ranks that start next continue the stream before this chunk."""
        _write(self._asked, {"chunk_index": chunk_index, "command_id": command_id})

    def rewind(self) -> AskedRewind | None:
        """Where the stream is to be continued; None where nobody asked."""
        try:
            plain = json.loads(self._asked.read_text())
            return AskedRewind(
                chunk_index=int(plain["chunk_index"]), command_id=str(plain["command_id"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self) -> None:
        """The session is over: its stream cannot be continued; its recordings stay, if any."""
        self.record.unlink(missing_ok=True)  # first: without it no server continues the session
        if not (self.recordings.exists() and any(self.recordings.iterdir())):
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for path in self.folder.iterdir():
            if path.is_dir() and path != self.recordings:
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_dir():
                path.unlink(missing_ok=True)

    def rewound(self) -> None:
        """It was, or cannot be: the next start resumes as usual."""
        self._asked.unlink(missing_ok=True)


def _write(path: Path, plain: Mapping[str, Any]) -> None:
    with replacing(path, suffixes=(".json",)) as partial:
        partial.write_text(json.dumps(plain))
