"""A worker that holds a lease around its job and gives it back on SIGTERM or Ctrl-C.

python examples/worker.py redis://localhost:6379/0 job:1
"""

import signal
import sys
import threading

import redis

from fencing import Leases, LeaseUnavailable


def stop(number: int, frame: object) -> None:
    # Python does not unwind `with` blocks on SIGTERM by itself; an exception does.
    raise SystemExit(128 + number)


def main(url: str, resource: str) -> None:
    signal.signal(signal.SIGTERM, stop)
    leases = Leases(redis.Redis.from_url(url), namespace="examples")
    try:
        with leases.acquire(resource, ttl=30) as lease:
            print(f"working on {resource} with token {lease.token}", flush=True)
            while lease.held:  # a sync thread is never interrupted: look now and then, or use a guard
                threading.Event().wait(0.2)
            lease.check()
    except LeaseUnavailable as busy:
        print(busy)
    finally:
        leases.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
