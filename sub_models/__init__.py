"""Neural parts of Drama: world model, Transformer core, losses, optimisers."""
