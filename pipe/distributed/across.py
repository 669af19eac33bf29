"""The collectives of a rank's replicas between processes: over gloo's point to point, or NCCL's own."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pipe.across import GATHER, REDUCE, Pending, done, note_sent, share, sum_in_order
from pipe.distributed.groups import Groups

Wait: TypeAlias = Callable[[Any, int | None], None]

# gloo's own reduce_scatter moves as many bytes as an all_reduce, adds halves up in halves, and in an order of
# its own. Parts that are sent to whom they concern are half as many, and land where they are needed.
_TAGS = {REDUCE: 6, GATHER: 7}
_ALIGN_TAG = 8


class DistributedAcross:
    """This process among the replicas of its rank.

    Args:
        wait: waits for a transfer with a member (or all), and says who is to blame where it fails.
    """

    def __init__(self, groups: Groups, wait: Wait) -> None:
        self._groups = weakref.ref(groups)  # gloo hangs up once nothing else refers to its groups
        self._wait = wait
        self.size = groups.replicas
        rank, self.index = divmod(groups.member, self.size)
        self._first = rank * self.size
        self.sent: Counter[str] = Counter()

    def reduce_scatter(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        if self.size == 1:
            return done
        note_sent(self.sent, REDUCE, flat, cuts, self.index)
        if flat.is_cuda:
            return self._nccl_reduce(flat, cuts)
        own = share(flat, cuts, self.index)
        parts = [own if replica == self.index else torch.empty_like(own) for replica in range(self.size)]
        works = self._exchange(REDUCE, [share(flat, cuts, replica) for replica in range(self.size)], parts)
        return _Finish(works, self._wait, partial(sum_in_order, parts, own))

    def all_gather(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        if self.size == 1:
            return done
        note_sent(self.sent, GATHER, flat, cuts, self.index)
        if flat.is_cuda:
            return self._nccl_gather(flat, cuts)
        parts = [share(flat, cuts, replica) for replica in range(self.size)]
        own = [parts[self.index]] * self.size
        return _Finish(self._exchange(GATHER, own, parts), self._wait)

    def align(self, tensors: Sequence[Tensor]) -> None:
        """Gives all replicas what the first one has in these."""
        if self.size == 1:
            return
        for tensor in tensors:
            there = tensor.detach()
            whole = there.contiguous()
            works: list[tuple[Any, int | None]]
            if there.is_cuda:
                options = dist.BroadcastOptions()
                options.rootRank = 0
                works = [(self._alive().across.broadcast([whole], options), None)]
            elif self.index == 0:
                others = range(self._first + 1, self._first + self.size)
                works = [(self._control.send([_bytes(whole)], peer, _ALIGN_TAG), peer) for peer in others]
            else:
                works = [(self._control.recv([_bytes(whole)], self._first, _ALIGN_TAG), self._first)]
            _Finish(works, self._wait)()
            if whole.data_ptr() != there.data_ptr():
                there.copy_(whole)

    def _exchange(
        self, kind: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> list[tuple[Any, int | None]]:
        """Each other replica gets its part, and gives one."""
        control, tag = self._control, _TAGS[kind]
        others = [replica for replica in range(self.size) if replica != self.index]
        works: list[tuple[Any, int | None]] = []
        try:
            for replica in others:
                if incoming[replica].numel():
                    peer = self._first + replica
                    works.append((control.recv([_bytes(incoming[replica])], peer, tag), peer))
            for replica in others:
                if outgoing[replica].numel():
                    peer = self._first + replica
                    works.append((control.send([_bytes(outgoing[replica])], peer, tag), peer))
        except RuntimeError as error:
            works.append((_Broken(error), None))
        return works

    def _nccl_reduce(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        group, own = self._alive().across, share(flat, cuts, self.index)
        if _are_even(cuts):
            work = group._reduce_scatter_base(own, flat, dist.ReduceScatterOptions())
            return _Finish([(work, None)], self._wait)
        sizes = [cuts[replica + 1] - cuts[replica] for replica in range(self.size)]
        there = flat.new_empty(self.size * own.numel())
        work = group.alltoall_base(there, flat, [own.numel()] * self.size, sizes, dist.AllToAllOptions())
        parts = list(there.view(self.size, -1))
        return _Finish([(work, None)], self._wait, partial(sum_in_order, parts, own))

    def _nccl_gather(self, flat: Tensor, cuts: Sequence[int]) -> Pending:
        group, own = self._alive().across, share(flat, cuts, self.index)
        if _are_even(cuts):
            return _Finish([(group._allgather_base(flat, own), None)], self._wait)
        sizes = [cuts[replica + 1] - cuts[replica] for replica in range(self.size)]
        copies = own.repeat(self.size)
        work = group.alltoall_base(flat, copies, sizes, [own.numel()] * self.size, dist.AllToAllOptions())
        return _Finish([(work, None)], self._wait, partial(len, copies))  # keeps them until it is done

    @property
    def _control(self) -> Any:
        return self._alive().control

    def _alive(self) -> Groups:
        groups = self._groups()
        assert groups is not None
        return groups


class _Finish:
    """Waits for transfers, once, and then does what is left to do."""

    def __init__(
        self, works: list[tuple[Any, int | None]], wait: Wait, then: Callable[[], object] | None = None
    ) -> None:
        self._works, self._wait, self._then = works, wait, then

    def __call__(self) -> bool:
        works, self._works = self._works, []
        for work, peer in works:
            self._wait(work, peer)
        then, self._then = self._then, None
        if then is not None:
            with torch.no_grad():
                then()
        return True


class _Broken:
    """A transfer that could not begin."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def _bytes(tensor: Tensor) -> Tensor:
    """gloo knows a few dtypes only."""
    return tensor.reshape(-1).view(torch.uint8)


def _are_even(cuts: Sequence[int]) -> bool:
    return all(cut * (len(cuts) - 1) == index * cuts[-1] for index, cut in enumerate(cuts))
