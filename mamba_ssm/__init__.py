"""State-space sequence models: Mamba, Mamba-2 and what is built from them."""

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel, MambaWrapperModel
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.utils.generation import InferenceParams, update_graph_cache

__version__ = "0.1.0"

__all__ = [
    "InferenceParams",
    "Mamba",
    "Mamba2",
    "MambaConfig",
    "MambaLMHeadModel",
    "MambaWrapperModel",
    "mamba_inner_fn",
    "selective_scan_fn",
    "update_graph_cache",
]
