"""A run and what is around it: its folder and metrics, checkpoints, pictures, and the check of a machine."""
