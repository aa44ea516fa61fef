"""The manager's thread on a GPU: captured steps, the tokens of generate, and the memory back in the end."""

import gc

import pytest
import torch
from models.checkpoints import load, tokens

from cuformers.auto.batching.output import RequestStatus
from cuformers.generation.batching_config import ContinuousBatchingConfig

pytestmark = pytest.mark.gpu
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CONFIG = ContinuousBatchingConfig(max_requests_per_batch=16, num_blocks=64, max_batch_tokens=256)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_requests_in_captured_steps(name: str, dtype: str) -> None:
    model = load(name, device_map="cuda", dtype=dtype)
    prompts = [tokens(1, 3 + 7 * i % 50, seed=i)[0].tolist() for i in range(60)]
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        greedy = manager.add_requests(prompts, max_new_tokens=20, **GREEDY)
        sampled = [manager.add_request(p, max_new_tokens=20, do_sample=True, seed=3) for p in prompts[:20]]
        gone = manager.add_request(prompts[0], max_new_tokens=2000, **GREEDY)
        manager.cancel_request(gone)
        got = {n: manager.get_result(n) for n in (*greedy, *sampled, gone)}
    assert got[gone].status is RequestStatus.CANCELLED
    assert all(got[n].status is RequestStatus.FINISHED for n in (*greedy, *sampled))
    if dtype == "float32":
        for prompt, n in zip(prompts, greedy):
            ids = torch.tensor([prompt], device="cuda")
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, **GREEDY)
            assert got[n].generated_tokens == alone[0, len(prompt) :].tolist()


def test_the_memory_comes_back() -> None:
    model = load("llama", device_map="cuda")
    config = ContinuousBatchingConfig(max_requests_per_batch=16, max_memory_percent=0.5)
    used = []
    for _ in range(3):
        model.generate_batch([[5, 6, 7]] * 20, None, config, max_new_tokens=8, **GREEDY)
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[0] + (1 << 20)


def test_a_fault_on_the_device_ends_in_failures_only() -> None:
    model = load("llama", device_map="cuda")
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        step = manager._worker.engine.step
        manager._worker.engine.step = lambda: (_ for _ in ()).throw(RuntimeError("broken"))
        bad = manager.get_result(manager.add_request([5, 6], max_new_tokens=8))
        manager._worker.engine.step = step
        good = manager.get_result(manager.add_request([5, 6], max_new_tokens=8, **GREEDY))
    assert bad.status is RequestStatus.FAILED and "broken" in bad.error
    assert good.status is RequestStatus.FINISHED and len(good.generated_tokens) == 8


@pytest.mark.parametrize("weights", [False, True])
def test_a_sleeper_holds_no_memory(weights: bool) -> None:
    model = load("llama", device_map="cuda")
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, **GREEDY)[0, 3:].tolist()
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        manager.get_result(manager.add_request([5, 6, 7], max_new_tokens=8, **GREEDY))
    # A thread's first products took a workspace of cuBLAS's, which stays for the next thread.
    model._forget("engine")  # and with it the cache of generate
    gc.collect()
    torch.cuda.empty_cache()
    before, footprint = torch.cuda.memory_allocated(), model.get_memory_footprint()
    reserved = torch.cuda.memory_reserved()
    options = {**GREEDY, "eos_token_id": -1, "max_new_tokens": 200, "streaming": True}
    with model.continuous_batching_context_manager(continuous_batching_config=CONFIG) as manager:
        name = manager.add_request([5, 6, 7], **options)
        for count in (5, 50):
            while len(manager.get_result(name).generated_tokens) < count:
                pass
            held = manager._worker.engine.engine.runner.cache_bytes
            awake = torch.cuda.memory_allocated()
            manager.sleep(weights=weights)
            assert torch.cuda.memory_allocated() <= awake - held - weights * footprint
            assert torch.cuda.memory_allocated() <= before + (1 << 20) - weights * footprint
            assert torch.cuda.memory_reserved() <= reserved + (64 << 20)  # cuBLAS keeps a workspace for each stream
            assert model.device.type == ("cpu" if weights else "cuda")
            manager.wake()
            assert model.device.type == "cuda"
        got = list(manager.request_id_iter(name))[-1].generated_tokens
    assert got == want
