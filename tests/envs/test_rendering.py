"""The choice of a rendering backend, and what a machine without one, or without the packages, is told."""

import importlib.util
import logging
import os

import pytest

from envs import rendering
from envs.common import EnvironmentUnavailable
from envs.rendering import VARIABLE, choose_backend, import_optional, probe_backend, silence_absl

HAS_DM_CONTROL = importlib.util.find_spec("dm_control") is not None


@pytest.fixture
def probes(monkeypatch):
    """probes[backend] = failure or None; and which were tried."""
    outcome, tried = {"egl": "no EGL", "osmesa": "no OSMesa"}, []

    def probe(backend):
        tried.append(backend)
        return outcome[backend]

    monkeypatch.setattr(rendering, "probe_backend", probe)
    monkeypatch.setenv(VARIABLE, "")                                   # so that what the test sets is undone
    monkeypatch.delenv(VARIABLE)
    outcome["tried"] = tried
    return outcome


@pytest.mark.parametrize(("works", "tried"), [("egl", ["egl"]), ("osmesa", ["egl", "osmesa"])])
def test_the_first_that_works_is_chosen(works, tried, probes):
    probes[works] = None
    choose_backend("dmc/walker-walk")
    assert os.environ[VARIABLE] == works
    assert probes["tried"] == tried


def test_without_any_the_debian_packages_are_named(probes):
    with pytest.raises(EnvironmentUnavailable) as caught:
        choose_backend("dmc/walker-walk")
    message = str(caught.value)
    assert message.startswith("dmc/walker-walk cannot render here (egl: no EGL; osmesa: no OSMesa). Install")
    assert "libegl1" in message
    assert "libosmesa6" in message
    assert VARIABLE not in os.environ


def test_a_users_choice_stays(probes, monkeypatch):
    monkeypatch.setenv(VARIABLE, "glfw")
    choose_backend("dmc/walker-walk")
    assert os.environ[VARIABLE] == "glfw"
    assert probes["tried"] == []


@pytest.mark.skipif(not HAS_DM_CONTROL, reason="dm_control is not installed")
def test_a_backend_that_does_not_exist_fails_its_probe():
    assert "no_such_backend" in probe_backend("no_such_backend")


def test_a_probe_that_hangs_is_reported(monkeypatch):
    monkeypatch.setattr(rendering, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(rendering, "PROBE_TIMEOUT_S", 0.2)
    assert probe_backend("egl") == "no picture after 0.2 s"


def test_a_crash_is_reported(monkeypatch):
    monkeypatch.setattr(rendering, "PROBE", "import os; os.abort()")
    assert probe_backend("egl") == "the process ended with code -6"


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(EnvironmentUnavailable, match=r"^x/y needs the package no_such_package, .*: pip install t==1"):
        import_optional("no_such_package.part", "x/y", "t==1")


def test_a_package_that_does_not_fit_names_the_versions_that_do(tmp_path, monkeypatch):
    (tmp_path / "misfit_package.py").write_text("raise AttributeError('MjModel lacks flex_vertedge')")
    monkeypatch.syspath_prepend(tmp_path)
    words = r"importing misfit_package failed \(AttributeError: MjModel lacks.*Known to work: pip install thing==1"
    with pytest.raises(EnvironmentUnavailable, match=words):
        import_optional("misfit_package", "x/y", "thing==1")


def test_only_known_chatter_is_silenced(caplog):
    silence_absl()
    logging.getLogger("absl").warning("Cannot set velocity on Entity with no free joint.")
    logging.getLogger("absl").warning("Nan, Inf or huge value in QACC")
    assert [record.getMessage() for record in caplog.records] == ["Nan, Inf or huge value in QACC"]
