"""Does the summary of a step say where its time went, which stage is slow, and what would help?"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from pipe.timeline.costs import costs_of, predict
from pipe.timeline.idle import CAUSES, busy_of, idle
from pipe.timeline.summary import Summary, scalars_of, summarize, summary_data
from pipe.timeline.trace import TICKS, Clock, Member, Sends, Trace, TraceError
from schedules import COMPUTE, SCHEDULES, Costs, Plan, add_collectives, forward_only, simulate

NAMES = [name for name in SCHEDULES if name != "auto"]
UNEVEN = {"F": 1.0, "I": 0.75, "W": 1.25, "latency": 0.25}


def check_sums(trace: Trace) -> None:
    """Every tick of every member is busy, or has one cause."""
    times, summary = idle(trace), summarize(trace)
    assert (times.causes.sum(axis=1) == times.duration - times.busy).all()
    assert (times.causes >= 0).all() and (times.busy >= 0).all()
    assert (times.waits.sum(axis=2) == times.causes[:, [2, 3]]).all()
    for member in summary.members:
        assert round(sum(member.causes.values()) * TICKS) == round(member.idle * TICKS)
        assert round((member.busy + member.idle) * TICKS) == round(summary.duration * TICKS)


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_causes_and_bubble_are_the_simulators(name: str, microbatches: int) -> None:
    plan = synthetic.plan_of(name, 4, microbatches)
    timeline = simulate(plan, Costs(**UNEVEN))
    trace = synthetic.of_timeline(timeline, replicas=2)
    check_sums(trace)
    summary, unit = summarize(trace), 1000.0
    assert summary.bubble == pytest.approx(timeline.rate, abs=1e-9)
    assert summary.end - summary.begin == pytest.approx(timeline.makespan * unit)
    assert summary.ideal == pytest.approx(summary.duration - timeline.rate * timeline.makespan * unit)
    compared = ["warm_up", "drain", "activation", "gradient", "communication"]
    if any(plan.pairs):  # in a trace, the first of a pair is done before its second
        compared = ["warm_up", "drain"]
    for member in summary.members:
        assert member.busy == pytest.approx(timeline.busy[member.rank] * unit)
        for cause in compared:
            expected = getattr(timeline.bubble, cause)[member.rank] * unit
            assert member.causes[cause] == pytest.approx(expected, abs=0.11), (member.rank, cause)
        assert member.causes["optimizer"] == 1500.0 and member.causes["overhead"] == 200.0


@pytest.mark.parametrize("zero", [1, 3])
def test_collectives_are_communication(zero: int) -> None:
    plan = add_collectives(
        synthetic.plan_of("looped_bfs", 2, 4), reduce_every=1 if zero == 3 else 4, unshard=zero == 3
    )
    timeline = simulate(plan, Costs(unshard=0.75, reduce_grad=1.5))
    trace = synthetic.of_timeline(timeline)
    check_sums(trace)
    summary = summarize(trace)
    assert summary.bubble == pytest.approx(timeline.rate, abs=1e-9)
    for member in summary.members:
        expected = timeline.bubble.communication[member.rank] * 1000
        assert expected > 0
        assert member.causes["communication"] == pytest.approx(expected, abs=0.11)
        assert member.causes["drain"] == pytest.approx(timeline.bubble.drain[member.rank] * 1000, abs=0.11)


def test_waits_name_their_stage() -> None:
    """Rank 0 waits for gradients, the last rank for activations, and the slow stage 1 makes both wait."""
    plan = synthetic.plan_of("1f1b", 3, 6)
    summary = summarize(synthetic.trace(plan, Costs(F=(1, 3, 1), B=(2, 6, 2))))
    assert [(wait.value, wait.stage) for wait in summary.members[0].waits] == [("gradient", 1)]
    assert [(wait.value, wait.stage) for wait in summary.members[2].waits] == [("activation", 1)]
    for member in summary.members:
        assert sum(wait.time for wait in member.waits) == pytest.approx(
            member.causes["activation"] + member.causes["gradient"]
        )


def test_waits_without_sends_are_guessed_from_the_peer() -> None:
    trace = synthetic.trace(synthetic.plan_of("interleaved", 3, 6), Costs(latency=0.5))
    bare = Trace(trace.header, tuple(dataclasses.replace(m, sends=Sends.none()) for m in trace.members))
    assert [m.waits for m in summarize(bare).members] == [m.waits for m in summarize(trace).members]


def test_a_wait_whose_value_the_trace_lacks_is_the_stages() -> None:
    """A clock that is off, or a member that recorded nothing: all of the wait is then the other stage's."""
    trace = synthetic.trace(synthetic.plan_of("gpipe", 2, 2), Costs(latency=0.5))
    late = Trace(trace.header, (synthetic.shifted(trace.members[0], 1e5), trace.members[1]))
    check_sums(late)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_sums_hold_whatever_the_clocks_say(name: str, ranks: int, microbatches: int, seed: int) -> None:
    """Members whose clocks are off by milliseconds, and events that overlap, break no sum."""
    random = np.random.default_rng(seed)
    trace = synthetic.trace(synthetic.plan_of(name, ranks, microbatches), Costs(**UNEVEN))
    members = tuple(_shaken(member, random) for member in trace.members)
    times = idle(Trace(trace.header, members))
    assert times.busy.tolist() == [busy_of(member) for member in members]
    assert (times.causes.sum(axis=1) == times.duration - times.busy).all()
    assert (times.causes >= 0).all()


