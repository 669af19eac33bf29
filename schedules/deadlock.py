"""Which ranks wait for each other in a ring?"""

from __future__ import annotations

from collections.abc import Mapping

from schedules.errors import ScheduleError
from schedules.index import Index


def deadlock(index: Index, heads: Mapping[int, int], waits: Mapping[int, int]) -> ScheduleError:
    """The error that draws the ring.

    `heads[rank]` is the number of the action at which a stuck rank stands, `waits[number]` the number of
    the action, on another stuck rank, that it waits for.

        deadlock: 2 ranks wait for each other
          .-> rank 0 stands at #1 0SEND_F1, waits for #4 1RECV_F1 of rank 1
          |   rank 1 stands at #3 1SEND_B0, waits for #2 0RECV_B0 of rank 0
          '-----'
    """
    seen: dict[int, None] = {}
    rank = min(heads)
    while rank not in seen:
        seen[rank] = None
        rank = index.rank_of(waits[heads[rank]])
    ring = list(seen)[list(seen).index(rank) :]
    lines = [f"deadlock: {len(ring)} ranks wait for each other"]
    for place, rank in enumerate(ring):
        _, position, action = index.locate(heads[rank])
        other, far, awaited = index.locate(waits[heads[rank]])
        lines.append(
            f"  {'|  ' if place else '.->'} rank {rank} stands at #{position} {action}, "
            f"waits for #{far} {awaited} of rank {other}"
        )
    cycle = tuple(index.locate(heads[rank]) for rank in ring)
    rank, position, action = cycle[0]
    return ScheduleError(
        "\n".join([*lines, "  '-----'"]), rank=rank, position=position, action=action, cycle=cycle
    )
