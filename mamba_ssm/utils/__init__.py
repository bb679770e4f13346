"""Generation, state-dict files, and helpers around torch."""
