"""Stacks of residual blocks: behind a token embedding, or behind Drama's stem on (latent, action).

Letters: B batch, L length, M d_model, V vocabulary, Z width of the latent, A width of the action, W convolution width.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.recurrent_state import KeptSequences, RecurrentState
from mamba_ssm.modules.aligned_linear import AlignedLinear
from mamba_ssm.modules.block import Block, add_norm
from mamba_ssm.modules.cache import MixerState
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.modules.mha import MHA
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.ops.checks import check_choice, check_shape
from mamba_ssm.ops.triton.dual_step import KeptRows
from mamba_ssm.ops.triton.layer_norm import RMSNorm
from mamba_ssm.utils.generation import GenerationMixin, GenerationOutput, InferenceParams
from mamba_ssm.utils.hf import load_config_hf, load_state_dict_hf, save_model_folder

Tensor = torch.Tensor

MIXERS: dict[str, Callable[..., nn.Module]] = {"Mamba": Mamba, "Mamba1": Mamba, "Mamba2": Mamba2}


def create_block(
    d_model: int,
    d_intermediate: int = 0,
    ssm_cfg: dict | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    dropout: float = 0.0,
    attn_layer_idx: Sequence[int] | None = None,
    attn_cfg: dict | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """One residual block. ssm_cfg: "layer" ("Mamba", the default, also called "Mamba1", or "Mamba2") and that mixer's
    arguments; layers in attn_layer_idx are attention instead, with attn_cfg as MHA's arguments."""
    factory = {"device": device, "dtype": dtype}
    options = dict(ssm_cfg or {})
    layer = options.pop("layer", "Mamba")
    check_choice("create_block", "ssm_cfg['layer']", layer, tuple(MIXERS))
    mixer = MIXERS[layer]
    if layer_idx in (attn_layer_idx or ()):
        mixer, options = MHA, dict(attn_cfg or {})
    mlp_cls = nn.Identity if d_intermediate == 0 else partial(GatedMLP, hidden_features=d_intermediate, **factory)
    norm_cls = partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **factory)
    return Block(
        d_model, partial(mixer, layer_idx=layer_idx, **options, **factory), mlp_cls, norm_cls=norm_cls,
        fused_add_norm=fused_add_norm, residual_in_fp32=residual_in_fp32, dropout=dropout,
    )  # fmt: skip


def init_weights(
    module: nn.Module, n_layer: int, initializer_range: float = 0.02, residuals_per_layer: int = 1
) -> None:
    """For `apply` on the stack: zero biases, normal embeddings, and the layers that write into the residual stream
    drawn anew and divided by √(number of branches), so that its variance does not grow with depth."""
    if isinstance(module, nn.Linear) and module.bias is not None and not getattr(module.bias, "_no_reinit", False):
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    for name in ("out_proj", "fc2"):
        child = getattr(module, name, None)
        if isinstance(child, nn.Linear):
            nn.init.kaiming_uniform_(child.weight, a=math.sqrt(5))
            with torch.no_grad():
                child.weight /= math.sqrt(residuals_per_layer * n_layer)


class BlockStack(nn.Module):
    """n_layer residual blocks and a final norm; subclasses put something in front."""

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int = 0,
        ssm_cfg: dict | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = True,
        fused_add_norm: bool = True,
        residual_in_fp32: bool = True,
        dropout: float = 0.0,
        attn_layer_idx: Sequence[int] | None = None,
        attn_cfg: dict | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.d_model, self.fused_add_norm, self.residual_in_fp32 = d_model, fused_add_norm, residual_in_fp32
        self.layers = nn.ModuleList(
            create_block(
                d_model, d_intermediate, ssm_cfg, norm_epsilon, rms_norm, residual_in_fp32, fused_add_norm, layer_idx,
                dropout, attn_layer_idx, attn_cfg, **factory,
            )
            for layer_idx in range(n_layer)
        )  # fmt: skip
        self.norm_f = (RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon, **factory)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int | None = None, dtype: torch.dtype | None = None, **kwargs
    ) -> dict[int, object]:
        """The mixers' caches by layer index, as `InferenceParams.key_value_memory_dict` holds them."""
        return {
            index: layer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
            for index, layer in enumerate(self.layers)
        }

    def run_blocks(
        self,
        hidden_states: Tensor,
        inference_params: InferenceParams | None = None,
        state: RecurrentState | KeptSequences | None = None,
        normed: Tensor | None = None,
        **mixer_kwargs,
    ) -> Tensor:
        """Blocks and final norm, (B, L, M) -> (B, L, M); `state` is continued and moved on in place; normed (B, L, M):
        what the first block's norm makes of hidden_states, where that is there already."""
        residual = None
        for index, layer in enumerate(self.layers):
            if state is not None:
                mixer_kwargs["state"] = state.layers[index]
            hidden_states, residual = layer(hidden_states, residual, inference_params, normed, **mixer_kwargs)
            normed = None
        if self.fused_add_norm:
            return add_norm(self.norm_f, hidden_states, residual)
        stream = hidden_states if residual is None else hidden_states + residual
        return self.norm_f(stream.to(self.norm_f.weight.dtype))


