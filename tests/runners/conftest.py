"""What tests of commands share."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from scope_runners.stop_request import STOPPING


@pytest.fixture
def heeded() -> Iterator[None]:
    """Who started the tests may have had signals ignored, as `nohup` does; streams heed that."""
    with ExitStack() as at_end:
        for signum in STOPPING:
            is_ctrl_c = signum == signal.SIGINT
            handler = signal.default_int_handler if is_ctrl_c else signal.SIG_DFL
            at_end.callback(signal.signal, signum, signal.signal(signum, handler))
        yield
