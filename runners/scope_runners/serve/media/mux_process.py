"""A process sends packets by FFmpeg's muxers, and ends where a step takes longer than it may.

PyAV holds the interpreter's lock while it connects, without a bound: in the server that would stop
every stream. Here the kernel's alarm ends it.
"""

import json
import signal
import struct
import sys
from typing import IO

import av

from scope_runners.serve.media.encoder import Encoded
from scope_runners.serve.media.muxing import packet_for, stream_for

HEAD = struct.Struct(">?QI")
"""Whether it is a keyframe, its time in 1/90,000 s, its bytes."""
STEP_S = 10
"""To connect, or to send one packet."""
CONNECTED = b"connected\n"
_OPTIONS = {"rtsp": {"rtsp_transport": "tcp"}}


def main() -> int:
    """Send what comes on stdin: a line of JSON, a keyframe with the parameter sets, then packets.

    Stdout says `connected`, and why it ends where that is an error. The end of stdin ends it.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        _send(sys.stdin.buffer, sys.stdout.buffer)
    except av.FFmpegError as error:  # its own text has the URL
        sys.stdout.write(f"{error.strerror}\n")
        return 1
    return 0


def _send(source: IO[bytes], told: IO[bytes]) -> None:
    target = json.loads(source.readline())
    key = _next(source)
    if key is None:
        return
    signal.alarm(STEP_S)
    form = target["format"]
    container = av.open(target["url"], "w", format=form, options=_OPTIONS.get(form, {}))
    stream = stream_for(container, key)
    container.start_encoding()
    told.write(CONNECTED)
    told.flush()
    signal.alarm(0)
    first_90k: int | None = None
    while (encoded := _next(source)) is not None:
        first_90k = encoded.time_90k if first_90k is None else first_90k
        signal.alarm(STEP_S)
        container.mux_one(packet_for(stream, encoded, after_90k=first_90k))
        signal.alarm(0)
    signal.alarm(STEP_S)
    container.close()


def _next(source: IO[bytes]) -> Encoded | None:
    """None after the last one."""
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    is_key, time_90k, num_bytes = HEAD.unpack(head)
    data = source.read(num_bytes)
    if len(data) < num_bytes:
        return None
    return Encoded(data=data, is_key=is_key, time_90k=time_90k, chunk_index=-1)


if __name__ == "__main__":
    sys.exit(main())
