"""Fragmented MP4, made once for all who want it: an initialisation, then one fragment a frame."""

import threading
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO

import av

from scope_runners.serve.media.encoder import Encoded
from scope_runners.serve.media.muxing import packet_for, stream_for
from scope_runners.serve.media.rendition import Rendition

_FLAGS = "frag_every_frame+empty_moov+default_base_moof+omit_tfhd_offset"


class Fragmenter:
    """Takes H.264 packets of a rendition while anybody wants fragments."""

    def __init__(self, rendition: Rendition) -> None:
        self._rendition = rendition
        self._lock = threading.Lock()
        self._takers: dict[Callable[[Encoded], None], bool] = {}
        """And whether each has had the initialisation."""
        self._muxer: _Muxer | None = None

    def join(self, taker: Callable[[Encoded], None]) -> None:
        """`taker` gets fragments from the next keyframe on, as of `Rendition.join`."""
        with self._lock:
            self._takers[taker] = False
            is_first = len(self._takers) == 1
        if is_first:
            self._rendition.join(self._take)
        else:
            self._rendition.ask_for_key()

    def leave(self, taker: Callable[[Encoded], None]) -> None:
        """It gets no more. Idempotent."""
        with self._lock:
            self._takers.pop(taker, None)
            is_last = not self._takers
            if is_last:
                self._muxer = None
        if is_last:
            self._rendition.leave(self._take)

    def _take(self, encoded: Encoded) -> None:
        """On the encoder's thread; those who leave meanwhile do so between two packets."""
        with self._lock:
            if self._muxer is None:
                if not encoded.is_key or not self._takers:
                    return
                self._muxer = _Muxer(encoded)
            made = self._muxer.fragment_of(encoded)
            if made is None:
                return
            whole = replace(made, data=self._muxer.initialisation + made.data)
            given = [(taker, made if begun else whole) for taker, begun in self._takers.items()]
            if made.is_key:
                self._takers = dict.fromkeys(self._takers, True)
        for taker, fragment in given:
            if fragment is made or made.is_key:
                taker(fragment)


class _Muxer:
    """One MP4, whose bytes are taken as they are written."""

    def __init__(self, key: Encoded) -> None:
        self._file = BytesIO()
        self._container = av.open(
            self._file, "w", format="mp4", options={"movflags": _FLAGS, "flush_packets": "1"}
        )
        self._stream = stream_for(self._container, key)
        self._container.start_encoding()
        self.initialisation = self._taken()
        self._before: Encoded | None = None

    def fragment_of(self, encoded: Encoded) -> Encoded | None:
        """The fragment of the frame before, which is known to end now; None of the first."""
        before, self._before = self._before, encoded
        self._container.mux_one(packet_for(self._stream, encoded))
        data = self._taken()
        if before is None or not data:
            return None
        return replace(before, data=data, packet=None)

    def _taken(self) -> bytes:
        data = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return data
