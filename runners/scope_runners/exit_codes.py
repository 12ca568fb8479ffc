"""How every command ends: 0 done, one of these, or 128 + n for signal n, as in a shell."""

import signal

FAILED = 1
"""The stream, or what was asked for, failed."""
BAD_INPUT = 2
"""The command cannot be used as typed."""
RETRACTED = 3
"""The stream is complete; chunks that were shown on the way were retracted and made again."""
INTEGRITY = 4
"""A rank found that something was computed wrong."""
DISK_FULL = 5
"""A disk takes no more: nothing is gained by another try before a person has freed some."""
INTERRUPTED = 128 + signal.SIGINT
