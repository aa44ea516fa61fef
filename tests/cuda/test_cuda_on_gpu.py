"""The cuda room on a real GPU."""

import gc

import pytest
import torch

from cuformers.cuda import device, driver, graphs, memory, runtime, streams
from cuformers.cuda.report import supports

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def test_facts_are_torchs():
    assert device.default_device() == GPU
    assert device.capability(GPU) == torch.cuda.get_device_capability(0)
    assert device.num_sms("cuda") == torch.cuda.get_device_properties(0).multi_processor_count
    assert supports(device.capability(GPU))["bf16"] == torch.cuda.is_bf16_supported(including_emulation=False)
    assert memory.total_bytes(GPU) == torch.cuda.mem_get_info(0)[1]


def test_the_driver_and_torch_name_the_same_gpus():
    torch.cuda.init()
    assert driver.cuda_started()
    facts, seen = driver.read(), runtime.read()
    assert len(seen.gpus) == torch.cuda.device_count()
    uuids = {gpu.uuid.removeprefix("GPU-") for gpu in facts.gpus}
    assert all(gpu.uuid in uuids for gpu in seen.gpus)
    by_uuid = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in facts.gpus}
    for gpu in seen.gpus:
        physical = by_uuid[gpu.uuid]
        assert physical.capability == gpu.capability and physical.name == gpu.name
        assert physical.pci_bus_id.lower().startswith(gpu.pci_bus_id)
        assert gpu.problem is None


def test_memory_moves_with_an_allocation():
    size = 256 << 20
    before, free = memory.allocated_bytes(GPU), memory.free_bytes(GPU)
    memory.reset_peak(GPU)
    block = torch.empty(size, dtype=torch.uint8, device=GPU)
    assert memory.allocated_bytes(GPU) - before == size
    assert abs(free - memory.free_bytes(GPU) - size) <= 4 << 20
    del block
    assert memory.peak_bytes(GPU) - before == size
    assert abs(free - memory.free_bytes(GPU)) <= 4 << 20  # held by the allocator, so still to be had


def test_a_copy_on_a_side_stream_arrives():
    source = streams.pinned_empty((1 << 20,), torch.float32).normal_()
    assert source.is_pinned()
    side = streams.side_stream(GPU)
    target = torch.zeros(1 << 20, device=GPU)
    streams.wait(side, streams.current(GPU))
    with streams.use(side):
        assert streams.current(GPU) == side
        target.copy_(source, non_blocking=True)
        done = streams.record(side)
    streams.wait(streams.current(GPU), done)
    assert torch.equal((target + 1).cpu(), source + 1)
    assert done.query()


def test_a_hidden_sync_raises_and_waiting_for_an_event_does_not():
    x = torch.ones(4, device=GPU)
    with streams.no_hidden_sync():
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
        streams.record(streams.current(GPU)).synchronize()
    assert x.sum().item() == 4


def test_a_graph_computes_anew_at_each_replay():
    x, counter = torch.zeros(4, device=GPU), torch.zeros((), device=GPU)
    pool = graphs.new_pool()

    def step() -> torch.Tensor:
        counter.add_(1)
        return x * 2 + 1

    first = graphs.capture(step, pool, device=GPU, warm_ups=2)
    second = graphs.capture(lambda: x - 1, pool)
    assert counter.item() == 2  # the warm-ups ran, the recording did not
    for value in (3.0, 5.0):
        x.fill_(value)
        first.replay()
        assert torch.equal(first.result, torch.full((4,), value * 2 + 1, device=GPU))
        second.replay()
        assert torch.equal(second.result, torch.full((4,), value - 1, device=GPU))
    assert counter.item() == 4


def test_a_failed_capture_leaves_the_process_usable():
    x = torch.ones(4, device=GPU)
    with pytest.raises(RuntimeError):
        graphs.capture(lambda: x.sum().item(), warm_ups=0)  # a wait for the GPU: CUDA refuses
    with pytest.raises(KeyError):
        graphs.capture(lambda: {}[x + 1], warm_ups=0)  # an error of the function's own
    ones = streams.pinned_empty((4,), torch.float32).fill_(1)
    assert torch.equal(ones.to(GPU) + torch.full((4,), 2.0, device=GPU), x * 3)
    captured = graphs.capture(lambda: x + 1)
    captured.replay()
    assert captured.result.tolist() == [2.0] * 4
    assert torch.rand(4, device=GPU).max() <= 1


@pytest.mark.parametrize("kernel", runtime.SDPA_KERNELS)
def test_sdpa_kernels_say_why_not(kernel):
    problem = runtime.sdpa_problem(kernel, GPU, torch.float64)
    assert (problem is None) == (kernel == "math")  # the only one with float64


def test_nothing_is_collected_during_a_recording():
    """A dead graph in a ring of references would go, and break the recording, at some allocation of Python's."""
    x, enabled = torch.zeros(8, device=GPU), []

    def step():
        enabled.append(gc.isenabled())
        return x + 1

    graph = graphs.capture(step, warm_ups=0)
    assert enabled == [False] and gc.isenabled()
    graph.replay()
    assert graph.result.tolist() == [1.0] * 8
