"""Every public name is where users expect it, takes what they pass, and says in its docstring what it is."""

import importlib
import inspect
import re

import pytest

NAMES = {
    "": "selective_scan_fn mamba_inner_fn Mamba Mamba2 MambaLMHeadModel MambaWrapperModel MambaConfig InferenceParams "
        "update_graph_cache",
    "ops.selective_scan_interface": "selective_scan_fn selective_scan_ref mamba_inner_fn mamba_inner_ref",
    "ops.triton.ssd_combined": "mamba_chunk_scan_combined mamba_split_conv1d_scan_combined mamba_chunk_scan "
        "ssd_chunk_scan_combined_ref mamba_split_conv1d_scan_ref",
    "ops.triton.selective_state_update": "selective_state_update selective_state_update_ref",
    "ops.triton.layer_norm": "RMSNorm layer_norm_fn rms_norm_fn layer_norm_ref rms_norm_ref",
    "ops.triton.layernorm_gated": "RMSNorm LayerNorm rmsnorm_fn layernorm_fn rms_norm_ref",
    "ops.triton.ssd_bmm": "bmm_chunk bmm_chunk_ref",
    "ops.triton.ssd_chunk_scan": "chunk_scan chunk_scan_ref",
    "ops.triton.ssd_chunk_state": "chunk_state chunk_state_ref",
    "ops.triton.ssd_state_passing": "state_passing state_passing_ref",
    "ops.triton.k_activations": "swiglu",
    "ops.causal_conv1d": "causal_conv1d_fn causal_conv1d_update",
    "modules.mamba_simple": "Mamba",
    "modules.mamba2": "Mamba2",
    "modules.mamba2_simple": "Mamba2Simple",
    "modules.mha": "MHA",
    "modules.mlp": "GatedMLP",
    "modules.block": "Block",
    "modules.ssd_minimal": "ssd_minimal_discrete",
    "models.config_mamba": "MambaConfig",
    "models.mixer_seq_simple": "MixerModel MambaLMHeadModel MambaWrapperModel",
    "utils.generation": "InferenceParams update_graph_cache GenerationMixin sample decode",
    "utils.hf": "load_config_hf load_state_dict_hf",
    "utils.torch": "custom_fwd custom_bwd",
    "utils.determinism": "use_deterministic_mode set_deterministic_mode",
    "distributed.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding ParallelEmbeddings",
    "distributed.distributed_utils": "all_gather reduce_scatter all_reduce sync_shared_params",
}  # fmt: skip

SHAPE_OR_REFERENCE = re.compile(r"\((\.\.\.|[A-Z])[^()]*\)|`\w+`")

SIGNATURES = {
    "ops.selective_scan_interface:selective_scan_fn selective_scan_ref":
        "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False",
    "ops.selective_scan_interface:mamba_inner_fn mamba_inner_ref":
        "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B=None C=None "
        "D=None delta_bias=None B_proj_bias=None C_proj_bias=None delta_softplus=True",
    "ops.triton.ssd_combined:mamba_chunk_scan_combined":
        "x dt A B C chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None cu_seqlens=None "
        "dt_softplus=False dt_limit=(0.0,inf) return_final_states=False return_varlen_states=False",
    "ops.triton.ssd_combined:mamba_split_conv1d_scan_combined":
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states=None seq_idx=None dt_limit=(0.0,inf) "
        "return_final_states=False activation='silu' rmsnorm_weight=None rmsnorm_eps=1e-06 outproj_weight=None "
        "outproj_bias=None headdim=None ngroups=1 norm_before_gate=True",
    "ops.triton.selective_state_update:selective_state_update selective_state_update_ref":
        "state x dt A B C D=None z=None dt_bias=None dt_softplus=False state_batch_indices=None",
    "ops.causal_conv1d:causal_conv1d_fn":
        "x weight bias=None seq_idx=None initial_states=None return_final_states=False activation=None",
    "ops.causal_conv1d:causal_conv1d_update": "x conv_state weight bias=None activation=None",
    "modules.ssd_minimal:ssd_minimal_discrete": "X A B C block_len initial_states=None",
    "modules.mamba_simple:Mamba":
        "d_model d_state=16 d_conv=4 expand=2 dt_rank='auto' dt_min=0.001 dt_max=0.1 dt_init='random' dt_scale=1.0 "
        "dt_init_floor=0.0001 conv_bias=True bias=False use_fast_path=True layer_idx=None device=None dtype=None",
    "modules.mamba2:Mamba2":
        "d_model d_state=128 d_conv=4 conv_init=None expand=2 headdim=64 d_ssm=None ngroups=1 A_init_range=(1.0,16.0) "
        "D_has_hdim=False rmsnorm=True norm_before_gate=False dt_min=0.001 dt_max=0.1 dt_init_floor=0.0001 "
        "dt_limit=(0.0,inf) bias=False conv_bias=True chunk_size=256 use_mem_eff_path=True layer_idx=None "
        "process_group=None sequence_parallel=True device=None dtype=None",
    "utils.generation:update_graph_cache":
        "model cache batch_size seqlen_og max_seqlen decoding_seqlens=(1,) dtype=None n_warmups=2",
}  # fmt: skip

METHODS = {
    "modules.mamba_simple:Mamba": "forward step allocate_inference_cache",
    "modules.mamba2:Mamba2": "forward step allocate_inference_cache",
    "modules.mamba2_simple:Mamba2Simple": "forward step allocate_inference_cache",
    "modules.mha:MHA": "forward step allocate_inference_cache",
    "models.mixer_seq_simple:MambaLMHeadModel": "from_pretrained save_pretrained generate allocate_inference_cache",
    "models.mixer_seq_simple:MambaWrapperModel": "forward step init_state",
    "utils.generation:GenerationMixin": "generate",
}


def load(module):
    return importlib.import_module("mamba_ssm." + module if module else "mamba_ssm")


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there_and_documented(module):
    for name in NAMES[module].split():
        assert inspect.getdoc(getattr(load(module), name)), f"{module}.{name} has no docstring"
    assert load(module).__doc__


@pytest.mark.parametrize("module", NAMES)
def test_docstrings_say_shapes(module):
    """What takes a tensor says its shape, or names the function that says it."""
    for name in NAMES[module].split():
        thing = getattr(load(module), name)
        function = getattr(thing, "forward", None) if inspect.isclass(thing) else thing
        annotations = [] if function is None else inspect.signature(function).parameters.values()
        if not any("Tensor" in str(parameter.annotation) for parameter in annotations):
            continue
        assert SHAPE_OR_REFERENCE.search(inspect.getdoc(function)), f"{module}.{name} does not say what shapes it takes"


@pytest.mark.parametrize("where", SIGNATURES)
def test_arguments_come_in_the_known_order_with_the_known_defaults(where):
    module, names = where.split(":")
    expected = SIGNATURES[where].split()
    for name in names.split():
        parameters = inspect.signature(getattr(load(module), name)).parameters.values()
        written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(", ", ",") for p in parameters]
        assert written[: len(expected)] == expected


@pytest.mark.parametrize("where", METHODS)
def test_methods_are_there_and_documented(where):
    module, name = where.split(":")
    for method in METHODS[where].split():
        assert inspect.getdoc(getattr(getattr(load(module), name), method)), f"{where}.{method} has no docstring"


def test_packages_export_what_they_say():
    package = load("")
    assert sorted(package.__all__) == package.__all__
    assert set(NAMES[""].split()) == set(package.__all__)
    assert package.__version__
