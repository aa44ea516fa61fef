"""Which device a word means, with any number of GPUs."""

import pytest
import torch

from cuformers.cuda import device


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs torch claims to see, and no launcher."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def set_count(count: int, local_rank: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)

    return set_count


def test_default_device(gpus):
    gpus(0)
    assert device.default_device() == torch.device("cpu")
    gpus(2)
    assert device.default_device() == torch.device("cuda:0")
    gpus(4, local_rank="3")
    assert device.default_device() == torch.device("cuda:3")


@pytest.mark.parametrize("rank", ["2", "-1", "x"])
def test_a_rank_without_a_gpu_is_refused(gpus, rank):
    gpus(2, local_rank=rank)
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        device.default_device()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
        ("cuda", "cuda:1"),
        (torch.device("cuda"), "cuda:1"),
        ("cuda:2", "cuda:2"),
        (0, "cuda:0"),
        ("2", "cuda:2"),
    ],
)
def test_resolve_device(gpus, spec, expected):
    gpus(3, local_rank="1")
    assert device.resolve_device(spec) == torch.device(expected)


@pytest.mark.parametrize("spec", ["cuda:3", 3])
def test_a_gpu_that_is_not_there_names_those_that_are(gpus, spec):
    gpus(3)
    with pytest.raises(ValueError, match=r"'cpu', 'cuda:0', 'cuda:1', 'cuda:2'.*CUDA_VISIBLE_DEVICES"):
        device.resolve_device(spec)


@pytest.mark.parametrize("spec", ["gpu", "mps", "meta", -1, True, None, 1.0, "cuda:-1", "cuda:x"])
def test_words_that_name_no_device_are_refused(gpus, spec):
    gpus(3)
    with pytest.raises(ValueError, match="device="):
        device.resolve_device(spec)


@pytest.mark.parametrize("spec", ["cuda", "cuda:0", 0])
def test_without_a_gpu_only_the_cpu_is_left(gpus, spec):
    gpus(0)
    with pytest.raises(ValueError, match="cuformers env"):
        device.resolve_device(spec)


def test_the_cpu_has_no_capability():
    assert device.capability("cpu") is None
    assert device.num_sms("cpu") == 0
    assert device.device_name("cpu") == "CPU"
    device.synchronize("cpu")
