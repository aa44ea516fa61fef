"""What README and docs/ say is so: programs run, commands parse, links lead somewhere, names exist."""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doc_blocks import PAGES, Block, blocks, prose
from tests.hub_cache import fill, fill_minilm, offline
from tests.paths import ROOT

torch.set_num_threads(1)

PACKAGE = ROOT / "cuformers"
ROOMS = sorted(f.name for f in PACKAGE.iterdir() if (f / "__init__.py").exists())
ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL if block.language == "python"]
LINES = [(block, line) for block in ALL if block.language == "bash" for line in block.code.splitlines() if line.strip()]
STRUCTURE = ROOT / "docs" / "structure.md"


def test_the_pages_are_there() -> None:
    names = {page.name for page in PAGES}
    assert {"README.md", "structure.md", "precision.md", "adding-a-model.md", "install.md", "nvidia-gpu.md"} <= names
    assert {"continuous-batching.md", "embeddings.md", "lora.md"} <= names
    assert PYTHON and LINES




@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_programs_compile(block: Block) -> None:
    compile(block.code, str(block), "exec")


def test_fences_name_their_language() -> None:
    assert {block.language for block in ALL} <= {"python", "bash", ""}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "nvidia-gpu.md"], ids=lambda p: p.name)
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = [b for b in blocks(page) if b.language == "python" and b.mark == "runs"]
    if not marked:
        return
    fill(tmp_path)
    fill_minilm(tmp_path)
    offline(monkeypatch, tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what a page writes stays out of the checkout
    names: dict[str, Any] = {"__name__": "page"}
    for block in marked:
        block.run(names)
    if page.name == "adding-a-model.md":
        _check_the_new_model(names)


def _check_the_new_model(names: dict[str, Any]) -> None:
    """The page's model is Mistral, whose numbers transformers gives."""
    from cuformers.auto.model import build
    from cuformers.models.registry import find

    assert "new" not in _model_types()
    (spec,) = names["SPECS"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = {**sizes, "vocab_size": 128, "num_key_value_heads": 2, "sliding_window": 8, "rms_norm_eps": 1e-6}
    theirs = find("mistral").config.from_dict({"model_type": "mistral", **raw})
    new, known = (build(s, c).to_empty(device="cpu") for s, c in (
        (spec, spec.config.from_dict({"model_type": "new", **raw})), (find("mistral"), theirs),
    ))  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in known.parameters():
            parameter.normal_(0, 0.1)
        new.load_state_dict(known.state_dict())
        ids = torch.randint(0, 128, (1, 20))
        assert torch.equal(new.eval()(ids).logits, known.eval()(ids).logits)


def _model_types() -> set[str]:
    from cuformers.models.registry import specs

    return set(specs())




class _ParsedError(Exception):
    """The command line was understood; the verb goes no further."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_after(method: Any) -> Any:
        def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            raise _ParsedError(method(self, *args, **kwargs))

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop_after(getattr(argparse.ArgumentParser, name)))


def commands(line: str) -> Iterator[list[str]]:
    """The words of each call of cuformers in a shell line."""
    for part in line.split("&&"):
        words = shlex.split(part)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            del words[0]
        if words and Path(words[0]).name == "cuformers":
            yield words[1:]


CALLS = [(block, words) for block, line in LINES for words in commands(line)]


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{block}-{' '.join(words)}") for block, words in CALLS])
def test_commands_parse(words: list[str], parse_only: None) -> None:
    from cuformers.cli import main as command
    from cuformers.cli.sampling_flags import given_options

    arguments = command.split(words)
    assert arguments.verb in command.VERBS
    with pytest.raises(_ParsedError) as parsed:
        import_module(f"cuformers.cli.{arguments.verb}").main(arguments.rest)
    if arguments.verb not in ("env", "bench"):
        given_options(parsed.value.args[0])  # values in their ranges


def test_a_wrong_flag_would_be_found(parse_only: None) -> None:
    with pytest.raises(SystemExit):
        import_module("cuformers.cli.generate").main(["hello", "--max-tokens", "5"])


def test_every_verb_is_shown() -> None:
    from cuformers.cli.main import VERBS

    assert {words[0] for _, words in CALLS} == set(VERBS)


def test_pip_lines_name_our_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for page in PAGES for extra in re.findall(r"'\.\[(\w+)\]'", page.read_text())}
    assert named and named <= set(project["optional-dependencies"])


def test_ci_runs_the_readmes_second_command() -> None:
    second = [line for block, line in LINES if block.page.name == "README.md"][1]
    assert second.replace("install -e", "install -q -e") in (ROOT / ".ci" / "run").read_text()




@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}; {sorted(anchors(there))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:cuformers|tests|docs|benchmarks|tools)/[\w/.-]+\.\w+)`", prose(page)):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


def tree(page: Path) -> dict[str, str]:
    """The entries of a page's tree, by path, and the comment behind each."""
    (block,) = [b for b in blocks(page) if b.code.startswith("cuformers/\n")]
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in block.code.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names, _, comment = line.strip().partition("  ")
        for name in names.split():
            folders[depth:] = [name.rstrip("/")]
            found["/".join(folders)] = comment.strip()
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", STRUCTURE], ids=lambda p: p.name)
def test_the_tree_is_the_packages(page: Path) -> None:
    entries = tree(page)
    for path in entries:
        assert (ROOT / path).exists(), f"{page.name} shows {path}"
    missing = [room for room in ROOMS if f"cuformers/{room}" not in entries]
    assert not missing, f"{page.name} does not show {missing}"


def test_structure_shows_every_op() -> None:
    ops = {f"cuformers/kernels/{f.parent.name}" for f in PACKAGE.glob("kernels/*/reference.py")}
    assert ops <= tree(STRUCTURE).keys()


def test_structure_shows_every_file_of_the_engine() -> None:
    files = {f"cuformers/engine/{f.name}" for f in PACKAGE.glob("engine/*.py") if f.stem != "__init__"}
    assert files <= tree(STRUCTURE).keys()


def resolves(name: str) -> bool:
    """Whether `room.module.Class.member` is a file of the package, or is defined in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        base = PACKAGE.joinpath(*parts[:cut])
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if file.is_file():
            return _defines(ast.parse(file.read_text()), parts[cut:])
    return False


def _defines(tree: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == names[0]:
            return _defines(node, names[1:])
        targets = {ast.Assign: "targets", ast.AnnAssign: "target"}.get(type(node))
        named = getattr(node, targets) if targets else []
        if any(isinstance(t, ast.Name) and t.id == names[0] for t in (named if isinstance(named, list) else [named])):
            return len(names) == 1
    return False


def dotted(page: Path) -> list[str]:
    """Names like `engine.engine.Engine.run` in a page's text."""
    pattern = rf"`((?:{'|'.join(ROOMS)})\.[\w.]+)`"
    return [name for name in re.findall(pattern, prose(page)) if not name.endswith(".py")]


def test_names_in_the_structure_exist() -> None:
    names = dotted(STRUCTURE)
    assert len(names) > 40
    assert [name for name in names if not resolves(name)] == []


@pytest.mark.parametrize("name", ["engine.engine.Engine.walk", "engine.walker", "auto.model.walk", "nn.step.Step.x.y"])
def test_a_name_that_is_gone_would_be_found(name: str) -> None:
    assert not resolves(name)


def test_environment_variables_are_in_the_table() -> None:
    from cuformers.base.env import VARIABLES

    known = {variable.name for variable in VARIABLES}
    page = (ROOT / "docs" / "install.md").read_text()
    table = page[page.index("## Environment variables") :]
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", table)) == known


def test_precision_names_the_ops() -> None:
    """The table's dtypes of the references, on what can be asked of them."""
    from cuformers.kernels.table import reference

    text = (ROOT / "docs" / "precision.md").read_text()
    ops = reference()
    inside = {"add_rms_norm", "rms_norm_add", "gated_activation", "argmax", "advance"}  # variants; or no arithmetic
    assert [c.op for c in ops.choices if c.op not in inside and f"`{c.op}`" not in text] == []
    x, w = torch.randn(8, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), (64,), w.double(), 1e-6)
    assert torch.equal(ops.rms_norm(x, w, 1e-6), exact.bfloat16())  # rounded once
