"""On the CPU, streams and events change nothing and are always past."""

import torch

from cuformers.cuda import streams


def test_code_written_for_streams_runs_on_the_cpu():
    side = streams.side_stream("cpu", urgent=True)
    target = torch.zeros(8)
    streams.wait(side, streams.current("cpu"))
    with streams.use(side), streams.no_hidden_sync():
        target.copy_(torch.arange(8.0), non_blocking=True)
        done = streams.record(side, streams.event("cpu"))
    streams.wait(streams.current("cpu"), done)
    streams.keep_until_done(target, side)
    assert done.query() and side.query()
    done.synchronize()
    side.synchronize()
    assert target.tolist() == list(range(8))


def test_pinned_memory_has_the_shape_and_dtype_asked_for():
    block = streams.pinned_empty((3, 4), torch.bfloat16)
    assert (block.shape, block.dtype, block.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert block.is_pinned() == torch.cuda.is_available()
