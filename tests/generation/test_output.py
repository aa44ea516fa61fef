import pytest
import torch
from transformers.generation import GenerateDecoderOnlyOutput as Theirs

from cuformers.generation import GenerateDecoderOnlyOutput as Ours


def test_is_read_as_transformers_output_is() -> None:
    fields = {"sequences": torch.tensor([[1, 2]]), "logits": (torch.zeros(1, 3),)}
    ours, theirs = Ours(**fields), Theirs(**fields)
    assert list(ours) == list(theirs) == ["sequences", "logits"]
    assert list(ours.keys()) == list(theirs.keys())
    assert len(ours) == len(theirs) == 2
    assert ours[0] is ours["sequences"] is ours.sequences is ours.to_tuple()[0] is theirs[0]
    assert ours[1] is theirs[1] and ours[:1] == theirs[:1] and ours[-1] is theirs[-1]
    assert [k for k, _ in ours.items()] == [k for k, _ in theirs.items()]
    assert "logits" in ours and "scores" not in ours and ours.scores is None
    assert ours.get("scores", 5) == theirs.get("scores", 5) == 5
    assert dict(**ours)["logits"] is ours.logits
    with pytest.raises(KeyError, match="sequences, logits"):
        ours["scores"]
    with pytest.raises(IndexError):
        ours[2]
