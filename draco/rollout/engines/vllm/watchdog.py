"""Run a command until it ends or the process that asked for it is gone, then end all of the command's processes.

    python watchdog.py PARENT_PID COMMAND [ARGUMENT ...]

A trainer that is killed with -9 cannot end its servers. So each server is started by this process, which runs in a
session of its own (a signal to the trainer's group does not reach it), makes the command a new process group, and looks
twice a second whether the trainer is still its parent. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


def _die_with_watchdog() -> None:
    """Linux: the command gets SIGKILL even if the watchdog itself is killed with -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parent: int, command: list[str]) -> int:
    """Exit status of the command, or 0 when it was ended from here."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stopping.append(received))
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_watchdog)
    while child.poll() is None and not stopping and os.getppid() == parent:
        time.sleep(0.5)
    status = child.poll()
    _end_group(child)
    return 0 if status is None else status


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """TERM to the group, then KILL; also after the group's leader has ended, which may have left children."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + wait_s
        while time.monotonic() < until and _alive(child):
            time.sleep(0.05)
    child.poll()


def _alive(child: subprocess.Popen[bytes]) -> bool:
    child.poll()  # reaps the leader, whose zombie would count as a member
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
