"""The demo tells its story, and leaves nothing running."""

from __future__ import annotations

import subprocess
import sys


def test_demo_refuses_the_stale_write_and_shows_the_lost_update() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fencing.demo"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    guarded, unguarded = done.stdout.split("The same without the guard")
    for verb in ("renew", "release", "write"):
        assert f"{verb:8} REFUSED" in guarded
    assert "write    REFUSED  (StaleToken)" in guarded
    assert "balance 150: B's write stands" in guarded
    assert "balance 130: B's 50 are gone" in unguarded
    assert done.stderr == ""
