"""The switch is set and set back; the package's operators run under it and repeat to the bit."""

import os

import pytest
import torch

from mamba_ssm import Mamba, Mamba2
from mamba_ssm.utils import determinism


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.setenv(determinism.CUBLAS_VARIABLE, "")
    yield
    torch.use_deterministic_algorithms(False)


def test_switch_is_set_back_even_after_an_error():
    with pytest.raises(KeyError), determinism.deterministic_mode():
        assert determinism.use_deterministic_mode()
        assert os.environ[determinism.CUBLAS_VARIABLE] == ":4096:8"
        raise KeyError
    assert not determinism.use_deterministic_mode()


def test_refuses_once_cuda_has_started_without_the_setting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG is '' and CUDA has started, expected :4096:8"):
        determinism.set_deterministic_mode(True)
    assert not determinism.use_deterministic_mode()


def gradients(make, device):
    torch.manual_seed(0)
    mixer = make().to(device)
    x = torch.randn(2, 33, 16).to(device)
    out = mixer(x, seq_idx=torch.arange(66).view(2, 33).div(10, rounding_mode="floor").to(device))
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in mixer.parameters())]


@pytest.mark.parametrize("make", [lambda: Mamba(16), lambda: Mamba2(16, headdim=8)], ids=["mamba", "mamba2"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])])
def test_mixers_repeat_to_the_bit(make, device, monkeypatch):
    monkeypatch.setenv(determinism.CUBLAS_VARIABLE, ":4096:8")
    with determinism.deterministic_mode():
        first, second = gradients(make, device), gradients(make, device)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
