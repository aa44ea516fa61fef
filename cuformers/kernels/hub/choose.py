"""From a KernelConfig to the table of kernels of one model, device and mode."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.kernels.guard import guarded
from cuformers.kernels.hub import gate
from cuformers.kernels.hub.adapters import adapt, contract_problem, plain
from cuformers.kernels.hub.capturing import capture_problem
from cuformers.kernels.hub.compose import Parts, compose
from cuformers.kernels.hub.config import KernelConfig, Rules
from cuformers.kernels.hub.layers import LAYERS, Layer, Uses
from cuformers.kernels.hub.package import SWITCH, switched_on
from cuformers.kernels.hub.rules import ANY_MODE, Rule, find
from cuformers.kernels.hub.source import FAILURES, LayerSource, Source
from cuformers.kernels.op import Choice, Implementation, Problem
from cuformers.kernels.table import Kernels, select

NORMS = ("rms_norm", "add_rms_norm", "rms_norm_add")
OPS = {
    "norm": (NORMS, ("linear", "gated_linear", "rope_cache", "decode_attention")),
    "activation": (("gated_activation",), ("gated_linear",)),
    "gated": (("gated_activation",), ("gated_linear",)),
    "rotary": ((), ("rope_cache", "decode_attention")),
}
"""Kind of layer -> the ops that it computes, and those that leave it to do a part of theirs."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A layer of the config, and what serves it."""

    name: str
    layer: Layer
    kernel: str
    """Name for the list of kernels."""
    function: Callable[..., Any] | None
    """None where our own kernels keep the layer."""
    why: str
    """Why it was taken, or why not."""
    captures: bool = True
    """Whether a CUDA graph can hold it."""


def choose(config: KernelConfig, uses: Uses, problem: Problem, device: torch.device, want: str = "auto") -> Kernels:
    """The table `select(problem, want)` with the config's layers in it.

    The same arguments get the same object.

    Raises:
        ImportError: the package `kernels` is needed, and missing.
        ValueError: a layer that the model does not have, or a kernel that can't be loaded or fails the comparison with
            the specification; the message has the numbers.
    """
    if not switched_on():
        notice(f"{SWITCH} is off: kernel_config={config.kernel_mapping} has no effect.", once=True)
        return select(problem, want, deterministic=False)
    return _choose(config.rules, uses, problem, device, want)


@cache
def _choose(rules: Rules, uses: Uses, problem: Problem, device: torch.device, want: str) -> Kernels:
    base = select(problem, want, deterministic=False)
    taken = [_take(name, layer_rules, uses, problem, device) for name, layer_rules in rules]
    _check_once_each([t for t in taken if t.function is not None])
    parts = Parts(
        norm=_function(taken, "norm"),
        gated={t.layer.activation: t.function for t in taken if t.layer.kind in ("activation", "gated") and t.function},
        rotate=_function(taken, "rotary"),
    )
    functions = compose({choice.op: choice.function for choice in base.choices}, parts)
    choices = tuple(_choice(choice, functions, taken) for choice in base.choices)
    chosen = {choice.op: choice.function for choice in choices}
    return replace(base, **chosen, choices=choices)  # type: ignore[arg-type]


def _take(name: str, rules: tuple[Rule, ...], uses: Uses, problem: Problem, device: torch.device) -> Taken:
    layer = LAYERS[name]
    reason = uses.why_not(layer)
    if reason is not None:
        raise bad_argument("layer of kernel_config", name, "a layer that the model has", f"{reason.capitalize()}.")
    rule = find(rules, problem)
    if isinstance(rule, str):
        return _passed_over(name, layer, _describe(rules[0]), rule)
    if rule.source is None:
        why = f"{name}: switched off in kernel_config"
        return Taken(name=name, layer=layer, kernel="reference", function=plain(layer), why=why)
    return _load(name, layer, rule, uses, problem, device)


