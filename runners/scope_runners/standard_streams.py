"""A standard stream that was closed at start (`2>&-`) leads nowhere, and its number to no file.

The first file that a process opens takes the lowest free number: without this, a library that
prints to number 2 would write into the stream's log.
"""

import os
import sys


def open_standard_streams() -> None:
    """Open on the null device what is closed; before anything else is opened."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            assert null == number, "all lower numbers are taken"
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
