"""An offer that cannot be used is refused in one sentence, and leaves no peer behind."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiortc import RTCPeerConnection, RTCSessionDescription

from scope_contracts.errors import ScopeError, UserInputError

CONNECT_S = 20.0
"""Within this a peer that was answered must have connected."""
_CLOSE_S = 5.0
_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def negotiating(peer: RTCPeerConnection) -> AsyncIterator[None]:
    """Apply an offer inside; the peer is ended where that fails.

    Raises:
        UserInputError: the offer cannot be used.
    """
    try:
        yield
    except ScopeError:
        await close_peer(peer)
        raise
    except Exception as error:  # aiortc has errors of any kind for lines that it did not expect
        await close_peer(peer)
        why = str(error) or type(error).__name__
        raise UserInputError(f"the offer cannot be used ({why}); send an SDP offer") from error
    except BaseException:
        await close_peer(peer)
        raise


async def apply_offer(peer: RTCPeerConnection, offer: str) -> None:
    """Inside of `negotiating`."""
    if "a=fingerprint:" not in offer:  # aiortc misses it when it connects
        raise UserInputError("the offer has no fingerprint; send an SDP offer of WebRTC")
    await peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))


async def close_peer(peer: RTCPeerConnection) -> None:
    """End it, within `_CLOSE_S`. Idempotent."""
    try:
        await asyncio.wait_for(peer.close(), _CLOSE_S)
    except (AttributeError, TimeoutError) as error:
        # aiortc ends parts that an unusable offer kept it from making, and waits for that after.
        _LOG.info("a peer ended early: %s", error)