class MixerModel(BlockStack):
    """Token embedding and blocks."""

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int,
        vocab_size: int,
        ssm_cfg: dict | None = None,
        attn_layer_idx: Sequence[int] | None = None,
        attn_cfg: dict | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """attn_layer_idx: the layers that are attention; initializer_cfg: arguments of `init_weights`."""
        super().__init__(
            d_model, n_layer, d_intermediate, ssm_cfg, norm_epsilon, rms_norm, fused_add_norm, residual_in_fp32,
            attn_layer_idx=attn_layer_idx, attn_cfg=attn_cfg, device=device, dtype=dtype,
        )  # fmt: skip
        self.embedding = nn.Embedding(vocab_size, d_model, device=device, dtype=dtype)
        residuals = 1 if d_intermediate == 0 else 2
        self.apply(partial(init_weights, n_layer=n_layer, residuals_per_layer=residuals, **(initializer_cfg or {})))

    def forward(self, input_ids: Tensor, inference_params: InferenceParams | None = None, **mixer_kwargs) -> Tensor:
        """input_ids (B, L) integers -> (B, L, M); mixer_kwargs: seq_idx (B, L), cu_seqlens (S+1) ..."""
        return self.run_blocks(self.embedding(input_ids), inference_params=inference_params, **mixer_kwargs)


