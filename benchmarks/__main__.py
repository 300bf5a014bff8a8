"""Run the benchmarks and print Markdown tables."""

from __future__ import annotations

import os
import platform
import sys

import redis

from benchmarks import cycle, guard, holding

ALL = {"cycle": cycle.run, "holding": holding.run, "guard": guard.run}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in ALL]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there is: {', '.join(ALL)}")
    print(f"Python {platform.python_version()}, redis-py {redis.__version__}, {os.cpu_count()} cores")
    for name in names or ALL:
        ALL[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
