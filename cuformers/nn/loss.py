"""The next-token loss."""

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def next_token_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross-entropy in float32 of each position's logits against the next position's label.

    Args:
        logits: [B, S, V].
        labels: [B, S]; -100 is ignored.
        num_items: what the summed loss is divided by; None means the number of labels that count.
    """
    targets = F.pad(labels.to(logits.device), (0, 1), value=IGNORE)[:, 1:].flatten()
    flat = logits.float().flatten(0, 1)
    if num_items is None:
        return F.cross_entropy(flat, targets, ignore_index=IGNORE)
    return F.cross_entropy(flat, targets, ignore_index=IGNORE, reduction="sum") / num_items
