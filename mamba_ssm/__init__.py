"""State-space sequence models: Mamba, Mamba-2 and what is built from them."""
