"""Small models and data that several tests share."""

import numpy as np
import torch

from agents import ActorCriticAgent, CategoricalActions, PPOAgent, TanhGaussianActions
from mamba_ssm.models.mixer_seq_simple import MambaWrapperModel
from replay_buffer import Batch
from sub_models.functions_losses import SymlogTwoHot
from sub_models.optimiser import Optimiser
from sub_models.transformer_model import StochasticTransformer
from sub_models.world_models import Decoder, Encoder, MLPHead, WorldModel

A, K, C, D, SIZE = 3, 4, 5, 16, 16
BACKBONES = ["Mamba2", "Mamba", "Transformer"]
STACK = {"depth": 4, "mults": [1, 2], "kernel": 5, "padding": "same", "act": "SiLU"}


def make_core(backbone, action_dim=A):
    if backbone == "Transformer":
        return StochasticTransformer(K * C, action_dim, D, 2, 4, 64, 0.0)
    ssm_cfg = {"layer": backbone, "d_state": 4, "d_conv": 4, "expand": 2}
    if backbone == "Mamba2":
        ssm_cfg |= {"headdim": 8, "chunk_size": 16}
    return MambaWrapperModel(D, 2, K * C, action_dim, ssm_cfg=ssm_cfg)


def make_world_model(backbone="Mamba2", continuous=False, norm="batch", **arguments):
    torch.manual_seed(0)
    stack = {**STACK, "image_size": (3, SIZE, SIZE), "norm": norm, "first_stride_one": True}
    world_model = WorldModel(
        Encoder(**stack),
        Decoder(K * C, final_sigmoid=True, **stack),
        make_core(backbone),
        MLPHead(D, 8, SymlogTwoHot().num_bins, 1, "SiLU"),
        MLPHead(D, 8, 1, 1, "SiLU"),
        deter_dim=D,
        num_categories=K,
        num_classes=C,
        num_actions=None if continuous else A,
        **arguments,
    ).double()
    world_model.optimiser = Optimiser(world_model.parameters(), "Laprop", 1e-3, 1e-20, 1000.0)
    return world_model


def make_batch(batch_size=2, seqlen=6, continuous=False, seed=0):
    rng = np.random.default_rng(seed)
    shape = (batch_size, seqlen)
    action = rng.uniform(-1, 1, (*shape, A)).astype(np.float32) if continuous else rng.integers(0, A, shape)
    is_first = np.zeros(shape, dtype=bool)
    is_first[0, 3] = True
    return Batch(
        *(
            torch.from_numpy(x)
            for x in (
                rng.integers(0, 256, (*shape, SIZE, SIZE, 3), dtype=np.uint8),
                action,
                rng.normal(size=shape).astype(np.float32),
                rng.integers(0, 2, shape).astype(np.float32),
                is_first,
            )
        )
    )


def make_agent_for(world_model, kind="AC", num_layers=1, unimix_ratio=0.0):
    """An untrained agent in the world model's precision."""
    actions = TanhGaussianActions(A) if world_model.num_actions is None else CategoricalActions(A, unimix_ratio)
    sizes = {"actor_units": 8, "critic_units": 8, "num_layers": num_layers}
    if kind == "PPO":
        rules = {"epsilon_clip": 0.2, "num_epochs": 2, "minibatch": 5, "critic_coef": 1.0, "kl_threshold": 0.1}
        agent = PPOAgent(world_model.feature_dim, actions, **rules, **sizes)
    else:
        agent = ActorCriticAgent(world_model.feature_dim, actions, **sizes)
    agent.to(world_model.prior_head.weight.dtype)
    agent.optimiser = Optimiser(agent.trained_parameters(), "Laprop", 1e-3, 1e-20, 100.0)
    return agent
