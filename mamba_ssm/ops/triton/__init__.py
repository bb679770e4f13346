"""Operators that have a Triton tier on GPUs. Importing them needs no Triton: their reference tier is plain PyTorch."""
