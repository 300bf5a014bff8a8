"""Where leases and token counters live. `base` says what a backend is; the contract suite defines it."""
