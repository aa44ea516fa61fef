"""The weights of a model without its head, out of files with or without one."""

from typing import Any

from cuformers.checkpoint.weight_map import WeightMap


class BareWeightMap(WeightMap):
    """A map for the part of a model under a prefix, whose modules are named without it.

    `home` is what stands there in the names of the whole model's modules.

    Files of the model with its head have the prefix ("bert.embeddings...", and "cls..." beside it); those of the bare
    model don't. Where the prefix is in the file, what lies outside of it is the head's and belongs nowhere.
    """

    def __init__(self, whole: WeightMap, prefix: str, home: str, *, in_file: bool) -> None:
        super().__init__(whole.rules, whole.older)
        self.prefix, self.home, self.in_file = prefix, home, in_file

    def is_outside(self, name: str) -> bool:
        """Whether the file's tensor is the head's."""
        return self.in_file and not name.startswith(self.prefix)

    def _of_file(self, name: str) -> Any:
        return super()._of_file(name if self.in_file else self.prefix + name)

    def to_module(self, name: str) -> tuple[str, ...]:
        if self.is_outside(name):
            return (f"outside {self.prefix}: {name}",)
        return tuple(full.removeprefix(self.home) for full in super().to_module(name))

    def to_file(self, name: str, num_stacked: int | None = None) -> tuple[str, ...]:
        files = super().to_file(self.home + name, num_stacked)
        return files if self.in_file else tuple(file.removeprefix(self.prefix) for file in files)
