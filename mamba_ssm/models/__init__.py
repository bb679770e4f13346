"""Whole networks: the language model and the sequence core that Drama's world model uses."""
