"""FlashAttention's packages and hub kernels: found, adapted, tried and refused. The packages are stand-ins."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuformers.nn.attention import flash, hub, varlen
from cuformers.nn.attention.backend import AttentionSpec
from cuformers.nn.attention.choose import choose_backend
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.flash import FA2, FA3, FA4, FlashAttention, Generation
from cuformers.nn.step import full_step
from tests.nn.attention_matrix import RAGGED, Shape, inputs, results

CPU = torch.device("cpu")
PLAIN = Shape((5, 2), head_dim=16)


def problem(shape: Shape = PLAIN, dtype: torch.dtype = torch.bfloat16, train: bool = False) -> Any:
    return shape.problem(dtype, CPU, train)


def computed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float, **layer: Any) -> Tensor:
    """What all stand-ins compute."""
    sinks = layer.pop("sinks", None)
    spec = AttentionSpec(
        layer=0, num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2], scale=scale,
        sinks=sinks is not None, **layer,
    )  # fmt: skip
    lengths = tuple(cu.diff().tolist())
    return EagerAttention().forward(q, k, v, spec, full_step(torch.arange(len(q)), lengths, EagerAttention()), sinks)


def version_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
):  # fmt: skip
    """As flash_attn 2.8 has it."""
    assert causal and dropout_p == 0.0 and window_size[1] in (-1, 0) and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    window = None if window_size[0] < 0 else window_size[0] + 1
    return computed(q, k, v, cu_seqlens_q, softmax_scale, window=window, softcap=softcap or None)


def version_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, s_aux=None,
):  # fmt: skip
    """As the hub's build of version 3 has it: sinks, and a tuple."""
    assert causal
    window = None if window_size[0] < 0 else window_size[0] + 1
    out = computed(q, k, v, cu_seqlens_q, softmax_scale, window=window, softcap=softcap or None, sinks=s_aux)
    return out, None


def version_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
):  # fmt: skip
    """As flash_attn.cute 4.0 has it: a window of -1 is no window there but an empty one."""
    assert causal and qv is None and (window_size[0] is None or window_size[0] >= 0)
    window = None if window_size[0] is None else window_size[0] + 1
    out = computed(q, k, v, cu_seqlens_q, softmax_scale, window=window, softcap=softcap or None, sinks=learnable_sink)
    return out, None


VERSIONS = {
    "flash_attention_2": (FA2, version_2),
    "flash_attention_3": (FA3, version_3),
    "flash_attention_4": (FA4, version_4),
}


