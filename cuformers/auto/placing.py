"""Where a model goes: from `device_map` and `max_memory` to a placement, reckoned with the memory there is now."""

from collections.abc import Mapping

import torch
from torch import nn

from cuformers.auto.pretrained import Pretrained
from cuformers.base.log import notice
from cuformers.checkpoint.needs import CPU, Needs, Placement
from cuformers.checkpoint.placement import DeviceMap, DeviceSpec, resolve_placement
from cuformers.cuda.device import default_device, device_count, device_name
from cuformers.cuda.memory import free_bytes
from cuformers.nn.cache import PagedCache

RESERVE = 512 << 20
"""Bytes that each GPU keeps free for activations, workspaces and graphs."""
CONTEXT = 4096
"""Tokens of one sequence whose cache is counted, or the model's length where it is shorter."""


def place(
    model: Pretrained,
    device_map: DeviceMap | None,
    max_memory: Mapping[DeviceSpec, int | str] | None,
    dtype: torch.dtype,
) -> Placement:
    """The placement of a model that is still on the meta device; says in a line what was chosen for the user.

    Raises:
        ValueError: a device or name that is not possible.
        OutOfDeviceMemory: it does not fit; the message has needed and available bytes of each device.
    """
    chosen = device_map is None and max_memory is None
    wanted = default_device() if chosen else ("auto" if device_map is None else device_map)
    gpus = [torch.device("cuda", index) for index in range(device_count())]
    this_gpu = default_device() if gpus else None
    free = {device: free_bytes(device) for device in (*gpus, CPU)}
    placement = resolve_placement(needs(model, dtype), wanted, free, max_memory=max_memory, this_gpu=this_gpu)
    if chosen:
        device = default_device()
        notice(f"the model goes to {device} ({device_name(device)}); device_map= chooses another place.", once=True)
    for line in placement.notes:
        notice(line)
    return placement


def needs(model: Pretrained, dtype: torch.dtype) -> Needs:
    """Bytes of each part of a model, of its cache, and of what a GPU keeps free."""
    counted: set[nn.Parameter] = set()  # a tied weight counts where it is met first
    units = {}
    for name, part in model.units().items():
        own = set(part.parameters()) - counted
        units[name] = sum(p.numel() for p in own) * dtype.itemsize
        counted |= own
    return Needs(units=units, tied=model.together, cache_per_layer=_cache_per_layer(model, dtype), reserve=RESERVE)


def _cache_per_layer(model: Pretrained, dtype: torch.dtype) -> int:
    if not model.can_generate():
        return 0
    spec = model.backbone.attention_specs[0]
    tokens = min(CONTEXT, model.config.max_position_embeddings)
    return PagedCache.page_bytes(1, spec.num_kv_heads, spec.head_dim, tokens, dtype)
