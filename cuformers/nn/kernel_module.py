"""Modules that compute through ops, and how a model's kernels are set."""

from torch import nn

from cuformers.kernels.table import Kernels, reference


class KernelModule(nn.Module):
    """A module whose ops come from a table chosen for the whole model; plain PyTorch until one is chosen."""

    ops: Kernels

    def __init__(self) -> None:
        super().__init__()
        self.ops = reference()


def set_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Gives every module of the model this table of kernels; calling it again with another one undoes it."""
    for module in model.modules():
        if isinstance(module, KernelModule):
            module.ops = kernels
