"""Packets from standard input go to a URL by one of FFmpeg's muxers. A process of its own: one
that waits for its other side may hold its whole process.

Its input is the URL and the muxer's name, a line each, then packets: length, time, whether it is a
keyframe, bytes. It answers with a byte a packet, and ends with a sentence on standard error.
"""

import struct
import sys
from typing import BinaryIO

import av

from scope_runners.serve.media.encoder import Encoded
from scope_runners.serve.media.muxing import packet_for, stream_for

HEAD = struct.Struct("<IqB")
NO_PROTOCOL = 3
"""The exit code where this FFmpeg does not speak what the URL asks for."""
MUXED = b"."


def main() -> int:
    """Run until the input ends; returns the exit code."""
    packets = sys.stdin.buffer
    url, form = (packets.readline().decode().rstrip("\n") for _ in range(2))
    try:
        _mux(packets, url, form)
    except av.error.ProtocolNotFoundError:
        return NO_PROTOCOL
    except (av.FFmpegError, OSError, ValueError) as error:
        print(type(error).__name__, file=sys.stderr)  # more of it may name the URL
        return 1
    return 0


def _mux(packets: BinaryIO, url: str, form: str) -> None:
    key = _next(packets)
    if key is None:
        return
    options = {"rtsp_transport": "tcp"} if form == "rtsp" else {"flush_packets": "1"}
    container = av.open(url, "w", format=form, options=options)
    stream = stream_for(container, key)
    container.start_encoding()
    encoded: Encoded | None = key
    while encoded is not None:
        container.mux_one(packet_for(stream, encoded, after_90k=key.time_90k))
        sys.stdout.buffer.write(MUXED)
        sys.stdout.buffer.flush()
        encoded = _next(packets)
    container.close()


def _next(packets: BinaryIO) -> Encoded | None:
    head = packets.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    num_bytes, time_90k, is_key = HEAD.unpack(head)
    data = packets.read(num_bytes)
    return Encoded(data=data, is_key=bool(is_key), time_90k=time_90k, chunk_index=0)


if __name__ == "__main__":
    raise SystemExit(main())