class CausalLMOutput(NamedTuple):
    """logits (B, L or num_last_tokens, V)."""

    logits: Tensor


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """Language model: `MixerModel` and a linear head, with the embedding's weight unless the config unties it."""

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """initializer_cfg: arguments of `init_weights`."""
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.config = config
        self.backbone = MixerModel(
            config.d_model, config.n_layer, config.d_intermediate, config.padded_vocab_size, config.ssm_cfg,
            config.attn_layer_idx, config.attn_cfg, rms_norm=config.rms_norm, initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm, residual_in_fp32=config.residual_in_fp32, **factory,
        )  # fmt: skip
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, **factory)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head use the embedding's weight, if the config ties them."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs
    ) -> dict[int, object]:
        """The layers' states by layer index."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        num_last_tokens: int = 0,
        **mixer_kwargs,
    ) -> CausalLMOutput:
        """input_ids (B, L) integers; position_ids: taken from callers that have them, not needed; num_last_tokens > 0
        keeps only the logits of that many last rows; mixer_kwargs: seq_idx (B, L), cu_seqlens (S+1) ..."""
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden_states = hidden_states[:, -num_last_tokens:]
        return CausalLMOutput(self.lm_head(hidden_states))

    def generate(self, input_ids: Tensor, max_length: int, **kwargs) -> GenerationOutput | Tensor:
        """`GenerationMixin.generate` that never chooses the padding behind the vocabulary: (B, L) -> (B, T)."""
        return super().generate(input_ids, max_length, **{"vocab_size": self.config.vocab_size, **kwargs})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs,
    ) -> "MambaLMHeadModel":
        """The model in a folder that `save_pretrained` wrote, or one with the usual parameter names; kwargs go to the
        constructor. Missing or unknown parameters, and shapes that differ, raise ValueError with their names."""
        config = MambaConfig.from_dict(load_config_hf(pretrained_model_name))
        model = cls(config, device=device, dtype=dtype, **kwargs)
        model._load(load_state_dict_hf(pretrained_model_name, device), str(pretrained_model_name))
        return model

    def save_pretrained(self, save_directory: str | os.PathLike, safe_serialization: bool = False) -> None:
        """Write config.json and pytorch_model.bin, or with safe_serialization model.safetensors."""
        state = self.state_dict()
        if self.config.tie_embeddings:
            del state["lm_head.weight"]                      # the embedding's, written once
        save_model_folder(save_directory, self.config.to_dict(), state, safe_serialization)

    def _load(self, state: dict[str, Tensor], source: str) -> None:
        own = self.state_dict()
        if self.config.tie_embeddings:
            state.setdefault("lm_head.weight", state.get("backbone.embedding.weight", own["lm_head.weight"]))
        faults = {
            "missing": sorted(set(own) - set(state)),
            "unknown": sorted(set(state) - set(own)),
            "of another shape": [
                f"{name} {tuple(state[name].shape)}, expected {tuple(own[name].shape)}"
                for name in sorted(set(own) & set(state))
                if own[name].shape != state[name].shape
            ],
        }
        if any(faults.values()):
            listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names)
            raise ValueError(f"{source}: the weights do not fit the configuration: {listed}")
        self.load_state_dict(state)


class MambaWrapperModel(BlockStack):
    """Drama's sequence core: stem on concat(latent, action), blocks, final norm.

    `forward` and `step` move the state that `init_state` makes on in place; nothing is differentiated through it.
    The parallel pass and as many steps give the same outputs and leave the same state."""

    max_seqlen: int | None = None                       # a recurrent state serves sequences of any length

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        stoch_dim: int,
        action_dim: int,
        d_intermediate: int = 0,
        ssm_cfg: dict | None = None,
        dropout: float = 0.0,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = True,
        initializer_cfg: dict | None = None,
        fused_add_norm: bool = True,
        residual_in_fp32: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """stoch_dim Z and action_dim A are the widths of the inputs; dropout acts on each block's branches."""
        super().__init__(
            d_model, n_layer, d_intermediate, ssm_cfg, norm_epsilon, rms_norm, fused_add_norm, residual_in_fp32,
            dropout, device=device, dtype=dtype,
        )  # fmt: skip
        self.stoch_dim, self.action_dim = stoch_dim, action_dim
        self.stem = nn.Sequential(
            AlignedLinear(stoch_dim + action_dim, d_model, device=device, dtype=dtype),
            RMSNorm(d_model, eps=norm_epsilon, device=device, dtype=dtype, activation="silu"),
        )
        residuals = 1 if d_intermediate == 0 else 2
        self.apply(partial(init_weights, n_layer=n_layer, residuals_per_layer=residuals, **(initializer_cfg or {})))

    def init_state(
        self, batch_size: int, max_seqlen: int | None = None, device: torch.device | str | None = None
    ) -> RecurrentState:
        """Zeros: the start of a sequence in each of batch_size rows. Its size does not depend on max_seqlen."""
        caches = self.allocate_inference_cache(batch_size, max_seqlen, device=device)
        return RecurrentState(tuple(caches.values()))

    def forward(
        self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None = None, state: RecurrentState | None = None
    ) -> Tensor:
        """stoch (B, L, Z), action (B, L, A), floating point; seq_idx (B, L) integers: rows of different index don't see
        each other; state: continued by the first row, whose seq_idx it belongs to, and left as after the last row.
        -> (B, L, M), row t has seen rows up to and with t"""
        if state is not None and state.batch_size != stoch.shape[0]:
            raise ValueError(f"MambaWrapperModel: state has {state.batch_size} rows, expected B = {stoch.shape[0]}")
        return self.run_blocks(self._embed(stoch, action, seq_idx), state=state, seq_idx=seq_idx)

    def start(
        self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None = None, max_seqlen: int | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """`forward` of sequences that start, and a new state as it is after the last row; its size does not depend on
        max_seqlen."""
        layers: list[MixerState] = []
        deter = self.run_blocks(self._embed(stoch, action, seq_idx), seq_idx=seq_idx, final_states=layers)
        return deter, RecurrentState(tuple(layers))

    def start_keeping(
        self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None, max_seqlen: int
    ) -> tuple[Tensor, KeptSequences]:
        """`start`, where `can_keep_rows(max_seqlen)`: what is left are the rows themselves, with room for max_seqlen in
        all, for `run_blocks` of one row at a time."""
        layers: list[KeptRows] = []
        deter = self.run_blocks(
            self._embed(stoch, action, seq_idx), seq_idx=seq_idx, final_states=layers,
            steps_to_come=max_seqlen - stoch.shape[1],
        )  # fmt: skip
        return deter, KeptSequences(tuple(layers))

    def can_keep_rows(self, length: int) -> bool:
        """Whether sequences of `length` rows may keep their rows instead of a state."""
        mixers = [layer.mixer for layer in self.layers]
        return all(isinstance(mixer, Mamba2) and mixer.can_keep_rows(length) for mixer in mixers)

    def _embed(self, stoch: Tensor, action: Tensor, seq_idx: Tensor | None) -> Tensor:
        check_shape("MambaWrapperModel", "stoch", stoch, "(B, L, Z)", (None, None, self.stoch_dim))
        check_shape("MambaWrapperModel", "action", action, "(B, L, A)", (*stoch.shape[:2], self.action_dim))
        check_shape("MambaWrapperModel", "seq_idx", seq_idx, "(B, L)", stoch.shape[:2])
        return self.stem(torch.cat([stoch, action], dim=-1))

    def step(self, stoch: Tensor, action: Tensor, state: RecurrentState, reset: Tensor | None = None) -> Tensor:
        """One row for each sequence: stoch (B, Z), action (B, A); rows that `reset` (B,) bool marks start a new
        sequence first; `state` is moved on in place.   -> (B, M)"""
        check_shape("MambaWrapperModel.step", "stoch", stoch, "(B, Z)", (None, self.stoch_dim))
        check_shape("MambaWrapperModel.step", "reset", reset, "(B,)", stoch.shape[:1])
        if reset is not None:
            state.reset_rows(reset)
        return self(stoch.unsqueeze(1), action.unsqueeze(1), state=state).squeeze(1)
