"""The next-token loss of a flat stream."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cuformers.kernels.linear_cross_entropy import check_labels
from cuformers.nn.flatten import FlatBatch, take

IGNORE = -100


def next_tokens(labels: Tensor, batch: FlatBatch, vocab_size: int) -> Tensor:
    """Labels [B, S] -> [T], int64: the label of the position after each token; -100 after a row's last.

    Labels where padding stands still are what the token before has to say; padding itself says nothing. The result is
    where the labels are, or, as the door looks at padding on the model's device, there.

    Raises:
        ValueError: labels on the CPU that are no tokens. On a GPU a wrong label makes the loss NaN.
    """
    check_labels(labels.flatten(), vocab_size, IGNORE)
    following = F.pad(labels.to(torch.int64), (0, 1), value=IGNORE)[:, 1:]
    return take(following if batch.places is None else following.to(batch.tokens.device), batch)


def that_count(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [T, H] and targets [T] -> those of the tokens with a target, on the device of the former.

    Targets on a GPU all stay, as the host doesn't know how many count, and does not wait to hear it.
    """
    if targets.device.type != "cpu":
        return hidden, targets.to(hidden.device)
    places = (targets != IGNORE).nonzero()[:, 0]
    there = {"device": hidden.device, "non_blocking": True}
    return hidden.index_select(0, places.to(**there)), targets[places].to(**there)


def loss_of_logits(logits: Tensor, targets: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross-entropy in float32 of logits [T, V] against targets [T].

    Args:
        logits: in any float dtype.
        targets: -100 is ignored.
        num_items: what the sum is divided by; None means the number of targets that count.
    """
    targets = targets.to(logits.device)
    if num_items is None:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum") / num_items


def averaged(total: Tensor, targets: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """The same of a sum that is there already: NaN where nothing counts, with a gradient of 0."""
    if num_items is not None:
        return total / num_items
    count = (targets != IGNORE).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)
