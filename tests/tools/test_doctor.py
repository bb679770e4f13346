"""The doctor: exit code, a fix for each fault, estimates that follow the configuration."""

import io
import re

import pytest
import torch

import tools.doctor as doctor_module
from config_files.schema import Config
from mamba_ssm.ops import tiers
from tools.doctor import Finding, doctor, needs_of
from utils import DEFAULTS_FILE, load_config

QUICKSTART = str(DEFAULTS_FILE.parent / "quickstart.yaml")


def configure(*words: str) -> Config:
    return load_config(["--config", QUICKSTART, "--BasicSettings.Device", "cpu", *words], "train.py").config


def examine(*words: str) -> tuple[int, list[str]]:
    out = io.StringIO()
    code = doctor(configure(*words), out)
    return code, out.getvalue().splitlines()


@pytest.mark.parametrize("backbone", ["Mamba", "Mamba2", "Transformer"])
def test_a_configuration_that_runs_here(backbone):
    code, lines = examine("--Models.WorldModel.Backbone", backbone)
    assert code == 0
    assert lines[-1] == "this configuration can run here"
    assert any(line.startswith("  ok  self-test: ") for line in lines)
    for operator in tiers.operators():
        assert any(f"{operator} on cpu runs on the" in line for line in lines)
    assert not any(line.startswith("fail") for line in lines)


@pytest.mark.parametrize(
    "words, fault, fix",
    [
        (["--BasicSettings.Device", "cuda:99"], "fail  device: BasicSettings.Device = cuda:99", "Device auto"),
        (["--BasicSettings.Env_name", "ALE/Pnog-v5"], "fail  environment: .*ALE/Pong-v5", "Env_name"),
        (["--BasicSettings.SavePath", "/does/not/exist"], "fail  checkpoint: /does/not/exist", "SavePath"),
        (["--BasicSettings.RunDir", "/proc/runs"], "fail  run folder: /proc", "RunDir"),
        (["--JointTrainAgent.BufferMaxLength", "2000000000"], "fail  host memory: needs about", "BufferMaxLength"),
        (["--JointTrainAgent.BufferMaxLength", "2000000000"], "fail  disk: needs about", "RunDir"),
    ],
)
def test_each_fault_fails_and_names_its_fix(words, fault, fix):
    code, lines = examine(*words)
    assert code == 1
    [index] = [i for i, line in enumerate(lines) if re.match(fault, line)]
    assert lines[index + 1].startswith("      -> ") and fix in lines[index + 1]
    assert "to fix before this can run" in lines[-1]


def test_a_wrong_kernel_fails_the_self_test(monkeypatch):
    def slightly_wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01

    right = tiers.implementation("causal_conv1d", torch.device("cpu"))
    entry = tiers._operators["causal_conv1d"]
    monkeypatch.setitem(entry.tiers_by_device, "cpu", ("cpu",))
    monkeypatch.setitem(entry.functions, "cpu", slightly_wrong)
    code, lines = examine("--BasicSettings.Kernels", "auto")
    assert code == 1
    assert any(line.startswith("fail  self-test: Mamba2") for line in lines)


def test_a_check_that_breaks_is_reported_and_the_others_still_run(monkeypatch):
    def _broken(config):
        yield Finding("ok", "first", "fine")
        raise OSError("no such\nthing")

    monkeypatch.setattr(doctor_module, "_software", _broken)
    code, lines = examine()
    assert code == 1
    assert "fail  broken: OSError: no such thing" in lines
    assert any(line.startswith("  ok  self-test") for line in lines)


def test_needs_follow_the_configuration():
    small = needs_of(configure())
    larger = needs_of(configure("--JointTrainAgent.BatchSize", "32", "--JointTrainAgent.BufferMaxLength", "8000"))
    assert larger.replay == 2 * small.replay
    assert larger.replay > 8000 * 32 * 32 * 3
    assert larger.weights == small.weights
    assert larger.training > small.training


def test_needs_of_the_default_weights():
    """The default configuration has 7,155,459 + 3,416,580 parameters, the slow critic's included."""
    config = load_config(["--BasicSettings.Device", "cpu"], "train.py").config
    assert needs_of(config).weights == 4 * (7_155_459 + 3_416_580)
