"""The front door: what is imported when, and how the command line reads its words."""

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import cuformers
from cuformers.cli import main as command
from cuformers.cuda import visible
from tests.cuda.machines import gpu

ROOT = Path(__file__).resolve().parent.parent
FOUR = [gpu(i) for i in range(4)]


def python(*words: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


LIGHT = "import sys, time; t = time.perf_counter(); {}; print(time.perf_counter() - t, 'torch' in sys.modules)"


@pytest.mark.parametrize(
    "work", ["import cuformers", "import cuformers.cli.main as m; assert m.main(['--version']) == 0"]
)
def test_light_work_loads_no_torch_and_is_quick(work):
    best = 9.0
    for _ in range(3):  # a busy machine may spoil one of them
        seconds, loaded = python("-c", LIGHT.format(work)).splitlines()[-1].split()
        assert loaded == "False"
        best = min(best, float(seconds))
    assert best < 0.1


def test_help_lists_the_verbs_and_loads_no_torch():
    program = "import sys; from cuformers.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    shown = python("-c", program)
    assert all(verb in shown for verb in command.VERBS) and "--gpus" in shown
    assert python("-m", "cuformers") == shown


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cuformers.__version__ == project["version"]
    assert python("-m", "cuformers", "--version") == f"cuformers {project['version']}"


def test_names_come_from_their_homes(monkeypatch):
    assert set(cuformers.__all__) <= set(dir(cuformers))
    home = types.ModuleType("cuformers.auto")
    home.AutoConfig = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuformers.auto", home)
    monkeypatch.delitem(vars(cuformers), "AutoConfig", raising=False)
    assert cuformers.AutoConfig is home.AutoConfig  # type: ignore[attr-defined]
    del vars(cuformers)["AutoConfig"]  # it was kept after the first use
    with pytest.raises(AttributeError, match="no attribute 'AutoMagic'"):
        _ = cuformers.AutoMagic  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in cuformers.__all__ if name not in ("__version__", "pipeline")])
def test_every_name_is_what_it_says(name):
    assert getattr(cuformers, name).__name__ == name


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["env", "--json"], ("env", ["--json"], None, False)),
        (["env", "--gpus", "2,0", "--json"], ("env", ["--json"], "2,0", False)),
        (["--gpus=2,0", "env"], ("env", [], "2,0", False)),
        (["generate", "--gpus", "", "m", "--traceback"], ("generate", ["m"], "", True)),
        (["generate", "--", "--gpus", "1"], ("generate", ["--", "--gpus", "1"], None, False)),
        ([], (None, [], None, False)),
    ],
)
def test_split_takes_the_common_options_out(words, expected):
    assert tuple(command.split(words)) == expected


@pytest.fixture
def verb(monkeypatch):
    """A stand-in for `cuformers env` that records what it is called with, on a machine of four GPUs."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(visible, "cuda_started", lambda: False)
    monkeypatch.setattr(visible, "read", lambda: types.SimpleNamespace(gpus=FOUR))
    stand_in = types.ModuleType("cuformers.cli.env")
    stand_in.calls = []  # type: ignore[attr-defined]

    def main(argv: list[str]) -> int:
        stand_in.calls.append((argv, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")))
        return 7

    stand_in.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuformers.cli.env", stand_in)
    return stand_in


def test_gpus_are_chosen_before_the_verb_runs(verb):
    assert command.main(["env", "--gpus", "2,0", "--json"]) == 7
    assert verb.calls == [(["--json"], "2,0", "PCI_BUS_ID")]


def test_by_default_gpus_are_counted_as_nvidia_smi_counts_them(verb, monkeypatch):
    command.main(["env"])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    command.main(["env"])
    assert verb.calls == [([], None, "PCI_BUS_ID"), ([], "3", "FASTEST_FIRST")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["gen"], "known are env, generate, chat, bench. Did you mean 'generate'?"),
        (["evn"], "Did you mean 'env'?"),
        (["--gpus"], "--gpus needs a list"),
        (["env", "--gpus", "9"], "there is no GPU 9 among 4"),
    ],
)
def test_mistakes_are_said_in_one_line(verb, capsys, words, text):
    assert command.main(words) == command.USAGE_ERROR
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
    assert not verb.calls


def test_traceback_shows_where(verb):
    with pytest.raises(ValueError, match="no GPU 9"):
        command.main(["env", "--traceback", "--gpus", "9"])


def test_an_interrupt_is_not_an_error_message(verb, monkeypatch, capsys):
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "main", interrupted)
    assert command.main(["env"]) == 130
    assert capsys.readouterr().err == ""
