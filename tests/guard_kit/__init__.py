"""What the tests of the guard share: models, databases behind every driver, and the shapes that a write can have."""
