"""What order does a rule of thumb make, rank by rank as time goes on?"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schedules.instance import Instance

_NEVER = float("inf")


@dataclass(frozen=True)
class Rule:
    """What a rank does next. (The ideas are those of the zero-bubble paper's heuristic, arXiv 2401.10241.)

    An I that is there goes first, then an F, if memory and `ahead` allow it, then a W; so W fill the time in
    which a rank would wait, and make room in memory when nothing else does.
    """

    ahead: tuple[int, ...]
    """By stage, the most microbatches between F and I."""
    fill: float = 1.0
    """The share of a W that has to fit before the next input comes."""
    patience: float = 0.0
    """An F stands back if an I comes before this share of it is over."""


def construct(instance: Instance, rule: Rule, durations: Sequence[float] | None = None) -> list[list[int]]:
    """Orders that fit in memory. The rule sees other durations than the instance's if told."""
    durations = instance.durations if durations is None else durations
    return _Run(instance, rule, durations).orders()


def rules(instance: Instance) -> Iterator[Rule]:
    """Some fifty of them: how far forwards run ahead, times when W are done, times what waits for an I.

    A stage can do so many F while its first microbatch goes up and comes back, and a few more or fewer. With
    an I beside every F it is the warm-up of 1F1B, with none that of ZB-H2.
    """
    m = instance.microbatches
    seen = set()
    for with_input, more in ((0, 0), (0, 1), (0, -1), (0, 2), (1, 0), (1, 1), (0, m)):
        ahead = tuple(
            min(max(1 + more + math.floor(count), 1), m) for count in _round_trips(instance, with_input)
        )
        if ahead not in seen:
            seen.add(ahead)
            for fill in (0.0, 0.5, 0.75, 1.0):
                yield from (Rule(ahead, fill, patience) for patience in (0.0, 0.3))


def _round_trips(instance: Instance, with_input: int) -> list[float]:
    """By stage, the time from its first F's end to its first I, in F (and I) of all its rank's stages."""
    m, durations = instance.microbatches, instance.durations
    shares = []
    for stage in range(instance.stages):
        way = [
            durations[code * m] + instance.wire[source] + instance.latency[source]
            for code, source in enumerate(instance.source)
            if (code % 3 == 0 and code > 3 * stage) or (code % 3 == 1 and code > 3 * stage + 1)
        ]
        if stage + 1 < instance.stages:
            way.append(instance.wire[3 * stage + 4] + instance.latency[3 * stage + 4])
        own = instance.stages_of[instance.placement[stage]]
        work = [durations[3 * s * m] + with_input * durations[(3 * s + 1) * m] for s in own]
        shares.append(math.fsum(way) / (math.fsum(work) or 1.0))
    return shares


class _Run:
    """All ranks, in the order of time. A rank decides when it is free and whenever something arrives.

    Never stuck: an F leaves room for the rank's later stages, so the oldest microbatch can always go on.
    """

    def __init__(self, instance: Instance, rule: Rule, durations: Sequence[float]) -> None:
        self.instance, self.rule, self.durations = instance, rule, durations
        m, stages = instance.microbatches, instance.stages
        self.done = [0] * (3 * stages)
        self.live = [0.0] * instance.ranks
        self.free = [0.0] * instance.ranks
        self.busy = [0.0] * instance.num_channels
        self.arrival = [
            0.0 if instance.source[c] < 0 else _NEVER for c in range(3 * stages) for _ in range(m)
        ]
        self.codes: list[list[int]] = [[] for _ in range(instance.ranks)]
        self.events = [(0.0, rank) for rank in range(instance.ranks)]
        self.room = [0.0] * stages  # what the rank's later stages need
        for own in instance.stages_of:
            for place, stage in enumerate(own):
                later = own[place + 1 :]
                self.room[stage] = math.fsum(max(instance.grows[3 * s * m : 3 * s * m + m]) for s in later)

    def orders(self) -> list[list[int]]:
        total = 3 * self.instance.microbatches * self.instance.stages
        events = self.events
        while total:
            now, rank = heapq.heappop(events)
            if now < self.free[rank]:
                continue
            code = self.choose(rank, now)
            if code >= 0:
                total -= 1
                self.take(rank, code, now)
        return self.codes

    def choose(self, rank: int, now: float) -> int:
        """The code of what the rank does now, or -1 where it waits."""
        own = self.instance.stages_of[rank]
        gradient, coming = self.gradient(own, now)
        if gradient >= 0:
            return gradient
        late = self.longest_owed(own)
        forward, following = self.forward(rank, now, coming, makes_room=late)
        if forward >= 0:
            return forward
        if late >= 0:
            weight = self.durations[late * self.instance.microbatches + self.done[late]]
            if following - now >= self.rule.fill * weight:
                return late
        if following < _NEVER:
            heapq.heappush(self.events, (following, rank))
        return -1

    def gradient(self, own: Sequence[int], now: float) -> tuple[int, float]:
        """An I whose gradient is there, the last stage's first; else -1, and when the next one comes."""
        coming = _NEVER
        for stage in reversed(own):
            code = 3 * stage + 1
            count = self.done[code]
            if count < self.done[code - 1]:
                comes = self.arrival[code * self.instance.microbatches + count]
                if comes <= now:
                    return code, comes
                coming = min(coming, comes)
        return -1, coming

    def longest_owed(self, own: Sequence[int]) -> int:
        """The W of the stage that owes most, or -1."""
        late, most = -1, 0
        for stage in own:
            owed = self.done[3 * stage + 1] - self.done[3 * stage + 2]
            if owed > most:
                late, most = 3 * stage + 2, owed
        return late

    def forward(self, rank: int, now: float, coming: float, makes_room: int) -> tuple[int, float]:
        """An F that can be done, the last stage's first, or the W that makes room for it.

        Else -1, and when the next input comes: an I at `coming`, or an F that will have room.
        """
        instance, rule, following = self.instance, self.rule, coming
        m = instance.microbatches
        for stage in reversed(instance.stages_of[rank]):
            code = 3 * stage
            count = self.done[code]
            if count == m or count - self.done[code + 1] >= rule.ahead[stage]:
                continue
            node = code * m + count
            comes = self.arrival[node]
            if comes > now:
                if comes < following and self.has_room(rank, node):
                    following = comes
            elif not self.has_room(rank, node):
                if makes_room >= 0:
                    return makes_room, now
            elif coming - now >= rule.patience * self.durations[node]:
                return code, now
        return -1, following

    def has_room(self, rank: int, node: int) -> bool:
        stage = node // (3 * self.instance.microbatches)
        return self.live[rank] + self.instance.grows[node] + self.room[stage] <= self.instance.memory

    def take(self, rank: int, code: int, now: float) -> None:
        instance = self.instance
        m = instance.microbatches
        node = code * m + self.done[code]
        self.done[code] += 1
        self.live[rank] += instance.grows[node]
        self.codes[rank].append(code)
        end = self.free[rank] = now + self.durations[node]
        heapq.heappush(self.events, (end, rank))
        taker = instance.taker[code]
        if taker >= 0:
            line = instance.channel[code]
            if line >= 0:
                self.busy[line] = end = max(end, self.busy[line]) + instance.wire[code]
                end += instance.latency[code]
            self.arrival[node + (taker - code) * m] = end
            heapq.heappush(self.events, (end, instance.placement[taker // 3]))
