"""Does the engine's own executor, in strict mode, complete exactly the plans that `verify` accepts?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from test_schedules_verify import accepted, mutants, plans
from torch import Tensor, nn

import schedules
from pipe.boundary import Parcel
from pipe.call import Call
from pipe.executor import Run, execute
from pipe.program import compile_program
from pipe.stage import Stage
from pipe.transport import BATCH, InProcess, Key
from schedules import ACTIVATION, Plan, build, chain, forward_only

CPU = torch.device("cpu")


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def stage(plan: Plan, index: int) -> Stage:
    """The smallest stage there is."""
    return Stage(
        index,
        nn.Sequential(nn.Linear(1, 1)),
        first_layer=index,
        is_first=index == 0,
        is_last=index == plan.num_stages - 1,
        device=CPU,
        loss=loss,
    )


def run(plan: Plan, *, strict: bool = True) -> list[Run]:
    """The plan on the engine's own pieces, each rank with its own stages, and no proof beforehand."""
    stages = [{index: stage(plan, index) for index in plan.stages_of(rank)} for rank in range(plan.ranks)]
    call = Call(
        trains=not plan.forward_only,
        microbatches=plan.microbatches,
        keys=[0] * plan.microbatches,
        weights=[1.0] * plan.microbatches,
        reference=float(plan.microbatches),
        targets=[torch.zeros(1, 1)] * plan.microbatches,
    )
    runs = [Run(rank, compile_program(plan, rank, stages[rank], "never"), call) for rank in range(plan.ranks)]
    batch = {
        Key(ACTIVATION, BATCH, 0, m): Parcel([torch.ones(1, 1)], wants=(False,))
        for m in range(plan.microbatches)
    }
    runs[plan.placement[0]].mailbox.update(batch)
    with torch.set_grad_enabled(call.trains):
        execute(runs, InProcess(strict=strict))
    assert sorted(call.losses) == list(range(plan.microbatches))
    return runs


def completes(plan: Plan) -> bool:
    try:
        run(plan)
    except Exception:  # also what a stage says that is asked for a backward it can't do
        return False
    return True


def can_run(plan: Plan) -> bool:
    """An nn.Sequential is a chain; and without replicas there is nothing to gather or to reduce."""
    return tuple(plan.edges) == tuple(chain(plan.num_stages)) and not plan.has_collectives


@settings(max_examples=150, deadline=None)
@given(plans().filter(can_run))
def test_what_is_built_completes(plan: Plan) -> None:
    runs = run(plan)
    assert tuple(r.peak_live for r in runs) == plan.peak_live


@settings(max_examples=600, deadline=None)
@given(mutants().filter(can_run))
@example(Plan.parse("rank 0: 0F0"))  # what is left of a step without its only backward is an evaluation
@example(Plan.parse("rank 0: 0F0 0F1 0B1 0B0"))
def test_strict_completes_exactly_what_verify_accepts(plan: Plan) -> None:
    assert completes(plan) == accepted(plan), str(plan)


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "csv"])
def test_every_schedule_runs_strictly(name: str, ranks: int, microbatches: int) -> None:
    schedule = schedules.get(name)
    plan = build(schedule, schedule.placement(ranks), microbatches)
    runs = run(plan)
    assert tuple(r.peak_live for r in runs) == plan.peak_live
    run(forward_only(plan))


# Two ranks, two microbatches, by the hand of somebody who slipped once.
GOOD = """
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
"""


@pytest.mark.parametrize(
    ("slip", "instead", "message"),
    [
        (
            "1RECV_F1 1B0 1SEND_B0",
            "1B0 1SEND_B0 1RECV_F1",
            "deadlock: rank 0.*0SEND_F1.*waits; rank 1.*1SEND_B0",
        ),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "activation of microbatch 0 from stage 0 to stage 1 isn't there"),
        ("0F0 0SEND_F0 0F1", "0F0 0SEND_F0 0F0 0F1", "microbatch 0 from the batch to stage 0 isn't there"),
        (
            "0SEND_F0 0F1 0SEND_F1",
            "0F1 0SEND_F1 0SEND_F0",
            "expected the activation of microbatch 0.*microbatch 1",
        ),
        (
            "0RECV_B1 0B1",
            "0RECV_B1",
            "left over at the end of the call on rank 0: the gradient of microbatch 1",
        ),
        ("1F1 1B1 1SEND_B1", "1F1 1B1", "deadlock: rank 0.*0RECV_B1"),
        ("0F1 0SEND_F1", "0SEND_F1", "activation of microbatch 1 from stage 0 to stage 1 isn't there"),
        ("1F0 1RECV_F1 1B0", "1RECV_F1 1B0 1F0", ""),
    ],
)
def test_what_the_strict_executor_says(slip: str, instead: str, message: str) -> None:
    assert completes(Plan.parse(GOOD))
    slipped = Plan.parse(GOOD.replace(slip, instead))
    assert slipped != Plan.parse(GOOD) and not accepted(slipped)
    with pytest.raises(Exception, match=f"(?s){message}" if message else r"."):
        run(slipped)


def test_a_plan_that_only_buffers_can_save() -> None:
    """Both ranks send first. Queues let that pass, strict mode does not, and neither would NCCL."""
    plan = Plan.parse(GOOD.replace("1RECV_F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1"))
    run(plan, strict=False)
    assert not completes(plan)
