"""Transport between processes: payloads by gloo or NCCL, the control plane by gloo."""

import atexit
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import pipe
from pipe.across import Across
from pipe.boundary import (
    Form,
    Layout,
    Meta,
    Parcel,
    Pytree,
    check_unwritten,
    form_of,
    formed,
    pack,
    unpack,
    version_of,
)
from pipe.distributed.across import DistributedAcross
from pipe.distributed.failure import Bulletin, LostContact, forget_frames
from pipe.distributed.groups import Groups, close_at_exit
from pipe.errors import PeerError, PipelineError
from pipe.transport import Key, Lane
from schedules import ACTIVATION, edge_of

T = TypeVar("T")

# gloo keeps messages of different tags apart; each is a channel of its own.
_PAYLOAD_TAGS = {True: 1, False: 2}  # activation, gradient
_HEADER_TAGS = {True: 3, False: 4}
_GATHER_TAG = 5
# Sends under way on a lane before the oldest is waited for. Any number is safe: a plan is proved with none.
_SENDS_UNDER_WAY = 4
# Receives posted before the program comes to them, on each lane.
_RECEIVES_AHEAD = 2
_AFTER_THE_CULPRIT_S = 0.3
# Bytes that every rank contributes to an agreement; what is longer takes a second round.
_ROOM = 1024


class _Shape(NamedTuple):
    """What sender and receiver both know of the messages of one edge after the first of its kind."""

    layout: Layout
    metas: tuple[Meta, ...]
    odd: bool

    @property
    def bare(self) -> bool:
        """Whether messages are nothing but tensors."""
        return not self.odd and not self.layout.travels

    def misfit(self, parcel: Parcel) -> str | None:
        if parcel.layout is not self.layout and (
            parcel.layout.spec != self.layout.spec or parcel.layout.kinds != self.layout.kinds
        ):
            return f"its structure was {self.layout.spec} and is {parcel.layout.spec}"
        for tensor, wants, meta in zip(parcel.tensors, parcel.wants, self.metas, strict=True):
            if tensor.shape != meta.shape or tensor.dtype != meta.dtype or wants != meta.requires_grad:
                now = Meta(tensor.shape, tensor.dtype, wants)
                return f"it was {_words(meta)} and is {_words(now)}"
        return None