def _shaken(member: Member, random: np.random.Generator) -> Member:
    shift = random.uniform(-3000, 3000)
    starts = member.start + shift + random.uniform(-300, 300, len(member.start))
    lasts = member.end - member.start
    return dataclasses.replace(member, start=starts, end=starts + lasts)


def test_an_early_optimizer_step_is_drain_while_others_still_compute() -> None:
    """The last rank's `o` begins right behind its last backward, as it waits for the others' norms there."""
    timeline = simulate(synthetic.plan_of("1f1b", 4, 8))
    member = summarize(synthetic.of_timeline(timeline)).members[3]
    assert member.causes["drain"] == timeline.bubble.drain[3] * 1000 > 0


def test_forward_only_plans_and_single_ranks() -> None:
    evaluation = synthetic.trace(forward_only(synthetic.plan_of("1f1b", 3, 4)))
    check_sums(evaluation)
    alone = synthetic.trace(synthetic.plan_of("gpipe", 1, 4), optimizer=100.0)
    check_sums(alone)
    summary = summarize(alone)
    assert summary.bubble == 0 and summary.slowest is None and not summary.took_turns
    assert summary.advice == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_slowed_stage_is_named(name: str) -> None:
    plan = synthetic.plan_of(name, 4, 8)
    for slow in range(plan.num_stages):
        factors = np.where(np.arange(plan.num_stages) == slow, 1.5, 1.0)
        summary = summarize(synthetic.trace(plan, Costs(F=factors, I=factors, W=factors)))
        assert summary.slowest is not None and summary.slowest.stage == slow
        assert summary.slowest.ratio == pytest.approx(1.5 / factors.mean(), rel=1e-3)
        assert summary.advice[0].startswith(f"Stage {slow} (rank {plan.placement[slow]}) is 1.")


def test_moving_a_layer() -> None:
    """Stage 1 has four layers, its neighbours two: the layer towards the faster neighbour is to go there.

    layers   0  1 | 2  3  4  5 | 6  7        2  2  2  2 2 2 2   3  3 units of F + B
    """
    plan = synthetic.plan_of("1f1b", 3, 12)
    layers: dict[str, Any] = {
        "layers": ((0, 2), (2, 6), (6, 8)),
        "layer_names": tuple(f"{i} Linear" for i in range(8)),
    }
    trace = synthetic.trace(plan, Costs(F=(2, 4, 3), B=(4, 8, 6)), **layers)
    summary = summarize(trace)
    move = summary.move
    assert move is not None and (move.layer, move.source, move.target) == (2, 1, 0)
    # By hand: with three layers on each of stage 0 and 1, nobody does more than 9 units a microbatch.
    before = simulate(plan, Costs(F=(2, 4, 3), B=(4, 8, 6))).makespan
    after = simulate(plan, Costs(F=(3, 3, 3), B=(6, 6, 6))).makespan
    assert move.saving == pytest.approx((before - after) / (before + 1.7), rel=1e-3)
    assert summary.advice[0] == (
        "Stage 1 (rank 1) is 1.33 x the mean; moving layer 2 (Linear) from stage 1 to stage 0 is predicted "
        f"to save {move.saving:.0%} of the step."
    )
    assert summary_data(summary, trace)["move"] == {
        "layer": 2, "name": "2 Linear", "source": 1, "target": 0, "saving": move.saving
    }  # fmt: skip


