"""What the tests stand on: servers to talk to, and a network between that fails when it is told to."""
