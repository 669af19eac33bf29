"""Turns a DeviceMesh, or the world, into the groups of one pipeline; nothing else knows global ranks."""

import atexit
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from pipe.agreement import digest
from pipe.errors import PeerError
from pipe.transport import Lane, member_name

# The pipelines over some ranks are numbered alike on all of them, since all construct them in the same order.
_serials: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)


def world_size(mesh: DeviceMesh | None) -> int:
    """How many processes a pipeline would span, all replicas together; 1 means that it lives in this one.

    Raises:
        ValueError: a mesh without a `pp` dimension.
    """
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if "pp" not in names:
            raise ValueError(f"mesh= needs a dimension named 'pp'; it has {list(names)}")
        return mesh["pp"].size() * (mesh_replicas(mesh) or 1)
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def mesh_replicas(mesh: DeviceMesh | None) -> int | None:
    """The size of a mesh's `dp` dimension, 1 where it has none; None without a mesh."""
    if mesh is None:
        return None
    return mesh["dp"].size() if "dp" in (mesh.mesh_dim_names or ()) else 1


def checked_device(device: torch.device | str | None, world: int) -> torch.device:
    """What was asked for, or else cuda:LOCAL_RANK (all GPUs for a process that is the world), or the CPU.

    Raises:
        ValueError: a GPU where there is none.
    """
    if device is not None:
        chosen = torch.device(device)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}, but torch finds no CUDA device here")
        return chosen
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if world > 1 else torch.device("cuda")


class Groups:
    """The process groups of one pipeline, and which member (`pipe.transport.Place`) this process is in it.

    A world without a mesh is laid out as a mesh ("pp", "dp") would be: the replicas of a rank are neighbours.

    They are made apart from torch's registry of groups, on a store prefix of their own: closing them wakes
    whoever waits in them and disturbs nobody else, and other pipelines of the same world aren't asked.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device, timeout: float) -> None:
        self.timeout = timeout
        self._timeout = timedelta(seconds=timeout)
        self._on_cpu = device.type == "cpu"
        if not self._on_cpu:
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("gloo" if self._on_cpu else "cpu:gloo,cuda:nccl", timeout=self._timeout)
            atexit.register(_leave_world)
        members = _members(mesh)
        self.member = members.index(dist.get_rank())
        self.size = len(members)
        self.replicas = 1  # until `open` says more
        scope = f"pipe/{digest(members)}/{next(_serials[tuple(members)])}"
        self.store = PrefixStore(scope, dist.distributed_c10d._get_default_store())
        everyone = range(self.size)
        self.store.set(f"here/{self.member}", "")
        try:
            self.control = self._gloo("control", everyone)
        except RuntimeError as error:
            away = [rank for rank in everyone if not self.store.check([f"here/{rank}"])]
            who = f"rank {away[0]}" if len(away) == 1 else f"ranks {away}"
            raise PeerError(f"{who} built no pipeline within {timeout:g} s (timeout={timeout:g})") from error
        # On CPUs one gloo group serves everything: each group costs threads, which spin.
        self.data = self.control if self._on_cpu else self._nccl("data", everyone)
        self._lanes: dict[Lane, tuple[Any, int, int]] = {}
        self.within = self.data  # the ranks of this replica
        self.across: Any = None  # under NCCL, the replicas of this rank

    def name(self, member: int) -> str:
        """A member in words."""
        return member_name(self.replicas, member)

    def open(self, lanes: Sequence[Lane], replicas: int) -> None:
        """Gives every channel of this member its communicator, in an order that is the same everywhere.

        Under NCCL each channel is a communicator of its own: one shared by both directions would run their
        transfers in the order of posting and close cycles. gloo keeps channels apart by tag.
        """
        self.replicas = replicas
        if replicas > 1:
            rank, replica = divmod(self.member, replicas)
            inside = range(replica, self.size, replicas)
            self.within = (self._gloo if self._on_cpu else self._nccl)(f"replica-{replica}", inside)
            if not self._on_cpu:
                self.across = self._nccl(f"rank-{rank}", range(rank * replicas, (rank + 1) * replicas))
        for lane in sorted(lanes):
            ends = sorted((lane.source, lane.destination))
            if self.member not in ends:
                continue
            if self._on_cpu:
                self._lanes[lane] = (self.control, lane.source, lane.destination)
            else:
                name = f"{lane.source}-{lane.destination}-{lane.value}"
                self._lanes[lane] = (
                    self._nccl(name, ends),
                    ends.index(lane.source),
                    ends.index(lane.destination),
                )

    def lane(self, lane: Lane) -> tuple[Any, int, int]:
        """A channel's group, and its source and destination as that group counts ranks."""
        return self._lanes[lane]

    def close(self) -> None:
        """Lets go of the groups; gloo hangs up once nothing else refers to them."""
        groups = [group for group, _, _ in self._lanes.values()]
        self._lanes.clear()
        if not self._on_cpu:
            groups += [group for group in (self.data, self.within, self.across) if group is not None]
            for group in {id(group): group for group in groups}.values():
                group.abort()
        del groups, self.data, self.control, self.within, self.across

    # A ProcessGroupGloo is built as new_group would build it. new_group itself names a group after its
    # members: a second pipeline of the same ranks would find the first one's addresses in the store.

    def _gloo(self, name: str, members: Sequence[int]) -> Any:
        store = PrefixStore(name, self.store)
        return dist.ProcessGroupGloo(store, members.index(self.member), len(members), self._timeout)

    def _nccl(self, name: str, members: Sequence[int]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = PrefixStore(name, self.store)
        return dist.ProcessGroupNCCL(store, members.index(self.member), len(members), options)


class Closing(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


_open: "weakref.WeakSet[Closing]" = weakref.WeakSet()


def close_at_exit(transport: Closing) -> None:
    """Lets a script end without closing its pipelines: they hang up in order."""
    if not _open:
        atexit.register(_close_all)
    _open.add(transport)


def _close_all() -> None:
    for transport in list(_open):
        transport.close()


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _members(mesh: DeviceMesh | None) -> list[int]:
    """The global ranks of a pipeline's members, in their order."""
    if mesh is None:
        return list(range(dist.get_world_size()))
    names, here = mesh.mesh_dim_names, mesh.get_coordinate()
    assert names is not None and here is not None
    # What this process's other coordinates (a tensor-parallel one, say) leave of the mesh.
    left = mesh.mesh[
        tuple(slice(None) if n in ("pp", "dp") else at for n, at in zip(names, here, strict=True))
    ]
    if "dp" in names and names.index("dp") < names.index("pp"):
        left = left.t()
    return [int(rank) for rank in left.reshape(-1)]