@pytest.fixture(autouse=True)
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends take this machine for one with a GPU of capability 9.0; no package is there."""
    monkeypatch.setattr(flash, "capability", lambda device: (9, 0))
    for generation in (FA2, FA3, FA4):
        monkeypatch.setitem(sys.modules, generation.module, None)
    monkeypatch.setitem(sys.modules, "kernels", None)
    flash.trial.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, generation: Generation, function: Callable[..., Any]) -> None:
    module = ModuleType(generation.module)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    if "." in generation.module:
        monkeypatch.setitem(sys.modules, generation.module.split(".")[0], ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, generation.module, module)


SHAPES = (Shape(RAGGED), Shape((9, 9)), Shape(RAGGED, window=7), Shape(RAGGED, softcap=2.0, window=30))
SINKS = (Shape(RAGGED, sinks=True), Shape((9, 9), sinks=True, window=4, softcap=3.0))


@pytest.mark.parametrize("name, shape", [
    *((name, shape) for name in VERSIONS for shape in SHAPES),
    *((name, shape) for name in ("flash_attention_3", "flash_attention_4") for shape in SINKS),
], ids=str)  # fmt: skip
def test_each_version_is_called_as_it_wants(name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    generation, function = VERSIONS[name]
    install(monkeypatch, generation, function)
    backend = choose_backend(name, problem(shape, train=True))
    assert backend.name == name
    x = inputs(shape, torch.bfloat16).to(torch.float64, CPU)
    expected, found = (results(b, shape, x, train=True) for b in (EagerAttention(), backend))
    for what, tensor in found.items():
        assert torch.equal(tensor, expected[what]), what


def test_version_2_without_its_package_is_pytorchs() -> None:
    backend = FlashAttention(FA2)
    assert backend.why_not(problem()) is None and backend._found is varlen.BUILT_IN
    reason = backend.why_not(problem(Shape((3,), softcap=1.0))) or ""
    assert "no softcap in PyTorch's built-in copy" in reason and "pip install flash-attn" in reason


@pytest.mark.parametrize("generation", [FA3, FA4], ids=lambda g: g.name)
def test_a_missing_package_is_an_error_with_the_remedy(generation: Generation) -> None:
    with pytest.raises(ValueError) as caught:
        choose_backend(generation.name, problem())
    says = str(caught.value)
    assert f"the package {generation.module} does not import" in says and generation.pip in says
    assert "cuformers[kernels]" in says and "Possible here: [" in says and "'sdpa'" in says


class Raises:
    """A finder of modules in whose import something breaks."""

    def __init__(self, name: str, failure: Exception) -> None:
        self.name, self.failure = name, failure

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            raise self.failure


@pytest.mark.parametrize("failure", [
    ImportError("undefined symbol: _ZN3c105Error"), OSError("libcudart.so.11"), RuntimeError("no driver"),
    AssertionError("flash attention wants 2.3"),
], ids=lambda f: type(f).__name__)  # fmt: skip
def test_a_package_that_breaks_on_import_is_found_at_load(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, FA3.module)
    monkeypatch.setattr(sys, "meta_path", [Raises(FA3.module, failure), *sys.meta_path])
    with pytest.raises(ValueError, match=f"flash_attn_interface does not import .{failure}"):
        choose_backend("flash_attention_3", problem())


def no_image(*args: Any, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
             window_size=(-1, -1)):  # fmt: skip
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")


def zeros(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size=(-1, -1)):
    return q * 0


def one_way(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size=(-1, -1)):  # fmt: skip
    return torch.ones_like(q)


@pytest.mark.parametrize("function, train, says", [
    (no_image, False, "RuntimeError: CUDA error: no kernel image is available for execution on the device[)]"),
    (zeros, False, "computes wrong values on this machine"),
    (one_way, True, "does not require grad"),
], ids=["no image", "wrong", "no backward"])  # fmt: skip
def test_a_kernel_that_fails_is_found_at_load(
    function: Callable[..., Any], train: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FA2, function)
    with pytest.raises(ValueError, match=says):
        choose_backend("flash_attention_2", problem(train=train))
    if train:
        assert choose_backend("flash_attention_2", problem(train=False)).name == "flash_attention_2"


def test_a_kernel_whose_sinks_learn_nothing_is_found_when_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                window_size=(-1, -1), s_aux=None):  # fmt: skip
        detached = None if s_aux is None else s_aux.detach()
        return computed(q, k, v, cu_seqlens_q, softmax_scale, sinks=detached)

    install(monkeypatch, FA3, without)
    assert choose_backend("flash_attention_3", problem(SINKS[0])).name == "flash_attention_3"
    with pytest.raises(ValueError, match=r"fails on this machine .*not have been used in the graph"):
        choose_backend("flash_attention_3", problem(SINKS[0], train=True))


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FA3, lambda q, k, v, lengths: q)
    with pytest.raises(ValueError, match=r"not those of flash_attn_varlen_func: .*'cu_seqlens_q'.*Possible here"):
        choose_backend("flash_attention_3", problem())


LIMITS = [
    (FA2, (7, 5), torch.float16, 64, "capability 8.0"),
    (FA2, (8, 0), torch.float32, 64, "bfloat16 and float16, not torch.float32"),
    (FA2, (8, 0), torch.float16, 260, "up to 256, not 260"),
    (FA2, (8, 0), torch.float16, 100, "multiple of 8, up to 256, not 100"),
    (FA3, (10, 0), torch.float16, 64, "no kernels for compute capability 10.0"),
    (FA4, (8, 9), torch.float16, 64, "capability 9.0"),
    (FA4, (10, 0), torch.float16, 192, "up to 128, not 192"),
    (FA2, None, torch.float16, 64, "needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("generation, on, dtype, head_dim, says", LIMITS)
def test_limits(generation, on, dtype, head_dim, says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "capability", lambda device: on)
    install(monkeypatch, generation, VERSIONS[generation.name][1])
    asked = problem(Shape((3,), head_dim=head_dim), dtype)
    assert says in (FlashAttention(generation).why_not(asked) or "")


def hub_of(monkeypatch: pytest.MonkeyPatch, get: Callable[..., Any]) -> list[tuple[str, dict]]:
    """A stand-in for the package `kernels`; the calls that it gets."""
    calls: list[tuple[str, dict]] = []
    module = ModuleType("kernels")
    module.__version__ = "0.17.2"  # type: ignore[attr-defined]

    def get_kernel(repo: str, **options: Any) -> Any:
        calls.append((repo, options))
        return get(repo)

    module.get_kernel = get_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", module)
    return calls


def test_a_missing_package_comes_from_the_hub_where_kernels_imports(monkeypatch, capsys) -> None:
    calls = hub_of(monkeypatch, lambda repo: SimpleNamespace(flash_attn_varlen_func=version_3))
    backend = choose_backend("flash_attention_3", problem(SINKS[0]))
    assert backend.name == "flash_attention_3" and backend.why_not(problem(SINKS[0])) is None
    assert calls == [("kernels-community/vllm-flash-attn3", {"version": 1, "trust_remote_code": False})]
    assert "from kernels-community/vllm-flash-attn3, because the package" in capsys.readouterr().err


def test_nothing_is_fetched_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub_of(monkeypatch, lambda repo: SimpleNamespace(flash_attn_varlen_func=version_3))
    choose_backend(None, problem())
    choose_backend("flash_attention_2", problem())
    with pytest.raises(ValueError, match="Possible here"):
        choose_backend("sdpa", problem(SINKS[0]))
    monkeypatch.setattr(flash, "capability", lambda device: None)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        choose_backend("flash_attention_3", problem())
    assert calls == []


@pytest.mark.parametrize("failure", [
    FileNotFoundError("no build for torch 2.14"), ValueError("not from a trusted publisher"), OSError("offline"),
], ids=lambda f: type(f).__name__)  # fmt: skip
@pytest.mark.parametrize("name", ["flash_attention_3", "kernels-community/flash-attn2"])
def test_a_hub_kernel_that_can_not_be_had_is_one_clear_error(name: str, failure: Exception, monkeypatch) -> None:
    def get(repo: str) -> None:
        raise failure

    hub_of(monkeypatch, get)
    with pytest.raises(ValueError, match=f"can't be had: {type(failure).__name__}: {failure}.*Possible here"):
        choose_backend(name, problem())


REFERENCES = {
    "kernels-community/flash-attn2": (("kernels-community/flash-attn2", None, None), {"version": 3}),
    "kernels-community/flash-attn2@v9": (("kernels-community/flash-attn2", "v9", None), {"revision": "v9"}),
    "me/mine@main:attend": (("me/mine", "main", "attend"), {"revision": "main"}),
    "me/mine:attend": (("me/mine", None, "attend"), {"version": 1}),
}


@pytest.mark.parametrize("paged", ["", "paged|"])
@pytest.mark.parametrize("name", REFERENCES)
def test_hub_references(name: str, paged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, which = REFERENCES[name]
    assert hub.parse(name) == hub.HubReference(*parts)
    calls = hub_of(monkeypatch, lambda repo: SimpleNamespace(flash_attn_varlen_func=version_2, attend=version_4))
    backend = choose_backend(paged + name, problem(), allow_all_kernels=name.startswith("me/"))
    assert backend.name == name and not backend.can_capture(problem())
    assert calls == [(parts[0], {**which, "trust_remote_code": name.startswith("me/")})]
    x = inputs(SHAPES[2], torch.bfloat16).to(torch.float64, CPU)
    found, expected = (results(b, SHAPES[2], x, train=True) for b in (backend, EagerAttention()))
    assert all(torch.equal(found[what], expected[what]) for what in expected)
    needs_sinks = backend.why_not(problem(SINKS[0]))
    assert (needs_sinks is None) == (":" in name), "the signature tells whether it has sinks"


def test_offline_nobody_vouches_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    calls = hub_of(monkeypatch, lambda repo: SimpleNamespace(flash_attn_varlen_func=version_2))
    with pytest.raises(ValueError, match=r"me/mine.*offline.*allow_all_kernels=True"):
        choose_backend("me/mine", problem())
    assert calls == []
    assert choose_backend("me/mine", problem(), allow_all_kernels=True).name == "me/mine"
    assert choose_backend("kernels-community/flash-attn2", problem()).name == "kernels-community/flash-attn2"


def test_the_switch_of_hub_kernels_holds_for_attention_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    calls = hub_of(monkeypatch, lambda repo: SimpleNamespace(flash_attn_varlen_func=version_3))
    for name in ("kernels-community/flash-attn2", "flash_attention_3"):
        with pytest.raises(ValueError, match="is not possible here"):
            choose_backend(name, problem())
    assert calls == []


def test_a_hub_function_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(monkeypatch, lambda repo: SimpleNamespace(attend=version_2))
    with pytest.raises(ValueError, match=r"me/mine has no function 'flash_attn_varlen_func'; it has \['attend'\]"):
        choose_backend("me/mine", problem())


def test_a_hub_function_with_transformers_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=module.is_causal, enable_gqa=module.num_key_value_groups > 1
        )
        return out.transpose(1, 2), None

    hub_of(monkeypatch, lambda repo: SimpleNamespace(attend=attend))
    backend = choose_backend("me/mine:attend", problem())
    x = inputs(PLAIN, torch.bfloat16).to(torch.float64, CPU)
    found, expected = (results(b, PLAIN, x, train=True) for b in (backend, EagerAttention()))
    for what in expected:
        torch.testing.assert_close(found[what], expected[what], rtol=1e-6, atol=1e-7)


def test_without_kernels_a_reference_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"need the package kernels .*'cuformers\[kernels\]'.*Possible here"):
        choose_backend("kernels-community/flash-attn2", problem())


@pytest.mark.parametrize("name", ["a/b/c", "/b", "a/", "a/b@", "a/b:", "a b/c", "flash_attention_9", "http://a/b"])
def test_what_is_no_reference(name: str) -> None:
    assert hub.parse(name) is None
    with pytest.raises(ValueError, match="is unknown: allowed is one of"):
        choose_backend(name, problem())
