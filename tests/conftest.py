"""The tests' fixtures live in `harness`, on the path by way of ``pythonpath`` in pyproject.toml."""

pytest_plugins = ["harness.plugin", "pytester"]
