"""The configuration of a language model, as config.json of a model's folder holds it."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class MambaConfig:
    """Sizes and options of `MambaLMHeadModel`."""

    d_model: int = 2560
    d_intermediate: int = 0                                  # width of each block's gated MLP, 0: none
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict = field(default_factory=dict)              # "layer" (Mamba, Mamba2) and that mixer's arguments
    attn_layer_idx: list = field(default_factory=list)       # the layers that are attention
    attn_cfg: dict = field(default_factory=dict)             # MHA's arguments
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True

    @property
    def padded_vocab_size(self) -> int:
        """The embedding's rows: vocab_size rounded up to a multiple of pad_vocab_size_multiple."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    def to_dict(self) -> dict[str, Any]:
        """Plain values, by field name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MambaConfig":
        """The inverse of `to_dict`; fields that are missing take their defaults, unknown ones raise ValueError."""
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"MambaConfig: unknown keys {', '.join(unknown)}, expected some of {', '.join(known)}")
        return cls(**values)
