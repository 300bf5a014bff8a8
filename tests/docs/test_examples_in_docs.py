"""What the documentation shows can be pasted and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def run(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_these_servers(source: str, redis_url: str, database_url: str) -> str:
    source = source.replace("redis.Redis()", f"redis.Redis.from_url({redis_url!r})")
    source = source.replace("redis.asyncio.Redis()", f"redis.asyncio.Redis.from_url({redis_url!r})")
    return source.replace("postgresql+psycopg://fencing:fencing@127.0.0.1:5432/fencing", database_url)


def test_readme_blocks_run_one_after_the_other(redis_url: str, database_url: str) -> None:
    said = [run(on_these_servers(block, redis_url, database_url)) for block in python_blocks("README.md")]
    assert "Written(identity=(42,), outcome='updated')" in said[1]


def test_tutorial_test_runs(pytester: pytest.Pytester) -> None:
    [block] = [block for block in python_blocks("docs/tutorial.md") if "def test_" in block]
    pytester.makepyfile(block)
    pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_tutorial_runs_from_its_first_block_to_its_last(redis_url: str, database_url: str) -> None:
    source = "\n".join(block for block in python_blocks("docs/tutorial.md") if "def test_" not in block)
    said = run(on_these_servers(source, redis_url, database_url))
    assert "refused: tutorial_invoice 42 was not written" in said
    assert "wrong: the lease is about 'invoice:43'" in said
    assert "unguarded: update of 'tutorial_invoice'" in said
    assert said.count("this replica works") == 1


@pytest.mark.parametrize("page", ["web-and-tasks", "parents-and-children"])
def test_howto_runs_from_its_first_block_to_its_last(page: str, redis_url: str, database_url: str) -> None:
    source = "\n".join(python_blocks(f"docs/howto/{page}.md"))
    said = run(on_these_servers(source, redis_url, database_url))
    assert said == ("" if page == "web-and-tasks" else "refused: family_invoice (7,)\n")


def test_links_between_pages_lead_somewhere() -> None:
    missing = []
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []


def test_every_event_is_in_the_operations_page() -> None:
    from fencing.events import EVENTS

    page = (ROOT / "docs/operations.md").read_text()
    assert [event.name for event in EVENTS if event.name not in page] == []


def test_every_error_is_in_the_reference() -> None:
    import fencing

    page = (ROOT / "docs/reference.md").read_text()
    errors = [
        name
        for name in fencing.__all__
        if isinstance(getattr(fencing, name), type) and issubclass(getattr(fencing, name), Exception)
    ]
    abstract = {"FencingError", "LeaseError", "WriteRejected"}
    assert [name for name in errors if f"| `{name}`" not in page and name not in abstract] == []
