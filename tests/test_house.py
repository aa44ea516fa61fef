"""The rooms of the house: who may import whom, and the rules that a reader relies on."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "cuformers"
MAY_IMPORT = {
    "base": set(),
    "cuda": {"base"},
    "kernels": {"base", "cuda"},
    "checkpoint": {"base", "cuda"},
    "nn": {"base", "cuda", "kernels"},
    "models": {"base", "nn", "checkpoint"},
    "adapters": {"base", "nn", "checkpoint"},
    "generation": {"base", "cuda", "kernels", "checkpoint"},
    "engine": {"base", "cuda", "kernels", "nn", "generation"},
    "auto": {"base", "cuda", "kernels", "checkpoint", "models", "nn", "generation", "engine", "adapters"},
    "train": {"base", "cuda", "kernels", "nn", "checkpoint"},
    "cli": {
        "base", "cuda", "kernels", "checkpoint", "models", "nn", "generation", "engine", "adapters", "auto", "train",
    },
}
"""Imports go down only. Lazy imports and those under TYPE_CHECKING count."""
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST, file: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth, by its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = file.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join((*parts, *filter(None, [base])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room(file: Path) -> str | None:
    """The room that a file is in; None for the package root."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def test_every_folder_is_a_room() -> None:
    folders = {f.name for f in PACKAGE.iterdir() if f.is_dir() and any(f.glob("*.py"))}
    assert folders == set(MAY_IMPORT)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_down(file: Path) -> None:
    here = room(file)
    if here is None:
        return
    for name in imports(ast.parse(file.read_text()), file):
        parts = name.split(".")
        if parts[0] != "cuformers":
            continue
        assert len(parts) > 1, f"{file} imports the package root, which only re-exports"
        there = parts[1]
        assert there == here or there in MAY_IMPORT[here], f"{here} may not import {there}: {file} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_one_room_asks(file: Path) -> None:
    text, place = file.read_text(), file.relative_to(PACKAGE).as_posix()
    if place != "base/env.py":
        assert not re.search(r"\bos\.(environ|getenv|putenv)\b", text), f"{place}: the environment is base/env.py's"
    if room(file) != "cuda":
        assert "torch.cuda." not in text, f"{place}: torch.cuda is the cuda room's"


def test_every_op_has_a_reference() -> None:
    from cuformers.kernels.table import OPS

    for op in OPS:
        last = op.implementations[-1]
        assert last.name == "reference" and last.min_capability is None and "train" in last.modes, op.name
        assert callable(last.load())


def test_every_op_folder_is_in_the_table() -> None:
    from cuformers.kernels.table import OPS

    folders = {f.parent.name for f in PACKAGE.glob("kernels/*/reference.py")}
    homes = {i.load().__module__.split(".")[2] for op in OPS for i in op.implementations if i.name == "reference"}
    assert folders == homes


def test_every_model_has_a_parity_row() -> None:
    from cuformers.models.registry import specs
    from tests.models.encoders import ENCODERS, tiny_encoder_config
    from tests.models.families import FAMILIES, tiny_config
    from tests.models.state_space import STATE_SPACE, oracle

    encoders = {name for name, spec in specs().items() if spec.encoder is not None}
    states = {oracle(name).config.model_type for name in STATE_SPACE}
    assert {tiny_config(name).model_type for name in FAMILIES} == set(specs()) - encoders - states
    assert states == {"mamba", "falcon_mamba", "mamba2"}
    assert {tiny_encoder_config(name).model_type for name in ENCODERS} == encoders


def test_nothing_committed_names_a_machine() -> None:
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".sh", ".json", ".jsonl"} and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert "/" + "work/" not in text, f"{name} holds a path of one machine"
