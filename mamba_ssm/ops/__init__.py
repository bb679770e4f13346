"""Operators of state-space models: selective scan, state-space duality, causal convolution, norms, one-step updates."""
