"""The kernel signals a process whose parent is gone, also one that is stopped and reads no pipe."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def signal_at_parent_death(signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends.

    Only Linux can; elsewhere this does nothing. A parent that ended before is not noticed: compare
    `os.getppid()` afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
