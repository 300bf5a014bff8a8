"""Each preset's takeover window, on a real server with all times divided by twenty."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from faults.conftest import MakeSide

from fencing import Policy, Wait
from fencing.policies import APPROVAL, JOB_TRANSITION, SNAPSHOT_WRITER, WORKFLOW_RUN, periodic_loop

SCALE = 20

PRESETS = {
    "job transition": JOB_TRANSITION,
    "approval": APPROVAL,
    "snapshot writer": SNAPSHOT_WRITER,
    "periodic loop": periodic_loop(poll=15),
    # `continue` needs a ledger, which makes no difference to a takeover
    "workflow run": dataclasses.replace(WORKFLOW_RUN, renewal=JOB_TRANSITION.renewal),
}


def scaled(policy: Policy) -> Policy:
    return dataclasses.replace(
        policy, ttl=policy.ttl / SCALE, poll=None if policy.poll is None else policy.poll / SCALE
    )


def test_a_dead_holder_is_succeeded_within_the_window_of_each_preset(
    make_side: MakeSide, redis_url: str
) -> None:
    dying, side = make_side(redis_url), make_side(redis_url)
    took: dict[str, float] = {}

    def succeed(name: str, policy: Policy) -> None:
        # A holder that dies at once: nothing renews or releases what it took.
        dead = dying.acquire(name, ttl=policy.ttl, hold_to_ttl=True)
        began = time.monotonic()
        if policy.poll is None:
            side.acquire(name, wait=Wait(budget=10, backoff=policy.wait.backoff))
        else:
            while (lease := side.try_acquire(name)) is None:
                time.sleep(policy.poll)
            assert lease.token > dead.token
        took[name] = time.monotonic() - began

    threads = [
        threading.Thread(target=succeed, args=(name, scaled(policy))) for name, policy in PRESETS.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, policy in PRESETS.items():
        window = scaled(policy).takeover_window
        assert scaled(policy).ttl * 0.95 <= took[name] <= window + 0.3, (name, took[name], window)


def test_the_windows_are_those_of_the_job_scheduler() -> None:
    assert JOB_TRANSITION.takeover_window == pytest.approx(60, abs=0.1)
    assert WORKFLOW_RUN.takeover_window == pytest.approx(30, abs=0.1)
    assert APPROVAL.takeover_window == pytest.approx(10, abs=0.1)
    assert SNAPSHOT_WRITER.takeover_window == 15
    assert periodic_loop(30).takeover_window == 90
