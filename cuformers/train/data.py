"""From data sets to batches, in an order that follows from a seed and the number of the pass alone."""

import inspect
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from cuformers.train.arguments import TrainingArguments
from cuformers.train.collators import Collator


class BatchOrder(Sampler[list[int]]):
    """Which examples make which batch; a pass over the data can be entered anywhere without reading what is before."""

    def __init__(self, size: int, batch_size: int, *, shuffle: bool, drop_last: bool, seed: int) -> None:
        self.size, self.batch_size, self.shuffle, self.drop_last, self.seed = size, batch_size, shuffle, drop_last, seed
        self.epoch, self.begin = 0, 0

    def enter(self, epoch: int, begin: int = 0) -> None:
        """The next pass is number `epoch`, and starts at batch `begin`; the one after it starts at its first batch."""
        self.epoch, self.begin = epoch, begin

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        begin, self.begin = self.begin, 0
        order = self._order()
        for batch in range(begin, len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=_generator(self.seed, self.epoch))


def make_loader(
    dataset: Any, args: TrainingArguments, collate: Collator, batch_size: int, *, shuffle: bool
) -> DataLoader[Any]:
    """Batches of a data set that has a length and is indexed, or that is an IterableDataset."""
    options: dict[str, Any] = dict(
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        generator=torch.Generator(),  # its own, so that reading data draws nothing from the global one
    )
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return DataLoader(dataset, batch_size=batch_size, drop_last=args.dataloader_drop_last, **options)
    seed = args.seed if args.data_seed is None else args.data_seed
    drop_last = args.dataloader_drop_last
    order = BatchOrder(len(dataset), batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    return DataLoader(cast("Dataset[Any]", dataset), batch_sampler=order, **options)


def batches_from(loader: DataLoader[Any], epoch: int, begin: int, seed: int) -> Iterator[Any]:
    """The batches of one pass from number `begin` on. Without a BatchOrder those before are read and passed over."""
    if loader.generator is not None:
        loader.generator.manual_seed(_mixed(seed, epoch))
    if isinstance(loader.batch_sampler, BatchOrder):
        loader.batch_sampler.enter(epoch, begin)
        return iter(loader)
    batches = iter(loader)
    for _ in range(begin):
        next(batches, None)
    return batches


def num_batches(loader: DataLoader[Any]) -> int | None:
    """Batches of a pass; None where only reading tells."""
    if isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, Sized):
        return None
    return len(loader)


def num_examples(loader: DataLoader[Any]) -> int | None:
    """Examples of a pass; None where only reading tells."""
    return len(loader.dataset) if isinstance(loader.dataset, Sized) else None


class KnownColumns:
    """A collator that first leaves out of each example what the model's forward has no argument for."""

    def __init__(self, collate: Collator, model: nn.Module, labels: list[str]) -> None:
        self.collate = collate
        self.known = {*inspect.signature(model.forward).parameters, "label", "label_ids", *labels}

    def __call__(self, examples: list[Any]) -> Any:
        if isinstance(examples[0], Mapping):
            if not self.known & set(examples[0]):
                raise ValueError(
                    f"the model's forward takes none of the columns {sorted(examples[0])}: name them as its arguments, "
                    "or set remove_unused_columns=False and pass a data_collator that makes its arguments of them."
                )
            examples = [{name: one[name] for name in one if name in self.known} for one in examples]
        return self.collate(examples)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors, at any depth, on the device; page-locked ones are copied while others compute."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(_mixed(seed, epoch))


def _mixed(seed: int, epoch: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xBF58476D1CE4E5B9) & (1 << 63) - 1


