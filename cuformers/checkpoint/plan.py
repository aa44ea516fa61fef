"""What a load will copy where, decided and checked from names, shapes and dtypes before a byte is read."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.header import TensorEntry
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.weight_map import Slice, WeightMap, part_of

_MOST = 20
_PLAIN_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


class Copy(NamedTuple):
    """Bytes of a file that become one contiguous part of a module's tensor, converted where the dtypes differ."""

    entry: TensorEntry
    """The file's tensor, of which this may be a part."""
    offset: int
    """Where the part begins, in bytes from the start of the file."""
    nbytes: int
    """Bytes in the file."""
    target: Tensor
    """Flat, contiguous, with as many elements as the part."""


Claims = dict[str, dict[Slice | None, Copy]]
"""By module name, then by slice of a stack; None for a whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a load will do."""

    copies: tuple[Copy, ...]
    """In no particular order; together they fill every tensor that is not missing."""
    twins: tuple[tuple[Copy, Copy], ...]
    """Pairs that the model ties but the file holds twice: only the first is loaded, the second has to be equal."""
    missing: tuple[str, ...]
    """Names in the module that the file has nothing for, and that the caller allowed to miss."""
    unexpected: tuple[str, ...]
    """Names in the file that the module has no place for, and that the caller allowed."""

    @property
    def nbytes(self) -> int:
        """Bytes that the load will read into the model."""
        return sum(copy.nbytes for copy in self.copies)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by every name it has, tied ones under each of theirs."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module_name, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(module_name)._non_persistent_buffers_set:
            found[name] = buffer
    return found


def matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """The names that one of the shell patterns (`*.inv_freq`) matches."""
    patterns = tuple(patterns)
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


def plan_load(
    model: nn.Module,
    index: Index,
    weight_map: WeightMap,
    ignore_missing: Iterable[str] = (),
    ignore_unexpected: Iterable[str] = (),
) -> Plan:
    """Matches the file's tensors with the module's.

    Raises one CheckpointError that lists all that is missing, unexpected, of another shape, or of a dtype that no
    plain conversion turns into the module's. A tied tensor may be in the file under any of its names.
    """
    tensors = tensors_of(model)
    faults = _Faults()
    claims: Claims = {}
    unexpected = []
    for name, entry in index.entries.items():
        homes = weight_map.to_module(name)
        if not all(home in tensors for home in homes):
            unexpected.append(name)
            continue
        slice_ = weight_map.slice_of(name)
        for home, copy in _copies(entry, homes, slice_, tensors, faults):
            _claim(claims, home, slice_, copy, faults)
        faults.seen.update(homes)
    missing = list(_missing(tensors, claims, weight_map, faults.seen))
    allowed_missing, allowed_unexpected = matching(missing, ignore_missing), matching(unexpected, ignore_unexpected)
    faults.missing = [name for name in missing if name not in allowed_missing]
    faults.unexpected = [name for name in unexpected if name not in allowed_unexpected]
    faults.raise_if_any(index)
    copies, twins = _without_twins(tensors, claims)
    return Plan(
        copies=copies, twins=twins, missing=tuple(sorted(allowed_missing)), unexpected=tuple(allowed_unexpected)
    )


class _Faults:
    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []
        self.twice: list[str] = []
        self.seen: set[str] = set()  # module names that the file has something for, even if it does not fit

    def raise_if_any(self, index: Index) -> None:
        kinds = (
            ("missing in the checkpoint", self.missing),
            ("unexpected, the model has no place for them", self.unexpected),
            ("of another shape", self.shapes),
            ("of a dtype that can't be converted", self.dtypes),
            ("given twice", self.twice),
        )
        lines = [f"  {len(names)} {kind}: {some(names)}" for kind, names in kinds if names]
        if lines:
            head = f"The checkpoint in {index.folder} does not fit the model; nothing was loaded."
            tail = "Check that config.json belongs to these weights."
            raise CheckpointError("\n".join((head, *lines, tail)))


def _claim(claims: Claims, home: str, slice_: Slice | None, copy: Copy, faults: _Faults) -> None:
    taken = claims.setdefault(home, {})
    rivals = [other for at, other in taken.items() if None in (at, slice_) or at == slice_]
    if rivals:
        faults.twice.append(f"{home} from {rivals[0].entry.name} and {copy.entry.name}")
    else:
        taken[slice_] = copy


def some(names: Sequence[str]) -> str:
    """The first names and how many more there are, for a message."""
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _copies(
    entry: TensorEntry, homes: tuple[str, ...], slice_: Slice | None, tensors: Mapping[str, Tensor], faults: _Faults
) -> Iterator[tuple[str, Copy]]:
    """The copies from one file tensor into its homes; what does not fit goes to the faults instead."""
    parts = [tensors[home] for home in homes]
    shape = _expected_shape(parts, slice_)
    if shape != entry.shape:
        needs = "no such slice" if shape is None else str(shape)
        faults.shapes.append(f"{entry.name} {entry.shape} (the model has {needs})")
        return
    offset = entry.offset
    for home, part in zip(homes, parts):
        if not _convertible(entry.dtype, part.dtype):
            faults.dtypes.append(f"{entry.name} {entry.dtype} (the model has {part.dtype})")
            return
        target = _flat(home, part if slice_ is None else part_of(part, slice_))
        nbytes = target.numel() * entry.dtype.itemsize
        yield home, Copy(entry, offset, nbytes, target)
        offset += nbytes


def _expected_shape(parts: list[Tensor], slice_: Slice | None) -> tuple[int, ...] | None:
    first = parts[0]
    if slice_ is not None:
        exists = first.dim() and slice_.index < first.shape[0]
        return tuple(part_of(first, slice_).shape) if exists else None
    if len(parts) == 1:
        return tuple(first.shape)
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    return (sum(part.shape[0] for part in parts), *first.shape[1:])


def _convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Equal, or both plain floats: an 8-bit float or an integer means something only with its scale."""
    return source == target or (source in _PLAIN_FLOATS and target in _PLAIN_FLOATS)


def _flat(name: str, tensor: Tensor) -> Tensor:
    assert not tensor.is_meta, f"{name} is on the meta device: materialize the model before loading"
    assert tensor.is_contiguous(), f"{name} is not contiguous: it can't be filled from a file"
    return tensor.detach().view(-1)


def _missing(
    tensors: Mapping[str, Tensor], claims: Claims, weight_map: WeightMap, seen: set[str]
) -> Iterator[str]:
    filled = {id(tensors[name]) for name in seen}
    for name, tensor in tensors.items():
        taken = claims.get(name, {})
        if id(tensor) not in filled:
            yield name
        elif taken and None not in taken:
            files = weight_map.to_file(name, num_stacked=tensor.shape[0])
            yield from (file for file in files if weight_map.slice_of(file) not in taken)


def _without_twins(
    tensors: Mapping[str, Tensor], claims: Claims
) -> tuple[tuple[Copy, ...], tuple[tuple[Copy, Copy], ...]]:
    by_tensor: dict[int, dict[Slice | None, Copy]] = {}
    twins = []
    for name in tensors:
        if name not in claims:
            continue
        first = by_tensor.setdefault(id(tensors[name]), claims[name])
        if first is not claims[name]:
            twins += [(first[i], claims[name][i]) for i in first.keys() & claims[name].keys()]
    copies = [copy for parts in by_tensor.values() for copy in parts.values() if copy.nbytes]
    return tuple(copies), tuple(twins)
