"""Packets of a rendition, as a muxer takes them: nothing is encoded again."""

from io import BytesIO
from typing import Any

import av

from scope_runners.serve.media.encoder import CLOCK, Encoded


def stream_for(container: Any, key: Encoded) -> Any:
    """A stream of `container` for H.264 packets of which `key` is a keyframe.

    A demuxer finds the parameter sets in a keyframe, which a muxer needs beforehand.
    """
    with av.open(BytesIO(key.data), format="h264") as source:
        stream = container.add_stream_from_template(source.streams.video[0])
    stream.time_base = CLOCK
    return stream


def packet_for(stream: Any, encoded: Encoded, *, after_90k: int = 0) -> Any:
    """A packet of `stream`, whose time begins at `after_90k`."""
    packet = av.Packet(encoded.data)
    packet.pts = packet.dts = encoded.time_90k - after_90k
    packet.time_base = CLOCK
    packet.is_keyframe = encoded.is_key
    packet.stream = stream
    return packet