def _load(name: str, layer: Layer, rule: Rule, uses: Uses, problem: Problem, device: torch.device) -> Taken:
    assert rule.source is not None, "a rule that switches off loads nothing"
    kernel, training = _describe(rule), problem.mode == "train"
    cls = _class_of(rule.source)
    reason = contract_problem(cls, layer)
    if reason is None and problem.dtype not in gate.LIMIT:
        reason = f"can't be compared with the specification in {problem.dtype}"
    if reason is not None:
        raise ValueError(f"kernel {kernel} can't serve {name}: it {reason}.")
    missing = "has no backward pass" if training and not getattr(cls, "has_backward", True) else None
    function, worst = adapt(cls, layer, problem.mode), 0.0
    try:
        if missing is None:
            where = {"device": device, "dtype": problem.dtype, "mode": problem.mode}
            worst = gate.check(function, plain(layer), layer, uses, **where)
    except gate.BackwardMissing as problem_found:
        missing = str(problem_found)
    except ValueError as problem_found:
        remedy = "It is not used; take it out of kernel_config, or name another version."
        raise ValueError(f"kernel {kernel} for {name} {problem_found}. {remedy}") from problem_found
    if missing is not None:
        if rule.mode != ANY_MODE:
            raise ValueError(f"kernel {kernel} is mapped for {rule.mode} of {name}, and {missing}.")
        return _passed_over(name, layer, kernel, missing)
    stops = capture_problem(function, layer, uses, device, problem.dtype)
    why = f"{name}: kernel_config; {uses.count(layer)} modules; error {worst:.0%} of the allowed"
    notice(f"{name} of {uses.count(layer)} modules is computed by {kernel}{f' ({stops})' if stops else ''}.", once=True)
    safe = function if training else guarded(function, plain(layer))
    return Taken(name=name, layer=layer, kernel=kernel, function=safe, why=why, captures=stops is None)


def _class_of(source: LayerSource) -> type[nn.Module]:
    if isinstance(source, Source):
        return source.load()
    try:
        return source.load()
    except FAILURES as problem:
        raise ValueError(f"hub kernel {source.layer_name} can't be loaded: {problem}") from problem


def _passed_over(name: str, layer: Layer, kernel: str, why: str) -> Taken:
    notice(f"{name} keeps our own kernels: {kernel} {why}.", once=True)
    return Taken(name=name, layer=layer, kernel=kernel, function=None, why=why)


def _describe(rule: Rule) -> str:
    source = rule.source
    if source is None or isinstance(source, Source):
        return str(source)
    return f"{type(source).__name__}:{source.layer_name}"  # its own text asks the network


def _function(taken: list[Taken], kind: str) -> Callable[..., Any] | None:
    return next((t.function for t in taken if t.layer.kind == kind), None)


def _check_once_each(taken: list[Taken]) -> None:
    """Two layers of the config must not compute the same thing."""
    seen: dict[str, str] = {}
    for t in taken:
        what = t.layer.activation or t.layer.kind
        if what in seen:
            raise bad_argument("kernel_config", [seen[what], t.name], f"one layer for {what}")
        seen[what] = t.name


def _choice(choice: Choice, functions: dict[str, Callable], taken: list[Taken]) -> Choice:
    """An op's choice with what the layers changed of it."""
    for t in taken:
        whole, part = OPS[t.layer.kind]
        if choice.op not in (*whole, *part):
            continue
        if t.function is None:
            choice = replace(choice, refused={**choice.refused, t.kernel: t.why})
            continue
        function = functions.get(choice.op, choice.function)
        if choice.op in part:
            choice = _without(choice, t, function)
            continue
        own = choice.implementation.name
        made = Implementation(
            name=t.kernel, load=partial(_same, function), modes=frozenset({choice.mode}), captures=t.captures
        )
        refused = {**choice.refused, own: f"kernel_config names another for {t.name}"}
        choice = replace(choice, implementation=made, refused=refused, function=function, why=t.why)
    return choice


def _without(choice: Choice, taken: Taken, function: Callable) -> Choice:
    """The choice of an op that leaves a part of its work to a layer."""
    why = f"{taken.name} is taken out of it: {taken.kernel}"
    implementation = choice.implementation
    if not taken.captures:
        implementation = replace(implementation, captures=False)
    why = f"{choice.why}; {why}" if choice.why else why
    return replace(choice, implementation=implementation, function=function, why=why)


def _same(function: Callable) -> Callable:
    return function
