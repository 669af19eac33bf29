"""What is an op: what does it need, make and free, and what does it cost?"""

from __future__ import annotations

from dataclasses import dataclass

Op = str

F, B, I, W = "F", "B", "I", "W"  # noqa: E741 - the field's own letter
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD"

# The values that ops hand to each other. The first two travel along edges, the other two stay on their stage.
#
#              ACTIVATION          ACTIVATION
#   stage s-1 ------------> F(s) -------------> stage s+1
#                            | SAVED
#                            v
#   stage s-1 <------- B(s), or I(s) <--------- stage s+1
#              GRADIENT       |      GRADIENT
#                             | DEFERRED
#                             v
#                            W(s)
ACTIVATION = "activation"
GRADIENT = "gradient"
SAVED = "saved activation"
DEFERRED = "deferred weight gradient"


@dataclass(frozen=True)
class OpSpec:
    """One op: `code` is its number in the columns of `Actions`, `text` its name, as in `2F0`."""

    code: int
    text: Op
    meaning: str
    own: tuple[str, ...] = ()
    """The values that it needs from its own stage."""
    takes: str | None = None
    """The value that it takes along edges: ACTIVATION from the stages before, GRADIENT from those behind."""
    makes: tuple[str, ...] = ()
    frees: str | None = None
    """SAVED where the saved activation dies: where the stage's weight gradients are added up, too."""
    backward: bool = False
    cost: int = 0
    carries: str | None = None
    """For a transfer: the value that it carries."""
    sends: bool = False
    collective: bool = False
    """Done by all replicas of its stage at once."""

    @property
    def is_compute(self) -> bool:
        return self.carries is None and not self.collective


_TABLE = (
    OpSpec(0, F, "forward", takes=ACTIVATION, makes=(ACTIVATION, SAVED), cost=1),
    OpSpec(1, B, "backward", (SAVED,), GRADIENT, (GRADIENT,), frees=SAVED, backward=True, cost=2),
    OpSpec(2, I, "input gradient", (SAVED,), GRADIENT, (GRADIENT, DEFERRED), backward=True, cost=1),
    OpSpec(3, W, "weight gradient", (DEFERRED,), frees=SAVED, backward=True, cost=1),
    OpSpec(4, SEND_F, "send an activation", (ACTIVATION,), carries=ACTIVATION, sends=True),
    OpSpec(5, RECV_F, "receive an activation", makes=(ACTIVATION,), carries=ACTIVATION),
    OpSpec(6, SEND_B, "send a gradient", (GRADIENT,), carries=GRADIENT, sends=True),
    OpSpec(7, RECV_B, "receive a gradient", makes=(GRADIENT,), carries=GRADIENT),
    # Of these, a stage has as many as the plan likes: their microbatch says which computation they serve.
    OpSpec(8, UNSHARD, "gather the weights", collective=True),
    OpSpec(9, RESHARD, "drop all but the own shard of them", collective=True),
    OpSpec(10, REDUCE_GRAD, "reduce the weight gradients", collective=True),
)

OPS: dict[Op, OpSpec] = {spec.text: spec for spec in _TABLE}
"""The one table of ops: an op is added here and nowhere else."""

COMPUTE: tuple[Op, ...] = tuple(op for op, spec in OPS.items() if spec.is_compute)
COMMUNICATION: tuple[Op, ...] = tuple(op for op, spec in OPS.items() if spec.carries is not None)
"""Point to point, between stages."""
COLLECTIVES: tuple[Op, ...] = tuple(op for op, spec in OPS.items() if spec.collective)
"""Among the replicas of a stage."""
NAMES: dict[int, Op] = {spec.code: op for op, spec in OPS.items()}
"""Code to op: the inverse of `OPS[op].code`."""

MAKERS: dict[str, tuple[Op, ...]] = {
    value: tuple(op for op in COMPUTE if value in OPS[op].makes)
    for value in (ACTIVATION, GRADIENT, SAVED, DEFERRED)
}
"""Which compute ops make a value."""

TRANSFERS: dict[str, tuple[Op, Op]] = {
    value: (
        next(op for op in COMMUNICATION if OPS[op].carries == value and OPS[op].sends),
        next(op for op in COMMUNICATION if OPS[op].carries == value and not OPS[op].sends),
    )
    for value in (ACTIVATION, GRADIENT)
}
"""The (SEND, RECV) that carry a value."""
