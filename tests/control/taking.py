"""Taking what an inbox has, where nothing must wait; not a test itself."""

from scope_rt.control.inbox import ControlInbox, Taken


def take(inbox: ControlInbox, chunk_index: int) -> Taken:
    """Everything asked for up to the planning of `chunk_index`."""
    taken = inbox.take(chunk_index, unless=lambda directive: False)
    assert taken is not None
    return taken
