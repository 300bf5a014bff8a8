"""A worker that holds a lease around its job and gives it back on SIGTERM or Ctrl-C.

python examples/worker.py redis://localhost:6379/0 job:1
"""

import signal
import sys
import threading

import redis

from fencing import LeaseLost, Leases, LeaseUnavailable


def stop(number: int, frame: object) -> None:
    # Python does not unwind `with` blocks on SIGTERM by itself; an exception does.
    raise SystemExit(128 + number)


def main(url: str, resource: str) -> None:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    leases = Leases(redis.Redis.from_url(url), namespace="examples")
    try:
        with leases.acquire(resource, ttl=30) as lease:
            print(f"working on {resource} with token {lease.token}", flush=True)
            while True:
                lease.check()  # a thread is never interrupted: look now and then
                threading.Event().wait(0.2)
    except LeaseUnavailable as busy:
        print(busy)
    except LeaseLost as lost:
        print(f"stop: {lost}")
    finally:
        leases.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
