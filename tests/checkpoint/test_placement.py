"""device_map and max_memory: checked against an exhaustive search, and for every kind of word and mistake."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuformers.base.errors import OutOfDeviceMemory
from cuformers.checkpoint.needs import Needs, needed_bytes
from cuformers.checkpoint.partition import balance, balance_low_first, fill
from cuformers.checkpoint.placement import STRATEGIES, resolve_placement

CPU, GPU0, GPU1, GPU2 = torch.device("cpu"), *(torch.device("cuda", i) for i in range(3))
GIB = 1 << 30


def model(layers=4, layer=10, embed=5, head=5, **kwargs):
    units = {"model.embed_tokens": embed, **{f"model.layers.{i}": layer for i in range(layers)}}
    return Needs(units={**units, "model.norm": 1, "lm_head": head}, **kwargs)


def all_cuts(loads, num_bins):
    """Every way to put the loads into bins in order: lists of bin numbers that never fall."""
    return itertools.combinations_with_replacement(range(num_bins), len(loads))


def sums(loads, bins, num_bins):
    return [sum(load for load, b in zip(loads, bins) if b == i) for i in range(num_bins)]


LOADS = st.lists(st.integers(0, 12), min_size=1, max_size=6)
CAPACITIES = st.lists(st.integers(0, 25), min_size=1, max_size=3)


@given(LOADS, CAPACITIES)
def test_cuts_are_the_best_there_are(loads, capacities):
    n = len(capacities)
    fitting = [
        s for s in (sums(loads, cut, n) for cut in all_cuts(loads, n)) if all(u <= c for u, c in zip(s, capacities))
    ]
    results = [cut(loads, capacities) for cut in (fill, balance, balance_low_first)]
    if not fitting:
        assert results == [None, None, None]
        return
    for bins in results:
        assert bins is not None and list(bins) == sorted(bins)
        assert all(used <= room for used, room in zip(sums(loads, bins, n), capacities))
    _, even, low = (sums(loads, bins, n) for bins in results)
    assert max(even) == min(map(max, fitting))
    assert low[0] == min(s[0] for s in fitting)
    if n > 1:
        assert max(low[1:]) == min(max(s[1:]) for s in fitting if s[0] == low[0])


@given(
    layers=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    ends=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    free=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    host=st.none() | st.integers(0, 80),
    cache=st.integers(1, 4),  # of a layer: there is always some
    reserve=st.integers(0, 6),
    tied=st.booleans(),
    strategy=st.sampled_from(list(STRATEGIES)),
)
def test_strategies_fit_keep_layers_whole_and_offload_as_little_as_possible(
    layers, ends, free, host, cache, reserve, tied, strategy
):
    units = {"embed": ends[0], **{f"layers.{i}": size for i, size in enumerate(layers)}, "head": ends[1]}
    needs = Needs(units=units, cache_per_layer=cache, reserve=reserve, tied=(("embed", "head"),) if tied else ())
    devices = {torch.device("cuda", i): room for i, room in enumerate(free)} | ({CPU: host} if host is not None else {})

    def fits(count):
        """By trying all cuts: with the last `count` layers on the CPU."""
        off = layers[len(layers) - count :]
        if count and (host is None or sum(off) > host):
            return False
        loads = [ends[0] + (ends[1] if tied else 0)]
        loads += [(0 if i >= len(layers) - count else size) + cache for i, size in enumerate(layers)]
        loads += [] if tied else [ends[1]]
        rooms = [max(0, room - reserve - 2 * max(off, default=0)) for room in free]
        cuts = all_cuts(loads, len(free))
        return any(all(u <= r for u, r in zip(sums(loads, cut, len(free)), rooms)) for cut in cuts)

    possible = [count for count in range(len(layers) + 1) if fits(count)]
    try:
        placement = resolve_placement(needs, strategy, devices)
    except OutOfDeviceMemory as error:
        assert not possible
        assert all(f"available {room} B ({room} bytes)" in str(error) for room in devices.values())
        assert str(error).count("needed") == len(devices)
        return
    assert possible and list(placement.units) == list(units)
    assert placement.offloaded == tuple(f"layers.{i}" for i in range(len(layers) - possible[0], len(layers)))
    assert all(device == CPU for name, device in placement.units.items() if name in placement.offloaded)
    assert all(device.type == "cuda" for device in placement.runs_on.values())
    assert bool(placement.notes) == bool(possible[0])
    needed = needed_bytes(needs, placement)
    busy = {d for name, d in placement.runs_on.items() if units[name] + (cache if "." in name else 0)}
    assert all(needed[device] <= devices[device] for device in busy)
    assert not tied or placement.units["embed"] == placement.units["head"]


def where(placement):
    return [str(device) for device in placement.units.values()]


ROOMY = {GPU0: 1000, GPU1: 1000, CPU: 1000}


@pytest.mark.parametrize(
    ("spec", "device"),
    [("cuda", GPU0), ("cuda:1", GPU1), (1, GPU1), (0, GPU0), ("cpu", CPU), (GPU1, GPU1), (torch.device("cpu", 0), CPU)],
)
def test_one_device(spec, device):
    placement = resolve_placement(model(), spec, ROOMY)
    assert set(placement.units.values()) == set(placement.runs_on.values()) == {device}
    assert placement.notes == () and placement.device_of("model.layers.3.mlp.up_proj.weight") == device


def test_cuda_is_this_processs_gpu():
    assert set(resolve_placement(model(), "cuda", ROOMY, this_gpu=GPU1).units.values()) == {GPU1}


@pytest.mark.parametrize(
    "spec", ["cuda:7", 7, "tpu", "", "balance", -1, True, 1.5, None, "meta", "mps", "disk", {"": "disk"}, {}]
)
def test_what_is_no_device(spec):
    with pytest.raises(ValueError, match="device_map"):
        resolve_placement(model(), spec, ROOMY)


def test_no_gpu():
    for spec in ("auto", "cpu", {"": "cpu"}):
        assert set(resolve_placement(model(), spec, {CPU: 100}).units.values()) == {CPU}
    with pytest.raises(ValueError, match=r"one of \['cpu'\]"):
        resolve_placement(model(), "cuda", {CPU: 100})
    with pytest.raises(OutOfDeviceMemory, match=r"cpu: needed 51 B \(51 bytes\), available 50 B"):
        resolve_placement(model(), "auto", {CPU: 50})


def test_longest_name_decides():
    device_map = {"": "cpu", "model": 0, "model.layers.1": 1, "model.layers.3": "cuda:1", "lm_head": GPU1}
    placement = resolve_placement(model(layers=12), device_map, ROOMY)
    expected = dict.fromkeys(placement.units, GPU0)
    expected |= {"model.layers.1": GPU1, "model.layers.3": GPU1, "lm_head": GPU1}
    assert placement.units == expected  # model.layers.10 and .11 do not follow model.layers.1
    assert placement.device_of("model.layers.1.q.weight") == GPU1
    assert placement.device_of("model.layers.11.q.weight") == GPU0
    assert placement.hf_device_map["lm_head"] == 1 and placement.hf_device_map["model.norm"] == 0


def test_names_with_cpu_beside_gpus_are_streamed():
    placement = resolve_placement(
        model(), {"": 0, "model.layers.2": "cpu", "model.layers.3": 1, "lm_head": "cpu"}, ROOMY
    )
    assert placement.offloaded == ("model.layers.2", "lm_head")
    assert (placement.runs_on["model.layers.2"], placement.runs_on["lm_head"]) == (GPU0, GPU0)
    assert "2 of 7 parts" in placement.notes[0] and "times slower" in placement.notes[0]
    assert placement.hf_device_map["model.layers.2"] == "cpu"


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"": 0, "model.layer.1": 1}, "'model.layer.1'"),
        ({"": 0, "transformer": 1}, "names of modules: 'model.embed_tokens'"),
        ({"": 0, "model.layers.1.mlp": 1}, "never split"),
        ({"model": 0}, "leaves out 'lm_head'"),
        ({"model.layers": 0, "lm_head": 0}, "leaves out 'model.embed_tokens', 'model.norm'"),
        ({"": 0, "lm_head": 1}, "belong together"),
        ({"": 0, "lm_head": 5}, r"one of \['cuda:0', 'cuda:1', 'cpu'\]"),
    ],
)
def test_wrong_names(device_map, message):
    with pytest.raises(ValueError, match=message):
        resolve_placement(model(tied=(("model.embed_tokens", "lm_head"),)), device_map, ROOMY)


def test_what_does_not_fit_says_needed_and_available_of_each():
    needs = model(layer=GIB, cache_per_layer=GIB // 4, reserve=GIB // 2)
    with pytest.raises(OutOfDeviceMemory) as caught:
        resolve_placement(needs, 0, {GPU0: 5 * GIB, CPU: 9 * GIB})
    assert f"cuda:0: needed 5.5 GiB ({5 * GIB + GIB // 2 + 11} bytes), available 5.0 GiB ({5 * GIB} bytes)" in str(
        caught.value
    )
    assert "cpu: needed 0 B" in str(caught.value) and "device_map='auto'" in str(caught.value)
    with pytest.raises(
        OutOfDeviceMemory, match=r"every layer on the CPU, the CPU would need 4\.0 GiB and the GPUs still 3\.5"
    ):
        resolve_placement(needs, "auto", {GPU0: 3 * GIB, CPU: 9 * GIB})
    with pytest.raises(OutOfDeviceMemory, match="letting max_memory include 'cpu'"):
        resolve_placement(needs, "auto", {GPU0: 5 * GIB, CPU: 9 * GIB}, max_memory={0: "5GiB"})


def test_one_gpu_fits_or_offloads_the_last_layers():
    needs = model(layers=10, layer=100, cache_per_layer=3, reserve=50)
    total = 1000 + 11 + 30 + 50
    assert set(where(resolve_placement(needs, "auto", {GPU0: total, CPU: 0}))) == {"cuda:0"}
    placement = resolve_placement(needs, "auto", {GPU0: total - 1, CPU: 10_000})
    assert placement.offloaded == (
        "model.layers.7",
        "model.layers.8",
        "model.layers.9",
    )  # one for its need, two for buffers
    factor = 1 + 300 / 1011 * (4.3e12 / 55e9 - 1)
    assert f"about {factor:.2g} times slower" in placement.notes[0]
    with pytest.raises(OutOfDeviceMemory):
        resolve_placement(needs, "auto", {GPU0: total - 1, CPU: 299})


def test_several_gpus():
    needs = model(layers=6, layer=10, embed=5, head=4)
    free = {GPU0: 100, GPU1: 100, GPU2: 100, CPU: 0}
    assert where(resolve_placement(needs, "auto", free)) == ["cuda:0"] * 3 + ["cuda:1"] * 2 + ["cuda:2"] * 4
    assert set(where(resolve_placement(needs, "balanced_low_0", free))) == {"cuda:1", "cuda:2"}
    assert set(where(resolve_placement(needs, "sequential", free))) == {"cuda:0"}
    with_cache = model(layers=6, layer=10, embed=60, head=0, cache_per_layer=10)
    assert where(resolve_placement(with_cache, "auto", {GPU0: 100, GPU1: 100})) == ["cuda:0"] * 3 + ["cuda:1"] * 6


def test_max_memory():
    needs = model()
    free = {GPU0: 100, GPU1: 100, CPU: 100}
    assert set(where(resolve_placement(needs, "auto", free, max_memory={1: 60}))) == {"cuda:1"}
    assert set(where(resolve_placement(needs, "auto", free, max_memory={"cuda:0": "0.1KB", GPU1: "9GiB"}))) == {
        "cuda:0",
        "cuda:1",
    }
    assert set(where(resolve_placement(needs, "auto", free, max_memory={"cpu": "1GB"}))) == {"cpu"}
    with pytest.raises(OutOfDeviceMemory, match="available 20 B"):
        resolve_placement(needs, 0, free, max_memory={0: 20})
    for wrong in ({5: "1GB"}, {0: "lots"}, {"disk": "9GB"}, {0: -1}, {}):
        with pytest.raises(ValueError, match="max_memory"):
            resolve_placement(needs, "auto", free, max_memory=wrong)


def test_every_parameter_finds_its_unit():
    placement = resolve_placement(model(), {"": 0, "model.layers.3": 1}, ROOMY)
    for name in ("model.layers.3", "model.layers.3.a", "model.layers.3.a.b.weight"):
        assert placement.device_of(name) == GPU1
    for name in ("model.layers.0.a", "model.norm.weight", "lm_head"):
        assert placement.device_of(name) == GPU0
    for name in ("model.layers.33.weight", "model.layers", "other", ""):
        with pytest.raises(AssertionError, match="no unit"):
            placement.device_of(name)
    assert resolve_placement(Needs(units={"": 5}), 1, ROOMY).device_of("any.thing") == GPU1
