"""From a plan to a step on the device: what the table must learn first, the step, and who its rows belong to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cuformers.cuda import streams
from cuformers.engine.logprobs import PromptTargets, Stretch, prompt_targets, top_size
from cuformers.engine.mail import Owner
from cuformers.engine.plan import StepPlan
from cuformers.engine.planner import Planner
from cuformers.engine.request import Drafts, Request
from cuformers.engine.runner import Mode, Output, Runner
from cuformers.engine.state import write_tables
from cuformers.engine.step_size import ROW_SIZES


class Launched(NamedTuple):
    """A step on its way."""

    output: Output
    owners: list[Owner]
    """Of the rows that matter."""
    stretches: tuple[Stretch, ...]
    """Of prompts that the step tells of."""


def launch(runner: Runner, planner: Planner, plan: StepPlan, drafts: Drafts | None) -> Launched:
    """Starts the step of a plan that has just been made.

    Args:
        runner: computes it.
        planner: made the plan; it may move rows together first.
        plan: not one that waits.
        drafts: how tokens are guessed where the step allows it.
    """
    table, device = runner.table, runner.device
    if runner.host is not None:
        runner.host.save(plan.saves)
        runner.host.restore(plan.restores)
    if plan.idle:
        table.decode.idle(streams.upload(plan.idle, torch.int64, device))
    if plan.admitted:
        runner.admit(plan.admitted)
    write_tables(table.decode.block_tables, plan.tables)
    count = _compacted(runner, planner, plan)
    targets = prompt_targets(plan.chunks, device)
    output, owners = _step(runner, plan, count, targets, drafts, 1 + planner.drafts)
    return Launched(output, owners, targets.stretches if targets is not None else ())


def _compacted(runner: Runner, planner: Planner, plan: StepPlan) -> int:
    """Rows that the step must compute. Where that is many more than decode, the last ones move to free rows."""
    if not plan.decodes:
        return 0
    count = plan.decodes[-1].row + 1
    fits = next((size for size in ROW_SIZES if size >= planner.num_running), count)
    if count <= fits or not planner.can_compact(fits):
        return count
    moves = planner.compact(fits)
    source, target = (streams.upload(rows, torch.int64, runner.device) for rows in zip(*moves))
    runner.move(source, target)
    return max(request.row for request in plan.decodes) + 1


def _step(
    runner: Runner,
    plan: StepPlan,
    count: int,
    targets: PromptTargets | None,
    drafts: Drafts | None,
    counted: int,
) -> tuple[Output, list[Owner]]:
    requests = [chunk.request for chunk in plan.chunks if chunk.final] + list(plan.decodes)
    mode = _mode(requests)
    if all(r.group is None or r.group.plain for r in requests):
        if drafts is not None and not (plan.chunks or mode.penalties) and mode.logprobs is None:
            mode = replace(mode, drafts=drafts)
        output = runner.step(plan.chunks, count, mode, targets)
        return output, _owners(plan, output, counted)
    output = runner.step(plan.chunks, count, Mode(sample=False), targets)
    owners = _owners(plan, output, counted)
    return runner.finish(output, mode, _processed(runner, output, mode, owners)), owners


def _mode(requests: Sequence[Request]) -> Mode:
    """How a step samples for these requests."""
    greedy = all(r.sampling.temperature == 0 for r in requests)
    wanted = max((r.logprobs for r in requests if r.logprobs is not None), default=None)
    penalties = any(r.penalties is not None for r in requests)
    logprobs = None if wanted is None else top_size(wanted)
    return Mode(sample=True, greedy=greedy, logprobs=logprobs, penalties=penalties)


def _owners(plan: StepPlan, output: Output, counted: int) -> list[Owner]:
    """Whose the rows of a step are; `counted` tokens by which the planner thinks each decoding row to go on."""
    owners = [Owner(i, c.request, 1, c.request.target) for i, c in enumerate(plan.chunks) if c.final]
    return owners + [Owner(output.first_row + r.row, r, counted, r.target) for r in plan.decodes]


def _processed(runner: Runner, output: Output, mode: Mode, owners: list[Owner]) -> Tensor:
    """Scores for the sampler: rows of each group through its processors, the others with their own penalties."""
    parts: dict[int, list[Owner]] = {}
    for owner in owners:
        group = owner.request.group
        if group is not None and not group.plain:
            parts.setdefault(id(group), []).append(owner)
    scores = runner.scores(output, mode).float()
    for own in parts.values():
        place = streams.upload([owner.index for owner in own], torch.int64, runner.device)
        new = _processed_group(runner, output.logits[place], [owner.request for owner in own])
        scores = scores.index_copy(0, place, new)
    return scores


def _processed_group(runner: Runner, logits: Tensor, requests: list[Request]) -> Tensor:
    group = requests[0].group
    assert group is not None, "only requests of a group have processors"
    bound, table = max(r.computed for r in requests), runner.table.decode
    rows = streams.upload([r.row for r in requests], torch.int64, runner.device)
    state = table._replace(history=table.history[:, :bound]).picked(rows)
    generated = [r.computed - len(r.prompt) for r in requests] if group.rectangular else None
    return group.process(logits, state, requests, bound, generated)
