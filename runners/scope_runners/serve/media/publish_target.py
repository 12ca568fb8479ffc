"""A stream is published to a URL of a scheme that can take it; no secret in it is shown again."""

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from scope_contracts.errors import UserInputError

_FORMATS = {"rtmp": "flv", "rtmps": "flv", "srt": "mpegts", "rtsp": "rtsp"}
_WHIP = ("http", "https")
MOST_PUBLICATIONS = 4
"""At once, of one session."""
_MOST = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to, and how."""

    url: str = field(repr=False)
    """What is connected to."""
    shown: str
    """The scheme and host alone: paths and queries hold stream keys."""
    format: str
    """Of FFmpeg; "" of a WHIP endpoint."""
    token: str = field(default="", repr=False)
    """That a WHIP endpoint asks for."""


def target_of(url: str) -> Target:
    """Raises `UserInputError`, whose sentence does not repeat the URL."""
    if len(url) > _MOST or not url.isascii() or not url.isprintable() or " " in url:
        raise UserInputError(
            f"url: give at most {_MOST} ASCII characters without spaces; escape others with %"
        )
    try:
        parts = urlsplit(url)
        host = _host(parts)
    except ValueError:
        raise UserInputError("url: host and port cannot be read; give SCHEME://HOST:PORT") from None
    if parts.scheme not in (*_FORMATS, *_WHIP):
        raise UserInputError(
            "url: give rtmp://, rtmps://, srt:// or rtsp://, or the http:// or https:// of a WHIP "
            "endpoint"
        )
    if not parts.hostname:
        raise UserInputError("url: names no host; give SCHEME://HOST:PORT")
    rest = "/..." if parts.path.strip("/") or parts.query else ""
    shown = f"{parts.scheme}://{host}{rest}"
    if parts.scheme in _FORMATS:
        return Target(url=url, shown=shown, format=_FORMATS[parts.scheme])
    plain = parts._replace(netloc=host, fragment="").geturl()
    return Target(url=plain, shown=shown, format="", token=_token(parts))


def _host(parts: SplitResult) -> str:
    name = parts.hostname or ""
    name = f"[{name}]" if ":" in name else name
    return name if parts.port is None else f"{name}:{parts.port}"


def _token(parts: SplitResult) -> str:
    """`#token=...`, or what stands before the host."""
    given = parse_qs(parts.fragment).get("token", [])
    token = given[0] if given else unquote(parts.password or parts.username or "")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserInputError("url: its token has characters that no bearer token has")
    return token
