"""How ranks talk: the interface, and its implementation for ranks that live in one process."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pipe.across import Across, Alone, Board, InProcessAcross
from pipe.boundary import Parcel, Pytree
from pipe.errors import PipelineError

T = TypeVar("T")


BATCH = -1  # where the first stage's input comes from


class Key(NamedTuple):
    """Names one value of one microbatch on one edge; a message and its place in a mailbox."""

    value: str  # schedules.ACTIVATION or schedules.GRADIENT
    source: int  # the stage that makes it, or BATCH
    destination: int  # the stage that takes it
    microbatch: int

    def __str__(self) -> str:
        origin = "the batch" if self.source == BATCH else f"stage {self.source}"
        return f"the {self.value} of microbatch {self.microbatch} from {origin} to stage {self.destination}"


class Lane(NamedTuple):
    """A channel: one directed pair of members (`Place`) and one kind of value, first in, first
    out.
    """

    source: int
    destination: int
    value: str


class Place(NamedTuple):
    """Which of how many replicas a rank is in.

    Ranks of all replicas together are members of the pipeline, numbered as in a mesh ("pp", "dp").
    """

    replica: int = 0
    replicas: int = 1

    def member(self, rank: int) -> int:
        """A rank of this replica among all members."""
        return rank * self.replicas + self.replica

    def name(self, rank: int) -> str:
        """A rank of this replica in words."""
        return f"rank {rank}" if self.replicas == 1 else f"rank {rank} of replica {self.replica}"


def member_name(replicas: int, member: int) -> str:
    """A member in words."""
    rank, replica = divmod(member, replicas)
    return Place(replica, replicas).name(rank)


class Transport(Protocol):
    """Point to point and collectives, between the members (ranks of all replicas) of one pipeline.

    Collectives take what this process has to say and return what all say, in the order of the members: in
    one process what they were given.
    """

    size: int
    """How many processes take part."""

    def begin(self, receives: Iterable[tuple[Lane, Key, int]]) -> None:
        """Begins a call in which this process will receive these messages, in order; `shape` as in `send`."""

    def send(self, lane: Lane, key: Key, parcel: Parcel, shape: int) -> bool:
        """Sends a parcel; False if it has to be tried again after other ranks moved on.

        Args:
            shape: the call's number for all that shapes this microbatch's boundaries (`Call.keys`).
        """

    def receive(self, lane: Lane, key: Key, shape: int) -> Parcel | None:
        """The next parcel of a lane, perhaps still under way (`Parcel.wait`); None if it isn't there yet."""

    def finish(self) -> None:
        """Ends a call: every send has left, and nothing is left over.

        Raises:
            PipelineError: a message that nobody received.
        """

    def reset(self) -> None:
        """Forgets what a failed call has left behind."""

    def forget_shapes(self) -> None:
        """Forgets what was learnt about shapes (on all ranks at once)."""

    def all_gather(self, items: Sequence[T]) -> list[T]:
        """Every rank's item, on every rank, by the control plane: small, picklable, on CPU."""

    def gather(self, items: Sequence[T]) -> list[T] | None:
        """Every rank's item on rank 0, None elsewhere; picklable, of any size."""

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Member `source`'s tensor, everywhere; the others pass one of its shape, to be written to."""

    def all_gather_tensors(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Every member's 1-d tensor, of the length that `sizes` says, everywhere."""

    def broadcast_value(self, value: Pytree, source: int) -> Pytree:
        """A pytree of member `source`, in its replica; what the others pass is ignored."""

    def across(self, member: int) -> Across:
        """The replicas of a member's rank."""

    def fail(self, error: BaseException, where: str) -> BaseException | None:
        """Tells the other ranks; returns what to raise instead, where another rank failed first."""

    def close(self) -> None:
        """Gives connections and threads back."""


class InProcess:
    """All members in one process: a send is a copy.

    Args:
        devices: each member's device; by default the sender's.
        replicas: how many the members are of.
        strict: rendezvous semantics, under which a send blocks until its receiver stands at the matching
            receive, and
            a receive until its sender stands at the matching send: what completes here completes on any
                transport.
    """

    size = 1

    def __init__(
        self, devices: Sequence[torch.device] = (), *, replicas: int = 1, strict: bool = False
    ) -> None:
        self.strict = strict
        self._replicas = replicas
        self._boards: dict[int, Board] = {}
        self._across: dict[int, Across] = {}
        self._devices = devices
        self._queues: dict[Lane, deque[tuple[Key, Parcel]]] = {}
        self._offers: dict[Lane, Key] = {}  # strict: sends that stand and wait
        self._taken: set[Lane] = set()  # strict: offers that were received

    def begin(self, receives: Iterable[tuple[Lane, Key, int]]) -> None:
        """Nothing to prepare: messages lie in queues."""

    def send(self, lane: Lane, key: Key, parcel: Parcel, shape: int) -> bool:
        if self.strict and lane in self._offers:
            return self._withdraw(lane)
        device = self._devices[lane.destination] if self._devices else None
        self._queues.setdefault(lane, deque()).append((key, parcel.delivered(device)))
        if self.strict:
            self._offers[lane] = key
        return not self.strict

    def receive(self, lane: Lane, key: Key, shape: int) -> Parcel | None:
        queue = self._queues.get(lane)
        if not queue:
            return None
        sent, parcel = queue[0]
        if sent != key:
            raise PipelineError(f"expected {key}, but rank {lane.source} sent {sent}")
        queue.popleft()
        if self.strict:
            self._taken.add(lane)
        return parcel

    def _withdraw(self, lane: Lane) -> bool:
        if lane not in self._taken:
            return False
        self._taken.discard(lane)
        del self._offers[lane]
        return True

    def finish(self) -> None:
        self._taken.clear()
        left = [key for queue in self._queues.values() for key, _ in queue]
        if left:
            self.reset()
            raise PipelineError(f"left over at the end of the call: {left[0]} was sent and never received")

    def reset(self) -> None:
        self._queues.clear()
        self._offers.clear()
        self._taken.clear()
        for board in self._boards.values():
            board.clear()

    def forget_shapes(self) -> None:
        """Nothing is learnt here: a copy needs no description."""

    def all_gather(self, items: Sequence[T]) -> list[T]:
        return list(items)

    def gather(self, items: Sequence[T]) -> list[T] | None:
        return list(items)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor

    def all_gather_tensors(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return list(tensors)

    def broadcast_value(self, value: Pytree, source: int) -> Pytree:
        return value

    def across(self, member: int) -> Across:
        if member not in self._across:
            rank, replica = divmod(member, self._replicas)
            board = self._boards.setdefault(rank, Board(self._replicas))
            self._across[member] = Alone() if self._replicas == 1 else InProcessAcross(board, replica)
        return self._across[member]

    def fail(self, error: BaseException, where: str) -> BaseException | None:
        self.reset()
        return None

    def close(self) -> None:
        self.reset()
