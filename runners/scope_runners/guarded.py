"""Every failure we foresee ends as one sentence and an exit code, no traceback."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Protocol

from scope_contracts.errors import (
    DamageError,
    IntegrityError,
    ModelDamageError,
    PeerRefusedError,
    ScopeError,
    UserInputError,
)
from scope_runners.exit_codes import BAD_INPUT, DISK_FULL, FAILED, INTEGRITY, INTERRUPTED
from scope_runners.shortage import is_full_disk, shortage_of
from scope_runners.standard_streams import open_standard_streams
from scope_runners.stop_request import Interrupted

_UNUSABLE = (UserInputError, ModelDamageError, PeerRefusedError)
"""Another try would end the same way."""


def guarded(
    command: Callable[[], int],
    *,
    speaker: str = "scope-rt",
    log: logging.Logger | None = None,
    is_beside_rank0: bool = True,
) -> int:
    """Run `command`; what it raises becomes one sentence of `speaker` and the exit code for it.

    Where there is a `log`, that has the sentence, with the error's name, and nothing is printed.
    What another rank refused is said by rank0 where that `is_beside_rank0`, on this host.
    """
    open_standard_streams()
    say = _voice(speaker, log)
    try:
        return command()
    except ScopeError as error:
        is_logged = log is not None
        if is_logged and isinstance(error, PeerRefusedError):
            if not is_beside_rank0:
                say(f"{error.args[0]}; it says what to change, on its own host")
            return BAD_INPUT
        return _said(error, say, is_logged=is_logged)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as stop:
        if log is not None:
            log.warning("interrupted")
        else:
            say("interrupted")
        return 128 + stop.signum if isinstance(stop, Interrupted) else INTERRUPTED
    except Exception as error:
        shortage = shortage_of(error)
        if shortage is None:
            raise
        sentence, code = shortage
        say(sentence, name=type(error).__name__)
        return code


def end_stuck(
    error: ScopeError, *, speaker: str = "scope-rt", log: logging.Logger | None = None
) -> NoReturn:
    """End this process, whose computing thread cannot be ended otherwise, as `guarded` would.

    For a `Watchdog`. What is on disk stays as it is, for a process that resumes.
    """
    code = _said(error, _voice(speaker, log), is_logged=log is not None)
    os._exit(code)


class _Say(Protocol):
    def __call__(self, sentence: str, *, name: str = "") -> None: ...


def _voice(speaker: str, log: logging.Logger | None) -> _Say:
    def say(sentence: str, *, name: str = "") -> None:
        if log is not None:
            log.error("%s%s", f"{name}: " if name else "", sentence)
        else:
            with suppress(OSError):  # a full disk behind stderr changes no exit code
                print(f"{speaker}: {sentence}", file=sys.stderr, flush=True)

    return say


def _said(error: ScopeError, say: _Say, *, is_logged: bool) -> int:
    """Say `error`; returns the exit code for it."""
    to_read_it = f" (scope-rt runbook {error.runbook})" if error.runbook and not is_logged else ""
    say(f"{error}{to_read_it}", name=type(error).__name__)
    if isinstance(error, IntegrityError) and not isinstance(error, DamageError):
        return INTEGRITY
    if isinstance(error, _UNUSABLE):
        return BAD_INPUT
    return DISK_FULL if is_full_disk(error) else FAILED