def test_sizes_say_what_a_layer_is_worth() -> None:
    """All of stage 1's time is its last layer's: moving the first helps nobody, and the last just moves."""
    plan, costs = synthetic.plan_of("1f1b", 2, 8), Costs(F=(1, 2), B=(2, 4))
    assert summarize(synthetic.trace(plan, costs)).move is not None
    sized = synthetic.trace(plan, costs, layer_sizes=(1, 1, 1, 0, 0, 9))
    assert summarize(sized).move is None
    nothing = synthetic.trace(plan, costs, layer_sizes=(0,) * 6)
    assert summarize(nothing).move == summarize(synthetic.trace(plan, costs)).move


def test_words_where_no_layer_can_move() -> None:
    plan, slow = synthetic.plan_of("1f1b", 2, 8), Costs(F=(1, 2), B=(2, 4))
    single = synthetic.trace(plan, slow, layers=((0, 1), (1, 2)), layer_names=("a Linear", "b Block"))
    assert "has one layer, 1 (b Block): only a smaller layer" in summarize(single).advice[0]
    even = summarize(synthetic.trace(plan)).advice
    assert even[0].startswith("The stages are balanced")
    slightly = summarize(synthetic.trace(plan, Costs(F=(1, 1.3), B=(2, 2.6)))).advice[0]
    assert "1.13 x the mean, but no single layer moved is predicted to save over 2%" in slightly


def test_words_on_idle_time() -> None:
    def last(name: str, costs: Costs, **changes: Any) -> str:
        return summarize(synthetic.trace(synthetic.plan_of(name, 4, 8), costs, **changes)).advice[-1]

    assert last("gpipe", Costs()).startswith("Warm-up and drain are 13% of the ranks' time")
    assert "most of it for stage 1" in last("1f1b", Costs(F=(1, 2, 1, 1), B=(2, 4, 2, 2)))
    assert last("1f1b", Costs(), optimizer=40000.0).startswith("The optimizer, behind the schedule, is 5")
    assert last("1f1b", Costs(), agreement=40000.0).startswith("The engine itself")
    plan = add_collectives(synthetic.plan_of("1f1b", 4, 8), reduce_every=8)
    assert summarize(synthetic.trace(plan, Costs(reduce_grad=20))).advice[-1].startswith("Communication is")


def test_ranks_that_took_turns_are_no_pipeline() -> None:
    """All ranks in one process: each computes while the others wait. Their waits are no latency."""
    plan = synthetic.plan_of("gpipe", 2, 3)
    trace = synthetic.trace(plan)
    shifts = (0.0, 50_000.0)
    members = tuple(synthetic.shifted(m, shift) for m, shift in zip(trace.members, shifts, strict=True))
    turns = Trace(dataclasses.replace(trace.header, duration=100_000.0), members)
    summary = summarize(turns)
    assert summary.took_turns and "at once" in summary.advice[1]
    assert not summarize(trace).took_turns
    assert costs_of(turns).latency == 0.0


def test_costs_are_measured() -> None:
    plan = synthetic.plan_of("zb_h1", 3, 6)
    costs = Costs(F=(1, 2, 3), I=(2, 1, 2), W=(1, 1, 4), latency={(0, 1): 0.5, (1, 2): 0.25})
    found = costs_of(synthetic.trace(plan, costs, scale=1.0e4))
    for op in "FIW":
        assert np.asarray(getattr(found, op)) == pytest.approx(1e4 * np.asarray(getattr(costs, op)))
    assert dict(found.latency) == pytest.approx({(0, 1): 5e3, (1, 2): 2.5e3})  # type: ignore[arg-type]
    table = costs_of(synthetic.trace(plan, costs), by_microbatch=True)
    assert np.asarray(table.F) == pytest.approx(1e3 * np.repeat([[1], [2], [3]], 6, axis=1))


@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_of_a_predictable_step_is_the_step(name: str) -> None:
    """At costs without noise, the simulator says what was: plans with pairs are done in turn."""
    plan = synthetic.plan_of(name, 4, 6)
    trace = synthetic.trace(dataclasses.replace(plan, pairs=()), Costs(**UNEVEN))
    predicted = predict(trace)
    assert predicted.duration == pytest.approx(trace.header.duration, abs=1)
    for member, starts, ends in zip(trace.members, predicted.starts, predicted.ends, strict=True):
        assert starts == pytest.approx(member.start[member.is_compute], abs=1)
        assert ends == pytest.approx(member.end[member.is_compute], abs=1)


