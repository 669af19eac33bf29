"""In which order do ZB-H1 and ZB-H2 work? (Zero bubble, handcrafted: Qi et al., arXiv 2401.10241.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.action import Action
from schedules.letters import spell
from schedules.schedule import Problem
from schedules.shapes import along_line, line


@dataclass(frozen=True)
class ZBH1:
    """1F1B's memory; weight gradients put off to fill the drain. Idle (p-1)(F+I-W) where m >= p, W <= F, I.

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    The weight gradients of stage s lag s microbatches behind; it keeps at most p activations. Any m will do:
    where it is small, the idle time is more.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return line(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        p = len(along_line(problem, "zb_h1"))
        return _orders(problem, warm_up=[p - s for s in range(p)], lag=list(range(p)))


@dataclass(frozen=True)
class ZBH2:
    """Twice the memory, and the span (a rank's own first start to last end) idle only (p-1)(F+I-2W).

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    The weight gradients of stage s lag 2s microbatches behind; it keeps at most 2p - 1 activations. Holds
    where m >= 2p - 1 and W <= F, I; any other m will do, and idle more.
    """

    def placement(self, ranks: int) -> tuple[int, ...]:
        return line(ranks)

    def orders(self, problem: Problem) -> Sequence[Sequence[Action]]:
        p = len(along_line(problem, "zb_h2"))
        return _orders(problem, warm_up=[2 * (p - s) - 1 for s in range(p)], lag=[2 * s for s in range(p)])


def _orders(problem: Problem, *, warm_up: Sequence[int], lag: Sequence[int]) -> Sequence[Sequence[Action]]:
    """`warm_up[stage]` forwards, then I, W (once `lag[stage]` I are ahead) and F in turn; the rest W."""
    m = problem.microbatches

    def order(stage: int) -> Sequence[Action]:
        ahead = min(lag[stage], m)
        text = "F" * min(warm_up[stage], m) + "IF" * ahead + "IWF" * (m - ahead) + "W" * ahead
        return spell(text, (stage,), m).order

    return [order(problem.stages_of(rank)[0]) for rank in range(problem.ranks)]
