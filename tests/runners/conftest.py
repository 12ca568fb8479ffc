"""What tests of commands share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def heeded() -> Iterator[None]:
    """Whoever started the tests may have had Ctrl-C ignored, and a stream heeds that."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
