"""Benchmarks. ``python -m benchmarks`` runs all of them; ``python -m benchmarks cycle`` one."""
