"""The types that users see: what they write is accepted, and their mistakes are found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "tests" / "typing" / "api.py"


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """What mypy says of a file."""
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--no-error-summary"]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    return subprocess.run([*command, *cache, str(path)], cwd=ROOT, capture_output=True, text=True)


def test_what_users_write_is_accepted_and_their_mistakes_are_found() -> None:
    answer = check(API)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_there_are_mistakes_to_be_found() -> None:
    """Each mistake carries the code of its own error: a bare ignore would hide any other."""
    ignores = re.findall(r"# type: ignore(\[[\w, -]+\])?", API.read_text())
    assert len(ignores) >= 30
    assert all(ignores)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('leases.acquire("a", tll=30)', "call-arg"),
        ('leases.try_acquire("a", wait=5)', "call-arg"),
        ('leases.acquire("a", ttl="30")', "arg-type"),
        ('leases.try_acquire("a").release()', "union-attr"),
    ],
)
def test_the_mistakes_stand_in_the_file(line: str, code: str) -> None:
    assert f"{line}  # type: ignore[{code}]" in API.read_text()


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A mistake without its comment, and a comment without its mistake."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from fencing import Leases\n"
        "from fencing.testing import MemoryBackend\n"
        'Leases(MemoryBackend()).acquire("a", tll=30)\n'
        'Leases(MemoryBackend()).acquire("a", ttl=30)  # type: ignore[call-arg]\n'
    )
    answer = check(wrong)
    assert answer.returncode == 1
    assert re.findall(r":(\d+): error: .*\[([\w-]+)\]$", answer.stdout, re.MULTILINE) == [
        ("3", "call-arg"),
        ("4", "unused-ignore"),
    ]
