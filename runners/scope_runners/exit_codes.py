"""How every command ends: 0 done, one of these, or 128 + n for signal n, as in a shell."""

import signal

FAILED = 1
"""The stream, or what was asked for, failed."""
BAD_INPUT = 2
"""The command cannot be used as typed."""
INTERRUPTED = 128 + signal.SIGINT
