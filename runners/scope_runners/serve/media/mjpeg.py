"""Pictures one after the other over HTTP, for whoever plays nothing else."""

from collections.abc import AsyncIterator

from scope_runners.serve.media.viewer import Viewer

MEDIA_TYPE = "multipart/x-mixed-replace; boundary=frame"


async def parts(viewer: Viewer) -> AsyncIterator[bytes]:
    """The body of a response, until the stream ends or the viewer leaves."""
    try:
        while (frame := await viewer.next()) is not None:
            yield (
                b"--frame\r\nContent-Type: image/jpeg\r\n"
                b"Content-Length: %d\r\n\r\n%b\r\n" % (len(frame.data), frame.data)
            )
    finally:
        viewer.leave()
