"""A model built on the meta device gets its memory: empty for a load that follows, or random for a new model."""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

DeviceOf = Callable[[str], torch.device]
DtypeOf = Callable[[str], torch.dtype | None]


@runtime_checkable
class SharesStorage(Protocol):
    """A module some of whose parameters are to lie one after the other in one storage, to be used as one tensor."""

    def storage_groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parameter names, relative to the module, to lie in a row along dim 0."""
        ...


class _Slot(NamedTuple):
    """One place where a module holds a tensor: `module._parameters[leaf]` or `module._buffers[leaf]`."""

    name: str
    module: nn.Module
    leaf: str
    tensor: Tensor


def materialize(model: nn.Module, device_of: DeviceOf, dtype_of: DtypeOf) -> None:
    """Replaces every meta parameter and persistent buffer by an empty tensor on its device and of its dtype.

    `device_of` and `dtype_of` are asked with the full name; a dtype of None, or a tensor that is not floating point,
    keeps the dtype that the model was built with. Ties (one Parameter in two places) and requires_grad are kept.
    Groups of modules that implement `SharesStorage` become views of one tensor where all members exist and agree in
    device, dtype and inner shape.
    Raises ValueError where meta tensors would be left: non-persistent buffers, which no file can fill.
    """
    slots = [slot for slot in _slots(model) if slot.tensor.is_meta]
    lost = _non_persistent(model) & {slot.name for slot in slots}
    if lost:
        raise ValueError(
            f"Non-persistent buffers on the meta device have no source for their values: {sorted(lost)}. "
            "Compute them when they are first used, or register them as persistent."
        )
    first = {id(slot.tensor): slot for slot in reversed(slots)}
    by_name = {slot.name: slot for slot in slots}
    empties: dict[int, Tensor] = {}
    for names in _groups(model):
        members = [by_name[name] for name in names if name in by_name]
        if len(members) == len(names) and not any(id(m.tensor) in empties for m in members):
            _place_in_a_row([_layout(m, device_of, dtype_of) for m in members], members, empties)
    new: dict[int, Tensor] = {}
    for key, slot in first.items():
        empty = empties[key] if key in empties else _layout(slot, device_of, dtype_of).empty()
        new[key] = _like(slot.tensor, empty)
    for slot in slots:
        holder = slot.module._parameters if slot.leaf in slot.module._parameters else slot.module._buffers
        holder[slot.leaf] = new[id(slot.tensor)]  # type: ignore[assignment]
    left = [slot.name for slot in _slots(model) if slot.tensor.is_meta]
    assert not left, f"still on the meta device: {left}"


def initialize(
    model: nn.Module,
    init_fn: Callable[[str, nn.Module, torch.Generator], None],
    *,
    seed: int = 0,
    only: Collection[str] | None = None,
) -> None:
    """Random weights made where they lie: `init_fn(module name, module, generator)` for each module with own tensors.

    One generator per device, seeded with `seed`. `only` limits the work to modules that own one of these tensors, and
    keeps the other tensors of these modules as they are. A module is visited once, ties included.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for module_name, module in model.named_modules():
            owned = dict(_own(module_name, module))
            wanted = owned.keys() if only is None else owned.keys() & set(only)
            if not wanted:
                continue
            device = next(iter(owned.values())).device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            kept = {name: owned[name].clone() for name in owned.keys() - wanted}
            init_fn(module_name, module, generator)
            for name, value in kept.items():
                owned[name].copy_(value)


def _own(module_name: str, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    prefix = f"{module_name}." if module_name else ""
    for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield prefix + leaf, tensor


def _slots(model: nn.Module) -> list[_Slot]:
    found = []
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _own(module_name, module):
            found.append(_Slot(name, module, name.rpartition(".")[2], tensor))
    return found


def _non_persistent(model: nn.Module) -> set[str]:
    return {
        f"{module_name}.{leaf}" if module_name else leaf
        for module_name, module in model.named_modules(remove_duplicate=False)
        for leaf in module._non_persistent_buffers_set
        if module._buffers.get(leaf) is not None
    }


def _groups(model: nn.Module) -> Iterable[tuple[str, ...]]:
    for module_name, module in model.named_modules():
        if isinstance(module, SharesStorage):
            prefix = f"{module_name}." if module_name else ""
            for group in module.storage_groups():
                yield tuple(prefix + name for name in group)


class _Layout(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _layout(slot: _Slot, device_of: DeviceOf, dtype_of: DtypeOf) -> _Layout:
    dtype = dtype_of(slot.name) if slot.tensor.is_floating_point() else None
    return _Layout(slot.tensor.shape, dtype or slot.tensor.dtype, device_of(slot.name))


def _place_in_a_row(layouts: list[_Layout], members: list[_Slot], empties: dict[int, Tensor]) -> None:
    """One tensor for all members, of which each gets its rows; nothing where their layouts or names do not allow it."""
    alike = len({(layout.shape[1:], layout.dtype, layout.device) for layout in layouts}) == 1
    distinct = len({id(member.tensor) for member in members}) == len(members)
    if not (alike and distinct and layouts[0].shape):
        return
    rows = [layout.shape[0] for layout in layouts]
    whole = layouts[0]._replace(shape=torch.Size((sum(rows), *layouts[0].shape[1:]))).empty()
    for member, part in zip(members, whole.split(rows)):
        empties[id(member.tensor)] = part


def _like(old: Tensor, empty: Tensor) -> Tensor:
    if not isinstance(old, nn.Parameter):
        return empty
    new = nn.Parameter(empty, requires_grad=old.requires_grad)
    for mark, value in vars(old).items():  # what others put on the parameter
        setattr(new, mark, value)
    return new
