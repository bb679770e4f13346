"""Layers built from the operators: the mixers, attention, the gated MLP and the residual block."""
