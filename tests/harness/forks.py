"""Work in forked children."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_forked_child(work: Callable[[], None]) -> str:
    """Run ``work`` in a child made by fork. Return what it raised, "" for nothing. Bounded in time."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            work()
            answer = b""
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}".encode()
        os.write(write, answer or b"-")
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child hung or crashed: {status}"
    return "" if answer == b"-" else answer.decode()
