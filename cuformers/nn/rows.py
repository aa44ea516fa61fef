"""Lays parameters that are used as one tensor one after the other in memory."""

import torch
from torch import nn

from cuformers.nn.attention.block import Attention
from cuformers.nn.mlp import GatedMLP
from cuformers.nn.project import has_plain_map, rows_as_one


def lay_in_rows(model: nn.Module) -> None:
    """Gives each storage group of the model's modules a common storage, where it does not have one.

    A load lays them out from the start; this is for parameters that were moved or set one by one. Takes the memory
    of one group more while it works.
    """
    for module in model.modules():
        if not isinstance(module, (Attention, GatedMLP)) or not all(map(has_plain_map, module.leaves)):
            continue  # a replaced leaf is called by itself
        for names in module.storage_groups():
            parameters = [module.get_parameter(name) for name in names]
            alike = len({(p.dtype, p.device, p.shape[1:]) for p in parameters}) == 1
            with torch.no_grad():
                if not alike or rows_as_one(parameters) is not None:
                    continue
                whole = torch.cat([p.data for p in parameters])
                for parameter, part in zip(parameters, whole.split([p.shape[0] for p in parameters])):
                    parameter.data = part
