"""A process and everything it has forked: paused, continued or killed as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

EFFECT_LIMIT = 10.0  # seconds for a signal to have had its effect, on a busy machine


def pause(pid: int) -> list[int]:
    """Return when the process and all its descendants stand still: their ids, parents first."""
    family: list[int] = []
    # Safe because children are listed only after their parents stand still: those fork no more. So the
    # round that finds nobody new has found everybody.
    while newcomers := [process for process in _family(pid) if process not in family]:
        _send(newcomers, signal.SIGSTOP)
        _await_states(newcomers, "TZ")
        family += newcomers
    return family


def resume(pid: int) -> None:
    """Let the process and all its descendants run on, children first."""
    _send(reversed(_family(pid)), signal.SIGCONT)


def kill(pid: int, reap: Callable[[], object]) -> None:
    """Return when the process and all its descendants are gone. `reap` waits for the process itself."""
    family = pause(pid)
    _send(reversed(family), signal.SIGKILL)
    reap()
    _await_states(family, "Z")


def wait_until(happened: Callable[[], bool], limit: float) -> bool:
    """Whether it happened within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _family(pid: int) -> list[int]:
    """The process and its descendants, parents before their children."""
    parents = {process: parent for process, parent, _ in _all_processes()}
    family = [pid] if pid in parents else []
    for member in family:  # grows while it is read
        family += [process for process, parent in parents.items() if parent == member]
    return family


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass


def _await_states(processes: Iterable[int], states: str) -> None:
    """Wait until each of the processes is in one of the states, or gone."""
    wanted = set(processes)

    def reached() -> bool:
        return all(state in states for process, _, state in _all_processes() if process in wanted)

    if not wait_until(reached, EFFECT_LIMIT):
        raise TimeoutError(f"processes {sorted(wanted)} did not heed a signal for {EFFECT_LIMIT} seconds")


def _all_processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent and state (a letter: T stopped, Z dead but not waited for) of every process there is."""
    if sys.platform == "linux":
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name, in brackets, may itself hold blanks and brackets.
                state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
            except OSError:
                continue  # ended while we were reading
            yield int(file.parent.name), int(parent), state
    else:
        listing = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,stat="], check=True, capture_output=True, text=True
        )
        for line in listing.stdout.splitlines():
            process, parent, state = line.split()
            yield int(process), int(parent), state[0]