def test_a_trace_of_another_plan_has_no_prediction() -> None:
    trace = synthetic.trace(synthetic.plan_of("1f1b", 2, 4))
    other = trace.replace(plan=synthetic.plan_of("1f1b", 2, 3).to_csv())
    with pytest.raises(TraceError, match="member 0 computed microbatch 3 of stage 0, of 3 microbatches"):
        predict(other)
    for broken in (other, trace.replace(plan="0F0,what\n"), trace.replace(plan="")):
        summary = summarize(broken)
        assert summary.predicted is None and summary.move is None and summary.advice
    with pytest.raises(TraceError, match="did 0B0, which its plan lacks"):
        predict(trace.replace(plan=forward_only(trace.plan).to_csv()))


def test_scalars() -> None:
    trace = synthetic.trace(synthetic.plan_of("1f1b", 2, 4), memory=True, replicas=2)
    scalars, summary = scalars_of(trace), summarize(trace)
    assert scalars["step_seconds"] == pytest.approx(summary.duration / 1e6)
    assert scalars["bubble"] == summary.bubble
    assert scalars["bubble_rank_1"] == pytest.approx(summary.members[2].bubble)
    assert scalars["peak_memory_rank_0"] == 2**30 + 2 * 2**20
    assert "peak_memory_rank_0" not in scalars_of(synthetic.trace(synthetic.plan_of("1f1b", 2, 4)))


def test_the_clocks_bound_is_told() -> None:
    trace = synthetic.trace(synthetic.plan_of("1f1b", 2, 4), clock=Clock("cuda", (0.0, 12.5)))
    assert summarize(trace).clock_error == 12.5


def test_the_summary_names_every_cause() -> None:
    trace = synthetic.trace(synthetic.plan_of("1f1b", 2, 4))
    data = summary_data(summarize(trace), trace)
    assert all(set(member["causes"]) == set(CAUSES) for member in data["members"])
    assert all({"stage", "rank", "layers", "time", "ratio", *COMPUTE} == set(row) for row in data["stages"])


def big_plan() -> Plan:
    return synthetic.plan_of("1f1b", 16, 256)


def test_a_large_step_takes_seconds_at_most() -> None:
    """16 ranks x 256 microbatches, with a slow stage, so that layers are moved in many simulations."""
    trace = synthetic.trace(big_plan(), Costs(F=[1.3, *[1.0] * 15], latency=0.1))
    start = time.process_time()
    summary: Summary = summarize(trace)
    assert time.process_time() - start < 10 and summary.slowest is not None


def test_sharing_the_loss_is_neither_drain_nor_optimizer() -> None:
    """Behind the last computation of all it is the engine's time; before, it waits for who still computes."""
    trace = synthetic.trace(synthetic.plan_of("gpipe", 2, 2))
    first, last = trace.members  # rank 0 has the last backward
    computed = float(first.end[first.is_compute].max())
    own = float(last.end[last.is_compute].max())
    assert own < computed

    def sharing(member: Member) -> Member:
        done = float(member.end[member.is_compute].max())
        kept = member.end <= done  # without the optimizer
        columns = {
            name: getattr(member, name)[kept]
            for name in ("kind", "stage", "microbatch", "peer", "value", "start", "end", "live")
        }
        columns["kind"] = np.append(columns["kind"], "c")
        for name in ("stage", "microbatch", "peer"):
            columns[name] = np.append(columns[name], -1)
        columns["value"] = np.append(columns["value"], "")
        columns["start"] = np.append(columns["start"], done)
        columns["end"] = np.append(columns["end"], computed + 2000.0)
        columns["live"] = np.append(columns["live"], 0)
        return dataclasses.replace(member, **columns)

    reduced = dataclasses.replace(trace.header, duration=computed + 3000.0)
    before, after = summarize(trace), summarize(Trace(reduced, (sharing(first), sharing(last))))
    for old, new in zip(before.members, after.members, strict=True):
        assert new.causes["drain"] == pytest.approx(old.causes["drain"])
        assert new.causes["overhead"] == pytest.approx(old.causes["overhead"] + 2000.0)
        assert new.causes["optimizer"] == pytest.approx(1000.0)
