"""The language model: hybrid stacks, tied weights, folders written and read, and files that must be refused."""

import json
import os
import pickle
import sys

import pytest
import torch

from mamba_ssm import InferenceParams, MambaConfig, MambaLMHeadModel
from mamba_ssm.testing import assert_close

CONFIGS = {
    "Mamba": {"ssm_cfg": {"layer": "Mamba", "d_state": 4}},
    "Mamba2": {"ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8, "chunk_size": 8}, "d_intermediate": 16},
    "hybrid": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8}, "attn_layer_idx": [1],
        "attn_cfg": {"num_heads": 4, "causal": True, "rotary_emb_dim": 4, "d_conv": 4}, "tie_embeddings": False,
    },
}  # fmt: skip


def make(name="Mamba2", **changes):
    torch.manual_seed(0)
    return MambaLMHeadModel(MambaConfig(**{"d_model": 16, "n_layer": 3, "vocab_size": 11, **CONFIGS[name], **changes}))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_then_steps_equal_the_whole_pass(name):
    model = make(name).double()
    ids = torch.randint(0, 11, (2, 14))
    params = InferenceParams(max_seqlen=14, max_batch_size=2)
    params.key_value_memory_dict = model.allocate_inference_cache(2, 14)
    logits = []
    for piece in ids.split([6, 1, 1, 3, 3], dim=1):
        logits.append(model(piece, inference_params=params).logits)
        params.seqlen_offset += piece.shape[1]
    want = model(ids).logits
    assert want.shape == (2, 14, 16)                                         # 11 tokens padded to a multiple of 8
    assert_close(torch.cat(logits, dim=1), want, 1e-10)
    assert_close(model(ids, num_last_tokens=2).logits, want[:, -2:], 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_prompts_equal_each_alone(name):
    model = make(name).double()
    ids = torch.randint(0, 11, (1, 9))
    want = torch.cat([model(piece).logits for piece in ids.split([4, 5], dim=1)], dim=1)
    assert_close(model(ids, cu_seqlens=torch.tensor([0, 4, 9])).logits, want, 1e-10)
    assert_close(model(ids, seq_idx=torch.tensor([[0] * 4 + [1] * 5])).logits, want, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_prompts_then_steps_equal_each_alone(name):
    """Prompts of different lengths in one row, then all of them a token at a time."""
    model, lengths = make(name).double(), [4, 1, 7]
    ids, nexts = torch.randint(0, 11, (1, 12)), torch.randint(0, 11, (3, 5))
    params, packed = InferenceParams(max_seqlen=12, max_batch_size=3), torch.tensor([0, 4, 5, 12])
    out = model(ids, inference_params=params, cu_seqlens=packed).logits
    params.advance(12, packed)
    stepped = []
    for tokens in nexts.split(1, dim=1):
        stepped.append(model(tokens, inference_params=params).logits)
        params.advance(1)
    for i, prompt in enumerate(ids.split(lengths, dim=1)):
        got = torch.cat([out[:, packed[i] : packed[i + 1]], *(logits[i : i + 1] for logits in stepped)], dim=1)
        assert_close(got, model(torch.cat([prompt, nexts[i : i + 1]], dim=1)).logits, 1e-10)


def test_tied_weights_are_one_parameter():
    tied, untied = make("Mamba2"), make("hybrid")
    assert tied.lm_head.weight is tied.backbone.embedding.weight
    assert untied.lm_head.weight is not untied.backbone.embedding.weight
    assert isinstance(make("hybrid").backbone.layers[1].mixer.in_proj, torch.nn.Linear)


def test_usual_parameter_names():
    names = set(make("Mamba").state_dict())
    layer = {f"backbone.layers.0.{n}" for n in (
        "norm.weight", "mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias", "mixer.x_proj.weight",
        "mixer.dt_proj.weight", "mixer.dt_proj.bias", "mixer.A_log", "mixer.D", "mixer.out_proj.weight",
    )}  # fmt: skip
    assert layer | {"backbone.embedding.weight", "backbone.norm_f.weight", "lm_head.weight"} <= names
    assert len(names) == 3 * len(layer) + 3
    hybrid = set(make("hybrid").state_dict())
    assert {"backbone.layers.1.mixer.in_proj.weight", "backbone.layers.1.mixer.out_proj.weight"} <= hybrid
    mlp = set(make("Mamba2").state_dict())
    assert {f"backbone.layers.0.{n}.weight" for n in ("norm2", "mlp.fc1", "mlp.fc2")} <= mlp


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_folder_gives_the_same_logits_bit_for_bit(name, safe, dtype, tmp_path):
    model = make(name).to(dtype)
    model.save_pretrained(tmp_path, safe_serialization=safe)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors" if safe else "pytorch_model.bin"}
    again = MambaLMHeadModel.from_pretrained(tmp_path, dtype=dtype)
    ids = torch.randint(0, 11, (2, 9))
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config == model.config


def test_saving_again_replaces_the_other_format(tmp_path):
    make().save_pretrained(tmp_path, safe_serialization=True)
    other = make("Mamba2")
    torch.nn.init.zeros_(other.backbone.norm_f.weight)
    other.save_pretrained(tmp_path)
    assert not MambaLMHeadModel.from_pretrained(tmp_path).backbone.norm_f.weight.any()


def rewrite(folder, change):
    path = folder / "pytorch_model.bin"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize("change, message", [
    (lambda s: s.pop("backbone.norm_f.weight"), r"missing: backbone\.norm_f\.weight$"),
    (lambda s: s.update(extra=torch.zeros(1)), "unknown: extra$"),
    (lambda s: s.update({"backbone.norm_f.weight": torch.zeros(3)}), r"of another shape: backbone\.norm_f\.weight"),
    (lambda s: s.update(extra=3), "holds no dictionary of tensors"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    make().save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        MambaLMHeadModel.from_pretrained(tmp_path)


class Malicious:
    """Unpickling it leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_a_file_that_holds_code_is_refused_and_not_run(save, tmp_path):
    make().save_pretrained(tmp_path)
    trace = tmp_path / "executed"
    save({"backbone.norm_f.weight": Malicious(str(trace))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="refused, holds more than tensors and plain values"):
        MambaLMHeadModel.from_pretrained(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_damaged_file_is_one_error(name, tmp_path):
    make().save_pretrained(tmp_path, safe_serialization=name == "model.safetensors")
    content = (tmp_path / name).read_bytes()
    for damaged in (b"", content[:7], content[: len(content) // 2]):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            MambaLMHeadModel.from_pretrained(tmp_path)


def test_without_the_package_safetensors_its_files_are_one_error(tmp_path, monkeypatch):
    make().save_pretrained(tmp_path, safe_serialization=True)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="needs the package safetensors: pip install"):
        MambaLMHeadModel.from_pretrained(tmp_path)
    with pytest.raises(ImportError, match="needs the package safetensors: pip install"):
        make().save_pretrained(tmp_path, safe_serialization=True)


def test_wrong_folders_and_configurations_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        MambaLMHeadModel.from_pretrained(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        MambaLMHeadModel.from_pretrained(tmp_path)
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "d_modle": 3}))
    with pytest.raises(ValueError, match="unknown keys d_modle, expected some of d_model"):
        MambaLMHeadModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        MambaLMHeadModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, expected an object"):
        MambaLMHeadModel.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors or pytorch_model\.bin"):
        MambaLMHeadModel.from_pretrained(tmp_path)
