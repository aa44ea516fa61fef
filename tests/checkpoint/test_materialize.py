"""A meta model gets memory: devices, dtypes, ties, rows in one storage; and random weights that repeat."""

import pytest
import torch
from torch import nn

from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.materialize import SharesStorage, initialize, materialize
from cuformers.checkpoint.needs import Needs
from cuformers.checkpoint.placement import resolve_placement
from cuformers.checkpoint.save import save_weights

CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 6, bias=bias), nn.Linear(8, 2, bias=bias)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def storage_groups(self):
        return (("q_proj.weight", "k_proj.weight"), ("q_proj.bias", "k_proj.bias"))


class Tied(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attn = Attention(bias)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


def built(make=Tied, **kwargs):
    with torch.device("meta"):
        return make(**kwargs)


def row(first, second):
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and second.storage_offset() == first.storage_offset() + first.numel()


@pytest.mark.parametrize("bias", [False, True])
def test_memory_ties_and_rows(bias):
    model = built(bias=bias)
    model.attn.k_proj.weight.requires_grad_(False)
    model.attn.q_proj.weight.mark = "kept"
    assert isinstance(model.attn, SharesStorage)
    materialize(model, lambda name: CPU, lambda name: torch.bfloat16)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (model.attn.scale.dtype, model.attn.count.dtype) == (torch.bfloat16, torch.int64)
    assert model.head.weight is model.embed.weight
    assert row(model.attn.q_proj.weight, model.attn.k_proj.weight)
    assert not bias or row(model.attn.q_proj.bias, model.attn.k_proj.bias)
    assert model.attn.q_proj.weight.requires_grad and not model.attn.k_proj.weight.requires_grad
    assert model.attn.q_proj.weight.mark == "kept" and model.attn.q_proj.weight.is_leaf
    with torch.no_grad():
        model.attn.q_proj.weight.fill_(1)
        model.attn.k_proj.weight.fill_(2)
    together = model.attn.q_proj.weight.detach().as_strided((8, 8), (8, 1))
    assert together.float().sum(1).tolist() == [8.0] * 6 + [16.0] * 2


def test_functions_are_asked_by_full_name():
    model = built()
    materialize(model, lambda name: CPU, lambda name: torch.float64 if name.startswith("attn.k") else None)
    assert model.attn.k_proj.weight.dtype == torch.float64
    assert model.attn.q_proj.weight.dtype == torch.float32  # so the two do not share, and that is no fault
    assert not row(model.attn.q_proj.weight, model.attn.k_proj.weight)


def test_what_has_memory_is_left_alone():
    model = built()
    model.attn.scale = torch.tensor([1.0, 2.0, 3.0])
    materialize(model, lambda name: CPU, lambda name: torch.bfloat16)
    assert model.attn.scale.tolist() == [1.0, 2.0, 3.0] and model.attn.scale.dtype == torch.float32


def test_a_member_that_was_replaced_ends_the_group():
    model = built()
    model.attn.k_proj = nn.Sequential(nn.Linear(8, 2, bias=False, device="meta"))
    materialize(model, lambda name: CPU, lambda name: None)
    assert not model.attn.k_proj[0].weight.is_meta


def test_a_non_persistent_buffer_is_refused():
    model = built()
    model.attn.register_buffer("lost", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"attn\.lost"):
        materialize(model, lambda name: CPU, lambda name: None)


def normal(name, module, generator):
    for parameter in module.parameters(recurse=False):
        parameter.normal_(generator=generator)


def test_initialize_repeats_by_seed_and_can_be_limited():
    def weights(seed):
        model = built(bias=True)
        materialize(model, lambda name: CPU, lambda name: None)
        initialize(model, normal, seed=seed)
        return model

    one, same, other = weights(1), weights(1), weights(2)
    for name, tensor in one.named_parameters():
        assert torch.equal(tensor, same.get_parameter(name))
        assert not torch.equal(tensor, other.get_parameter(name))
        assert torch.isfinite(tensor).all() and tensor.std() > 0.1
    before = {name: tensor.clone() for name, tensor in one.named_parameters()}
    initialize(one, normal, seed=5, only={"attn.q_proj.bias"})
    changed = {name for name, tensor in one.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed == {"attn.q_proj.bias"}


def test_a_tied_model_partly_on_the_cpu_leaves_nothing_on_meta(tmp_path):
    """Placement, memory, load and tie together; both devices are the CPU here, told apart by the placement only."""
    one = built()
    materialize(one, lambda name: CPU, lambda name: None)
    initialize(one, normal, seed=3)
    with torch.no_grad():
        one.attn.scale.fill_(2)
        one.attn.count.fill_(9)
    save_weights(one.state_dict(), tmp_path, progress=False)
    needs = Needs(units={"embed": 320, "attn": 300, "head": 0}, tied=(("embed", "head"),))
    gpu = torch.device("cuda", 0)
    placement = resolve_placement(needs, {"embed": "cpu", "attn": 0, "head": "cpu"}, {gpu: 1000, CPU: 1000})
    other, asked = built(), []
    materialize(other, lambda name: asked.append(placement.device_of(name)) or CPU, lambda name: None)
    assert set(asked) == {gpu, CPU}
    load_weights(other, Index.open(tmp_path), progress=False)
    assert other.head.weight is other.embed.weight
    assert not any(t.is_meta for t in (*other.parameters(), *other.buffers()))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
