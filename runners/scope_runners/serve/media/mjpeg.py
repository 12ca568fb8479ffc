"""Pictures one after the other over HTTP, for whoever plays nothing else."""

from collections.abc import AsyncIterator

from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from scope_runners.serve.media.viewer import Viewer

_MEDIA_TYPE = "multipart/x-mixed-replace; boundary=frame"


def pictures_for(viewer: Viewer) -> StreamingResponse:
    """A response that never ends by itself; the viewer leaves with its client."""
    # A client that is gone before the first part never begins the body, which would leave.
    left = BackgroundTask(viewer.leave)
    return StreamingResponse(_parts(viewer), media_type=_MEDIA_TYPE, background=left)


async def _parts(viewer: Viewer) -> AsyncIterator[bytes]:
    """The body of a response, until the stream ends or the viewer leaves."""
    try:
        while (frame := await viewer.next()) is not None:
            yield (
                b"--frame\r\nContent-Type: image/jpeg\r\n"
                b"Content-Length: %d\r\n\r\n%b\r\n" % (len(frame.data), frame.data)
            )
    finally:
        viewer.leave()
