"""Names in the files against names in the module: one table, read in both directions.

A template is a name in which `{x}` stands for one part between dots and `{*x}` for any rest (of at least one
character). Both sides of a rule have the same placeholders, which makes every rule reversible.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from torch import Tensor

_PLACEHOLDER = re.compile(r"\{(\*?)([a-z_]+)\}")


@dataclass(frozen=True)
class _Template:
    text: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(match[2] for match in _PLACEHOLDER.finditer(self.text))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, end = [], 0
        for match in _PLACEHOLDER.finditer(self.text):
            parts.append(re.escape(self.text[end : match.start()]))
            parts.append(f"(?P<{match[2]}>{'.+' if match[1] else '[^.]+'})")
            end = match.end()
        return re.compile("".join(parts) + re.escape(self.text[end:]), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def fill(self, values: dict[str, str]) -> str:
        return _PLACEHOLDER.sub(lambda match: values[match[2]], self.text)


@lru_cache(maxsize=4096)
def _template(text: str) -> _Template:
    return _Template(text)


def _check(rule: object, file: str, module: str, only_in_file: tuple[str, ...] = ()) -> None:
    here, there = _template(file).names, _template(module).names
    for names in (here, there):
        if len(set(names)) != len(names):
            raise ValueError(f"{rule}: a placeholder stands twice in one template.")
    if set(here) != set(there) | set(only_in_file):
        raise ValueError(f"{rule}: {file!r} and {module!r} need the same placeholders, or the rule has no way back.")


@dataclass(frozen=True)
class Rename:
    """One tensor of the file is one tensor of the module: `Rename("lm.{*rest}", "model.{*rest}")`."""

    file: str
    module: str

    def __post_init__(self) -> None:
        _check(self, self.file, self.module)


@dataclass(frozen=True)
class Split:
    """One tensor of the file is several of the module, one after the other along dim 0: a fused qkv_proj."""

    file: str
    modules: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.modules) < 2:
            raise ValueError(f"{self}: needs at least two module names.")
        for module in self.modules:
            _check(self, self.file, module)


@dataclass(frozen=True)
class Stack:
    """Tensors of the file, numbered by `{index}`, are the slices [i] of one of the module: experts stored singly.

    With several templates a slice is made of one tensor of each, all of one shape, one after the other along their
    dim 0: an expert's gate and up. A file that holds the whole stack under the module's own name is read too.
    """

    file: str | tuple[str, ...]
    module: str

    def __post_init__(self) -> None:
        if "index" in _template(self.module).names:
            raise ValueError(f"{self}: the placeholder {{index}} may stand in the file's template only.")
        for file in self.files:
            _check(self, file, self.module, only_in_file=("index",))

    @property
    def files(self) -> tuple[str, ...]:
        """The file's templates, in their order inside a slice."""
        return (self.file,) if isinstance(self.file, str) else self.file


class Slice(NamedTuple):
    """Which part of a Stack's module tensor one tensor of the file is."""

    index: int
    """The slice [i]."""
    part: int
    """Which of the slice's equal parts along dim 0."""
    parts: int
    """Tensors of the file that a slice is made of."""


Rule = Rename | Split | Stack


class WeightMap:
    """Rules tried in order; a name that no rule matches stays as it is.

    `older` has endings that names of older files have instead of today's (".gamma" for ".weight"): they are read as
    today's, and never written.

    `to_module` and `to_file` return tuples: a Split's file tensor is several of the module, a Stack's module tensor
    is several of the file.
    """

    def __init__(self, rules: tuple[Rule, ...] | list[Rule] = (), older: Mapping[str, str] | None = None) -> None:
        self.rules = tuple(rules)
        self.older = dict(older or {})

    def _of_file(self, name: str) -> tuple[Rule, dict[str, str], int] | None:
        """The first rule that the name matches, its placeholders, and which of the rule's file templates it is."""
        for rule in self.rules:
            for part, file in enumerate(_files(rule)):
                values = _template(file).match(name)
                if values is not None and (not isinstance(rule, Stack) or _is_index(values["index"])):
                    return rule, values, part
        return None

    def to_module(self, name: str) -> tuple[str, ...]:
        """Names in the module of the tensor that the file calls `name`, in their order along dim 0."""
        old = next((ending for ending in self.older if name.endswith(ending)), None)
        name = name if old is None else name.removesuffix(old) + self.older[old]
        found = self._of_file(name)
        if found is None:
            return (name,)
        rule, values, _ = found
        return tuple(_template(module).fill(values) for module in _modules(rule))

    def to_file(self, name: str, num_stacked: int | None = None) -> tuple[str, ...]:
        """Names in the file of the module's tensor `name`; a Stack needs `num_stacked`, its size along dim 0."""
        for rule in self.rules:
            for module in _modules(rule):
                values, files = _template(module).match(name), [_template(file) for file in _files(rule)]
                if values is None:
                    continue
                if not isinstance(rule, Stack):
                    return (files[0].fill(values),)
                assert num_stacked is not None, f"{rule} needs num_stacked to name {name!r} in the file"
                return tuple(file.fill({**values, "index": str(i)}) for i in range(num_stacked) for file in files)
        return (name,)

    def slice_of(self, name: str) -> Slice | None:
        """Which part of a stack the file's tensor `name` is; None where it is a whole tensor or several."""
        rule, values, part = self._of_file(name) or (None, {}, 0)
        return Slice(int(values["index"]), part, len(rule.files)) if isinstance(rule, Stack) else None


def _files(rule: Rule) -> tuple[str, ...]:
    return rule.files if isinstance(rule, Stack) else (rule.file,)


def part_of(stack: Tensor, where: Slice) -> Tensor:
    """The part of the module's tensor as a view without gradient; its shape does not divide where parts do not fit."""
    return stack.detach()[where.index].chunk(where.parts)[where.part]


def _modules(rule: Rule) -> tuple[str, ...]:
    return rule.modules if isinstance(rule, Split) else (rule.module,)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text


IDENTITY = WeightMap()
