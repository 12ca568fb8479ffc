"""A stream is sent to an RTMP, SRT or RTSP server by a process of its own, which may be killed."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable

from scope_runners.serve.media.encoder import Codec, Encoded
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.mux_process import CONNECTED, HEAD, STEP_S
from scope_runners.serve.media.publish_errors import PublishError, RefusedError
from scope_runners.serve.media.publish_target import Target
from scope_runners.serve.media.viewer import Viewer

_MODULE = "scope_runners.serve.media.mux_process"
_NO_PROTOCOL = "Protocol not found"
_END_S = 3.0


async def push(target: Target, hub: MediaHub, on_live: Callable[[], None]) -> None:
    """Send until the stream ends.

    Raises:
        PublishError: the server is not there, or is gone.
        RefusedError: this machine's FFmpeg cannot speak to it.
    """
    key = await _first_key(hub)
    if key is None:
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _MODULE,
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the server
    )
    try:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        process.stdin.write(json.dumps({"url": target.url, "format": target.format}).encode())
        process.stdin.write(b"\n" + record(key))
        if await process.stdout.readline() != CONNECTED:
            raise await _why(process, "cannot be reached")
        on_live()
        await _feed(process, hub)
    finally:
        await _end(process)


async def _first_key(hub: MediaHub) -> Encoded | None:
    """Read before the server is, so that no picture grows old while it connects."""
    viewer = _joined(hub)
    try:
        return await viewer.next()
    finally:
        viewer.leave()


async def _feed(process: Process, hub: MediaHub) -> None:
    """Raises `PublishError` once the process has ended by itself."""
    viewer, stdin = _joined(hub), process.stdin
    assert stdin is not None, "it is a pipe"

    async def feed() -> None:
        while (encoded := await viewer.next()) is not None:
            stdin.write(record(encoded))
            await stdin.drain()

    feeding, ended = asyncio.create_task(feed()), asyncio.create_task(process.wait())
    try:
        await asyncio.wait((feeding, ended), return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if feeding.done():
                feeding.result()
                return
        raise await _why(process, "is gone")
    finally:
        viewer.leave()
        feeding.cancel()
        ended.cancel()
        await asyncio.gather(feeding, ended, return_exceptions=True)


async def _why(process: Process, what: str) -> PublishError:
    """The sentence of a process that has ended by itself."""
    assert process.stdout is not None, "it is a pipe"
    said = (await process.stdout.read()).decode(errors="replace").strip()
    code = await process.wait()
    if _NO_PROTOCOL in said:
        return RefusedError("this PyAV's FFmpeg has not this protocol; publish by another one")
    if code == -signal.SIGALRM:
        return PublishError(f"the server has taken nothing for {STEP_S} s")
    return PublishError(f"the server {what} ({said or f'its sender ended with {code}'})")


async def _end(process: Process) -> None:
    """In order where it still obeys; leaves no process."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _joined(hub: MediaHub) -> Viewer:
    return hub.join(Codec.H264, asyncio.get_running_loop(), is_publication=True)


def record(encoded: Encoded) -> bytes:
    """A packet as the process reads it."""
    return HEAD.pack(encoded.is_key, encoded.time_90k, len(encoded.data)) + encoded.data