class DistributedTransport:
    """The transport of a member that is a process of its own."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.member = groups.member
        self.size = groups.size
        self._groups: Groups | None = groups
        self._device = device
        self._bulletin = Bulletin(groups.store, groups.member, groups.size, groups.timeout, groups.name)
        self.name = groups.name
        self._across: DistributedAcross | None = None
        self._shapes: dict[tuple[int, int, int], _Shape] = {}  # by edge and the call's shape number
        self._absent: dict[tuple[int, int, int], tuple[bool, ...]] = {}  # gradients that are None, as learnt
        self._sending: dict[Lane, deque[tuple[Any, Tensor, int]]] = {}
        # What a call's programs still receive, by lane.
        self._awaited: dict[Lane, deque[tuple[Key, int]]] = {}
        self._posted: dict[Lane, deque[Parcel]] = {}  # of these, what is posted and not asked for yet
        _calm_gloo()
        close_at_exit(self)

    def open(self, lanes: Sequence[Lane], replicas: int) -> None:
        """Connects every pair once, in the same order everywhere."""
        groups = self._alive()
        groups.open(lanes, replicas)
        _calm_gloo()
        hello = torch.zeros(1, device=self._device)
        for lane in sorted(lanes):
            if self.member == lane.source:
                self._post_send(lane, hello)
                self._reap(lane, 0)
            elif self.member == lane.destination:
                self._post_receive(lane, hello)()

    # ------------------------------------------------------------ point to point

    def send(self, lane: Lane, key: Key, parcel: Parcel, shape: int) -> bool:
        known = (*edge_of(lane.value, key.source, key.destination), shape)
        if lane.value == ACTIVATION:
            self._send_activation(lane, key, parcel, known)
        else:
            self._send_gradient(lane, key, parcel, known)
        return True

    def begin(self, receives: Iterable[tuple[Lane, Key, int]]) -> None:
        self._awaited.clear()
        for lane, key, shape in receives:
            self._awaited.setdefault(lane, deque()).append((key, shape))
        for lane in self._awaited:
            self._post_ahead(lane)

    def receive(self, lane: Lane, key: Key, shape: int) -> Parcel:
        posted = self._posted.setdefault(lane, deque())
        if posted:
            parcel = posted.popleft()
        else:
            self._awaited[lane].popleft()
            parcel = self._post(lane, key, shape)
        self._post_ahead(lane)
        return parcel

    def _post_ahead(self, lane: Lane) -> None:
        """Posts the next receives of a lane, as far as they are known to come without a header."""
        awaited, posted = self._awaited[lane], self._posted.setdefault(lane, deque())
        while awaited and len(posted) < _RECEIVES_AHEAD:
            key, shape = awaited[0]
            if not self._comes_bare(lane, key, shape):
                return
            awaited.popleft()
            posted.append(self._post(lane, key, shape))

    def _comes_bare(self, lane: Lane, key: Key, shape: int) -> bool:
        edge = edge_of(lane.value, key.source, key.destination)
        known = self._shapes.get((*edge, shape))
        if known is None or lane.value == ACTIVATION:
            return known is not None and known.bare
        absent = self._absent.get((*edge, shape))
        return absent is not None and not any(absent)

    def _post(self, lane: Lane, key: Key, shape: int) -> Parcel:
        known = (*edge_of(lane.value, key.source, key.destination), shape)
        if lane.value == ACTIVATION:
            return self._receive_activation(lane, known)
        return self._receive_gradient(lane, known)

    def _send_activation(self, lane: Lane, key: Key, parcel: Parcel, known: tuple[int, int, int]) -> None:
        shape = self._shapes.get(known)
        if shape is None:
            metas = tuple(
                Meta(t.shape, t.dtype, w) for t, w in zip(parcel.tensors, parcel.wants, strict=True)
            )
            self._shapes[known] = shape = _Shape(parcel.layout, metas, parcel.odd)
            self._send_header(lane, shape)
        else:
            misfit = shape.misfit(parcel)
            if misfit:
                raise PipelineError(
                    f"stage {key.source}'s output changed shape for an input of the same shape: {misfit} "
                    f"in microbatch {key.microbatch}. Shapes must follow from the shapes of the inputs"
                )
        if not shape.bare:
            forms = [form_of(tensor) for tensor in parcel.tensors] if shape.odd else None
            self._send_header(lane, (parcel.layout.values, forms))
        for tensor in parcel.tensors:
            self._post_send(lane, tensor)

    def _receive_activation(self, lane: Lane, known: tuple[int, int, int]) -> Parcel:
        shape = self._shapes.get(known)
        if shape is None:
            shape = self._shapes[known] = self._receive_header(lane)
        layout, forms = shape.layout, None
        if not shape.bare:
            values, forms = self._receive_header(lane)
            layout = Layout(layout.spec, layout.kinds, values)
        wants = tuple([meta.requires_grad for meta in shape.metas])
        parcel = self._receive_tensors(lane, layout, shape.metas, wants)
        if forms is not None:
            parcel.works = [*parcel.works, partial(_form, parcel.tensors, forms)]
        return parcel

    def _send_gradient(self, lane: Lane, key: Key, parcel: Parcel, known: tuple[int, int, int]) -> None:
        if not parcel.tensors:
            return
        absent = tuple(tensor is None for tensor in parcel.tensors)
        learnt = self._absent.get(known)
        if learnt is None or any(learnt):
            # An input that the stage made no use of has no gradient, and none is made up: as long as that
            # happens each message says which are there.
            self._absent[known] = absent
            self._send_header(lane, absent)
            learnt = absent
        metas = [meta for meta in self._shapes[known].metas if meta.requires_grad]
        for tensor, meta, left_out in zip(parcel.tensors, metas, learnt, strict=True):
            if not left_out:
                self._post_send(lane, self._zeros(meta) if tensor is None else tensor)

    def _receive_gradient(self, lane: Lane, known: tuple[int, int, int]) -> Parcel:
        metas = [meta for meta in self._shapes[known].metas if meta.requires_grad]
        if not metas:
            return Parcel([])
        absent = self._absent.get(known)
        if absent is None or any(absent):
            absent = self._absent[known] = self._receive_header(lane)
        parcel = self._receive_tensors(
            lane, _NO_LAYOUT, [m for m, left in zip(metas, absent, strict=True) if not left]
        )
        there = iter(parcel.tensors)
        return Parcel([None if left else next(there) for left in absent], works=parcel.works)

    def _receive_tensors(
        self, lane: Lane, layout: Layout, metas: Sequence[Meta], wants: tuple[bool, ...] = ()
    ) -> Parcel:
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas]
        return Parcel(tensors, layout, wants, [self._post_receive(lane, tensor) for tensor in tensors])

    def _zeros(self, meta: Meta) -> Tensor:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)

    def _post_send(self, lane: Lane, tensor: Tensor) -> None:
        group, _, destination = self._alive().lane(lane)
        # A conjugate is a flag that no wire carries.
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        try:
            work = group.send([tensor], destination, _PAYLOAD_TAGS[lane.value == ACTIVATION])
        except RuntimeError as error:
            raise self._lost(lane.destination, error) from None
        # gloo reads the tensor when the receiver is ready: it has to stay, and stay as it is.
        self._sending.setdefault(lane, deque()).append((work, tensor, version_of(tensor)))
        self._reap(lane, _SENDS_UNDER_WAY)

    def _post_receive(self, lane: Lane, tensor: Tensor) -> Callable[[], object]:
        group, source, _ = self._alive().lane(lane)
        try:
            work = group.recv([tensor], source, _PAYLOAD_TAGS[lane.value == ACTIVATION])
        except RuntimeError as error:
            raise self._lost(lane.source, error) from None
        return partial(self._wait, work, lane.source)

    def _reap(self, lane: Lane, leave: int) -> None:
        under_way = self._sending[lane]
        while len(under_way) > leave:
            work, tensor, version = under_way.popleft()
            self._wait(work, lane.destination)
            check_unwritten([tensor], [version])

    def _wait(self, work: Any, peer: int | None) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def _lost(self, peer: int | None, error: Exception) -> LostContact:
        who = "the other ranks" if peer is None else self.name(peer)
        return LostContact(
            f"lost contact with {who}: {error}", peer, silent="timed out" in str(error).lower()
        )

    # ------------------------------------------------------------- control plane

    def _send_header(self, lane: Lane, content: object) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        tag, control = _HEADER_TAGS[lane.value == ACTIVATION], self._alive().control
        for tensor in (torch.tensor([data.numel()]), data):
            try:
                work = control.send([tensor], lane.destination, tag)
            except RuntimeError as error:
                raise self._lost(lane.destination, error) from None
            self._sending.setdefault(lane, deque()).append((work, tensor, version_of(tensor)))

    def _receive_header(self, lane: Lane) -> Any:
        tag, control = _HEADER_TAGS[lane.value == ACTIVATION], self._alive().control
        length = torch.empty(1, dtype=torch.int64)
        try:
            control.recv([length], lane.source, tag).wait()
            data = torch.empty(int(length), dtype=torch.uint8)
            control.recv([data], lane.source, tag).wait()
        except RuntimeError as error:
            raise self._lost(lane.source, error) from None
        return pickle.loads(data.numpy().tobytes())

    def all_gather(self, items: Sequence[T]) -> list[T]:
        (item,) = items
        data = pickle.dumps(item)
        found = self._gather_bytes(len(data).to_bytes(8, "little") + data[: _ROOM - 8], _ROOM)
        lengths = [int.from_bytes(part[:8], "little") for part in found]
        if max(lengths) > _ROOM - 8:
            found = [bytes(8) + part for part in self._gather_bytes(data, max(lengths))]
        return [pickle.loads(part[8 : 8 + length]) for part, length in zip(found, lengths, strict=True)]

    def _gather_bytes(self, data: bytes, room: int) -> list[bytes]:
        mine = torch.zeros(room, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [part.numpy().tobytes() for part in self._gather_equal(mine, self._alive().control)]

    def _gather_equal(self, mine: Tensor, group: Any) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            group.allgather([parts], [mine]).wait()
        except RuntimeError as error:
            raise self._lost(None, error) from None
        return parts

    def gather(self, items: Sequence[T]) -> list[T] | None:
        (item,) = items
        control = self._alive().control
        try:
            if self.member != 0:
                data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
                parts = [torch.tensor([data.numel()]), data]
                for work in [control.send([part], 0, _GATHER_TAG) for part in parts]:
                    work.wait()
                return None
            lengths = [torch.empty(1, dtype=torch.int64) for _ in range(1, self.size)]
            works = [control.recv([one], rank, _GATHER_TAG) for rank, one in enumerate(lengths, start=1)]
            found = [item]
            for rank, (length, work) in enumerate(zip(lengths, works, strict=True), start=1):
                work.wait()
                part = torch.empty(int(length), dtype=torch.uint8)
                control.recv([part], rank, _GATHER_TAG).wait()
                found.append(pickle.loads(part.numpy().tobytes()))
        except RuntimeError as error:
            raise self._lost(None, error) from None
        return found

    # ------------------------------------------------------- collectives of tensors

    def across(self, member: int) -> Across:
        if self._across is None:
            self._across = DistributedAcross(self._alive(), self._wait)
        return self._across

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self._broadcast(tensor, source, self._alive().data, source)

    def _broadcast(self, tensor: Tensor, source: int, group: Any, root: int) -> Tensor:
        tensor = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = root
        try:
            group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise self._lost(source, error) from None
        return tensor

    def broadcast_value(self, value: Pytree, source: int) -> Pytree:
        tensors, layout = pack(value) if self.member == source else ([], None)
        described = self.all_gather([(layout, [Meta.of(tensor) for tensor in tensors])])
        layout, metas = described[source]
        assert layout is not None
        if self.member != source:
            tensors = [torch.empty(m.shape, dtype=m.dtype, device=self._device) for m in metas]
        return unpack([self._broadcast_bytes(tensor, source) for tensor in tensors], layout)

    def _broadcast_bytes(self, tensor: Tensor, source: int) -> Tensor:
        """As `broadcast`, of any dtype: gloo knows a few only."""
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.numel():
            groups = self._alive()
            flat = tensor.reshape(-1).view(torch.uint8)
            self._broadcast(flat, source, groups.within, source // groups.replicas)
        return tensor

    def all_gather_tensors(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        (tensor,) = tensors
        room = torch.zeros(max(sizes), dtype=tensor.dtype, device=self._device)
        room[: tensor.numel()] = tensor
        parts = self._gather_equal(room, self._alive().data)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        for lane in self._sending:
            self._reap(lane, 0)

    def reset(self) -> None:
        """Nothing can be taken back between processes: a failed call ends the pipeline (`fail`)."""

    def forget_shapes(self) -> None:
        self._shapes.clear()
        self._absent.clear()

    def fail(self, error: BaseException, where: str) -> BaseException | None:
        if self._groups is None:
            return None
        lost = isinstance(error, LostContact)
        if isinstance(error, LostContact):
            self._bulletin.miss(error)
        else:
            self._bulletin.post(f"{where}: {type(error).__name__}: {error}")
        self._sending.clear()
        self._posted.clear()
        forget_frames(error, os.path.dirname(pipe.__file__))
        self._hang_up()
        report = self._bulletin.verdict() if lost else ""
        self._bulletin.linger()
        if not lost:
            return None
        # A launcher calls the first process that ends the cause: after what it has to say, this one lets
        # others go.
        atexit.register(time.sleep, _AFTER_THE_CULPRIT_S)
        return PeerError(f"{report} (noticed by {where})")

    def close(self) -> None:
        if self._groups is not None:
            self._bulletin.leave()
            self._hang_up()

    def _hang_up(self) -> None:
        groups, self._groups, self._across = self._groups, None, None
        if groups is not None:
            groups.close()

    def _alive(self) -> Groups:
        if self._groups is None:
            raise PipelineError("this pipeline is closed")
        return self._groups


_NO_LAYOUT = Layout(None, ())


def _form(tensors: list[Tensor], forms: Sequence[Form]) -> None:
    """Gives tensors that have come in the form that they had where they left."""
    tensors[:] = [formed(tensor, form) for tensor, form in zip(tensors, forms, strict=True)]


def _words(meta: Meta) -> str:
    dtype = str(meta.dtype).removeprefix("torch.")
    return f"{dtype}{list(meta.shape)}{' with gradient' if meta.requires_grad else ''}"


def _calm_gloo() -> None:
    """Lets gloo's event loops yield to computation where the system allows it.

    They spin while a transfer is under way; under SCHED_BATCH the kernel stops favouring them over the
    threads that compute, which on a machine with no core to spare is worth more than the latency
    (benchmarks/overhead.py).
    """
    if not hasattr(os, "sched_setscheduler") or not os.path.isdir("/proc/self/task"):
        return
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as name:
                if name.read().startswith("gloo"):
                    os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass
