"""Fair comparison: variants take turns in many short rounds of one run, each figure is a median over the rounds
(a ratio is the median of the ratios within each round), and one variant runs twice under two names (A/A), so that
the noise is in the table too."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

ROUNDS = 61
T = TypeVar("T")


def pin(*pids: int) -> str:
    """Put this process and others on one core, so that no wake-up crosses cores; what was done."""
    if not hasattr(os, "sched_setaffinity"):
        return "not pinned"
    core = min(os.sched_getaffinity(0))
    for pid in (0, *pids):
        os.sched_setaffinity(pid, {core})
    return f"client and server on core {core}"


def unpin(*pids: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        for pid in (0, *pids):
            os.sched_setaffinity(pid, set(range(os.cpu_count() or 1)))


Times = dict[str, list[float]]


def compare(variants: Mapping[str, Callable[[], object]], cycles: int) -> Times:
    """Microseconds a call of each, round by round."""
    times: Times = {name: [] for name in variants}
    for at in range(ROUNDS):
        for name, call in rotated(variants, at):
            began = time.perf_counter()
            for _ in range(cycles):
                call()
            times[name].append((time.perf_counter() - began) / cycles * 1e6)
    return times


async def compare_async(variants: Mapping[str, Callable[[], Awaitable[object]]], cycles: int) -> Times:
    times: Times = {name: [] for name in variants}
    for at in range(ROUNDS):
        for name, call in rotated(variants, at):
            began = time.perf_counter()
            for _ in range(cycles):
                await call()
            times[name].append((time.perf_counter() - began) / cycles * 1e6)
    return times


def rotated(variants: Mapping[str, T], by: int) -> list[tuple[str, T]]:
    items = list(variants.items())
    by %= len(items)
    return items[by:] + items[:by]


def table(title: str, times: Times, against: str) -> None:
    print(f"\n### {title}\n")
    print(f"| variant | us a cycle | cycles/s | speed against {against} |")
    print("|---|---|---|---|")
    for name, values in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        median = statistics.median(values)
        ratio = statistics.median(base / own for base, own in zip(times[against], values, strict=True))
        print(f"| {name} | {median:.1f} | {1e6 / median:,.0f} | {ratio:.2f}x |")


def costs(title: str, times: Times, against: str) -> None:
    """What each takes, and as a multiple of one of them."""
    print(f"\n### {title}\n")
    print(f"| variant | us | cost against {against} |")
    print("|---|---|---|")
    for name, values in times.items():
        ratio = statistics.median(own / base for base, own in zip(times[against], values, strict=True))
        print(f"| {name} | {statistics.median(values):.1f} | {ratio:.3f}x |")
