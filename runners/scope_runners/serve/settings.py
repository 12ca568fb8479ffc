"""How a server serves: one frozen value, read once from the command line and the environment."""

from dataclasses import dataclass, field
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_runners.serve.pacing import PaceRules
from scope_runners.serve.reconnect import ORPHAN_S

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names under which only this machine reaches a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IceServer:
    """A STUN or TURN server that WebRTC peers may use."""

    url: str
    username: str = ""
    credential: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Times in seconds, sizes in bytes."""

    folder: Path = Path("out/serve")
    """Where sessions keep their logs, recordings and journals."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    """What every request must carry; "" where only this machine can ask."""
    origins: tuple[str, ...] = ()
    """Pages of other origins that may use this server."""
    max_sessions: int = 1
    max_viewers: int = 64
    """Of one session; twice as many clients may listen to its events."""
    max_ranks: int = 16
    """Of one session that a client asks for."""
    max_pixels: int = 2**21
    """Of a picture that a client asks for."""
    models: tuple[str, ...] = ("tiny",)
    """That a client may ask for."""
    lease_s: float = 600.0
    """How long a session that nobody asks for is kept; 0 is for ever."""
    orphan_s: float = ORPHAN_S
    """How long ranks wait for a server that is gone."""
    keeps_latents: bool = True
    """Whether logs hold what a rewind and a fork need: without end, as long as a session lasts."""
    threads: int = 1
    """CPU threads of every rank."""
    pace: PaceRules = field(default_factory=PaceRules)
    ice_servers: tuple[IceServer, ...] = ()
    requests_per_s: float = 50.0
    """Of one client, on average."""
    max_body_bytes: int = 2**20
    max_upload_bytes: int = 2**28
    log_format: str = "text"
    trace: str = ""
    """Where spans are sent by OTLP over HTTP; "" is nowhere."""
    publish: tuple[str, ...] = field(default=())
    """Where the session that is started at once is published."""

    @property
    def sessions(self) -> Path:
        """One folder a session."""
        return self.folder / "sessions"


def check_keeps_latents(settings: ServeSettings) -> None:
    """Raises `UserInputError` where no stream can be rewound or forked."""
    if not settings.keeps_latents:
        raise UserInputError(
            "this server keeps no latents, so that no stream can be rewound or forked; start it "
            "without --no-latents"
        )
