"""`scope-rt serve`: the command line becomes settings; one session is started at once."""

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scope_contracts.errors import UserInputError
from scope_rt.config import StreamConfig
from scope_rt.config_values import Bounds
from scope_rt.environment_names import SERVE_TOKEN
from scope_runners.arguments import positive
from scope_runners.serve.json_lines import FORMATS, set_up_server_log
from scope_runners.serve.media.publish_target import MOST_PUBLICATIONS, target_of
from scope_runners.serve.pacing import PaceRules
from scope_runners.serve.reconnect import ORPHAN_S
from scope_runners.serve.settings import LOCAL_HOSTS, IceServer, ServeSettings

DEFAULT_PROMPT = "a red circle and a blue square, medium, on navy"
_STREAM = (
    "seed",
    "plan",
    "tp",
    "model",
    "recipe",
    "dtype",
    "height",
    "width",
    "kv_cache",
    "integrity",
)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt serve`."""
    add = parser.add_argument
    add("--prompt", default=DEFAULT_PROMPT, help="of the session that is started at once")
    add("--no-session", action="store_true", help="start none: clients do, by POST /v1/sessions")
    add("--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token")
    add("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    add(
        "--token",
        help=f"what requests must carry; also {SERVE_TOKEN}; 'auto' makes and prints one",
    )
    add(
        "--origin",
        action="append",
        default=[],
        metavar="URL",
        help="another page's origin that may use it; may be repeated",
    )
    add(
        "--folder",
        type=Path,
        default=Path("out/serve"),
        help="of the sessions' files; serve it again, and they continue (default out/serve)",
    )
    add("--max-sessions", type=positive, default=1, help="each has ranks of its own (default 1)")
    add("--max-viewers", type=positive, default=64, help="of one session (default 64)")
    add(
        "--max-rate",
        type=positive,
        default=50,
        metavar="REQUESTS",
        help="a second, of one client on average (default 50)",
    )
    add("--max-ranks", type=positive, default=16, help="of one session (default 16)")
    add(
        "--max-pixels",
        type=positive,
        default=2**21,
        metavar="PIXELS",
        help="of a picture that a client asks for (default 2097152: 1920x1088 has fewer)",
    )
    add(
        "--lease",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a session that nobody asks for is kept (default 600)",
    )
    add(
        "--lead",
        type=float,
        default=1.0,
        metavar="CHUNKS",
        help="how far generation may be ahead of what is shown (default 1)",
    )
    add(
        "--ice",
        action="append",
        default=[],
        metavar="URL[,USER,SECRET]",
        help="a STUN or TURN server, such as stun:stun.example.org:3478; may be repeated",
    )
    add(
        "--orphan-timeout",
        type=float,
        default=ORPHAN_S,
        metavar="SECONDS",
        help=f"how long ranks wait for a server that was killed (default {ORPHAN_S:g})",
    )
    add(
        "--publish",
        action="append",
        default=[],
        metavar="URL",
        help="send the session that is started at once there too: rtmp(s)://, srt://, rtsp://, or "
        "a WHIP endpoint's http(s):// with its token as #token=TOKEN; may be repeated",
    )
    add(
        "--no-latents",
        action="store_true",
        help="keep no latents in logs: they stay small, and no stream can be rewound or forked",
    )
    add("--threads", type=positive, default=1, help="CPU threads of every rank (default 1)")
    add(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="settings of streams for whatever is not given here",
    )
    add("--log-format", choices=FORMATS, default="text", help="of lines on stderr (default text)")
    add(
        "--trace",
        default="",
        metavar="URL",
        help="send OpenTelemetry spans there, such as http://127.0.0.1:4318",
    )
    stream = parser.add_argument_group("of the session that is started at once")
    for name in _STREAM:
        kind = int if name in ("seed", "tp", "height", "width") else str
        stream.add_argument(f"--{name.replace('_', '-')}", type=kind, help="as in scope-rt stream")


def settings_of(namespace: argparse.Namespace, environ: Mapping[str, str]) -> ServeSettings:
    """Raises `UserInputError`: a value cannot be used."""
    token = namespace.token or environ.get(SERVE_TOKEN, "")
    if token == "auto":
        token = secrets.token_urlsafe(24)
        print(
            f"scope-rt: the token is {token}; open the page once with /?token={token}",
            file=sys.stderr,
        )
    if namespace.host not in LOCAL_HOSTS and not token:
        raise UserInputError(
            f"--host {namespace.host}: others could steer this machine; add --token auto, or set "
            f"{SERVE_TOKEN}"
        )
    if token and len(token) < 16:
        raise UserInputError("--token: give 16 characters or more, or auto")
    Bounds(least=0, most=65535).check("--port", namespace.port)
    Bounds(least=0, most=10**9).check("--lease", namespace.lease)
    Bounds(least=1, most=10**6).check("--orphan-timeout", namespace.orphan_timeout)
    Bounds(above=0, most=100).check("--lead", namespace.lead)
    if namespace.publish and namespace.no_session:
        raise UserInputError("--publish is of the session that --no-session leaves out; drop one")
    _check_publish(namespace.publish)
    return ServeSettings(
        folder=namespace.folder,
        host=namespace.host,
        port=namespace.port,
        token=token,
        origins=tuple(namespace.origin),
        max_sessions=namespace.max_sessions,
        max_viewers=namespace.max_viewers,
        max_ranks=namespace.max_ranks,
        max_pixels=namespace.max_pixels,
        requests_per_s=float(namespace.max_rate),
        lease_s=namespace.lease,
        orphan_s=namespace.orphan_timeout,
        publish=tuple(namespace.publish),
        keeps_latents=not namespace.no_latents,
        threads=namespace.threads,
        pace=PaceRules(lead_chunks=namespace.lead),
        ice_servers=tuple(map(_ice_server, namespace.ice)),
        log_format=namespace.log_format,
        trace=namespace.trace,
    )


def stream_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Of the session that is started at once; raises `UserInputError`."""
    given = {name: getattr(namespace, name) for name in _STREAM}
    config = StreamConfig.load(file=namespace.config, **given)
    defaults = StreamConfig().settings
    changed = {n: v for n, v in config.settings.items() if v != defaults[n]}
    return {name: _plain(value) for name, value in changed.items()}


def run_serve(namespace: argparse.Namespace) -> int:
    """Serve until a person ends it; returns the exit code.

    Raises:
        UserInputError: it cannot be served so; nothing was started.
    """
    set_up_server_log(namespace.log_format)
    settings, stream = settings_of(namespace, os.environ), stream_settings(namespace)
    if "model" in stream:
        settings = replace(settings, models=(*settings.models, stream["model"]))
    try:
        from scope_runners.serve.server import serve
    except ModuleNotFoundError as error:
        raise UserInputError(
            f"scope-rt serve needs {error.name}; pip install 'scope-rt[serve]', in a clone "
            "pip install -e '.[serve]'"
        ) from error
    logging.getLogger("aioice").setLevel(logging.WARNING)
    return serve(settings, prompt=None if namespace.no_session else namespace.prompt, stream=stream)


def _check_publish(urls: Sequence[str]) -> None:
    if len(urls) > MOST_PUBLICATIONS:
        raise UserInputError(f"--publish: give it at most {MOST_PUBLICATIONS} times")
    for url in urls:
        try:
            target_of(url)
        except UserInputError as error:
            raise UserInputError(f"--publish: {error}") from None


def _ice_server(text: str) -> IceServer:
    url, *rest = text.split(",")
    if len(rest) not in (0, 2) or not url.startswith(("stun:", "turn:", "stuns:", "turns:")):
        raise UserInputError(f"--ice {url!r}: give stun:HOST:PORT, or turn:HOST:PORT,USER,SECRET")
    username, credential = rest or ("", "")
    return IceServer(url=url, username=username, credential=credential)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
