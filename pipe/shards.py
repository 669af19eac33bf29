"""What one rank of one replica holds of its parameters: gradients, master weights, and under ZeRO its shards.

Bytes a parameter under half-precision AdamW, d replicas, from the last gradient to the step:

              parameters    gradient      master weights, two moments
    zero=0        2             4                12                       18
    zero=1        2             4                12 / d                   6 + 12 / d
    zero=2        2             4 / d            12 / d                   2 + 16 / d
    zero=3        0             4 / d            12 / d                   16 / d        and what is unsharded

(Rajbhandari et al., arXiv 1910.02054, whose gradients are halves.) Gradients are added up, over microbatches
and then over replicas, in fp32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipe.across import Across, Pending, done, share
from pipe.buckets import Bucket, Piece
from pipe.errors import PipelineError
from pipe.offload import Home

# Reductions under way before the oldest is waited for: each holds a bucket of gradients.
_UNDER_WAY = 2
# Of a flat buffer's storage, where nobody else has one: the tensor's, and the one that asks.
_OUR_REFERENCES = 2


class Sharding(NamedTuple):
    """How parameters are held.

    Args:
        zero: what is sharded: 1 the optimizer's state, 2 gradients too, 3 parameters too.
        reduce_every: microbatches between two reductions (`zero` 2 and 3).
    """

    zero: int
    reduce_every: int

    @property
    def accumulates(self) -> bool:
        """Whether all gradients are kept, in full, until they are reduced."""
        return self.zero < 2 or self.reduce_every > 1


class Held:
    """One bucket, as one replica holds it.

    Args:
        parameters: one for each of the bucket's slots; they become views of what is held here.
        across: the replicas that hold the same.
        home: where master weights live.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        across: Across,
        sharding: Sharding,
        home: Home,
    ) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self.across = across
        self.home = home
        self._sharding = sharding
        mine = range(bucket.cuts[across.index], bucket.cuts[across.index + 1])
        self._share = mine if sharding.zero else range(bucket.size)
        self.pieces = list(bucket.pieces(self._share))
        self._device = parameters[0].device
        # The optimizer has only those parameters that it was made with.
        self.trains = bucket.group is not None
        self.has_copies = False  # whether other replicas of this process have to follow
        self._rests = False  # ZeRO-3: whether the parameters are stand-ins
        self._weights, self._master = self._hold()
        self.masters = list(self._made_masters())
        self._unshards = 0
        self._arrival: Pending = done
        self.note_versions()
        # Gradients. `_full` is as long as the bucket, `_shard` as this replica's share of it.
        self._full: Tensor | None = None
        self._shard: Tensor | None = None
        self._shard_is_empty = True
        self._is_due = False  # whether a parameter trained in any call of this update
        self._is_reduced = False
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._in_place: dict[int, Tensor] = {}  # of those, what autograd adds to by itself
        self.used = [False] * len(parameters)

    # ------------------------------------------------------------- parameters

    def _hold(self) -> tuple[Tensor | None, Tensor | None]:
        """The parameters' flat buffer and this replica's master weights, where there are such."""
        zero, bucket = self._sharding.zero, self.bucket
        is_half = bucket.dtype != bucket.sum_dtype
        weights = master = None
        if zero == 3 or (zero and self.trains):
            weights = torch.zeros(bucket.size, dtype=bucket.dtype, device=self._device)
        if self.trains and (is_half or zero == 3 or self.home.offloads):
            master = self._filled(self.home.empty(len(self._share), bucket.sum_dtype))
        elif zero == 3:
            master = self._filled(torch.empty(len(self._share), dtype=bucket.dtype, device=self._device))
        with torch.no_grad():
            for parameter, slot in zip(self.parameters, bucket.slots, strict=True):
                if weights is not None:
                    parameter.data = slot.view(weights).copy_(parameter)
                elif parameter.dtype != bucket.dtype:
                    parameter.data = parameter.detach().to(bucket.dtype)
        self._is_apart = master is not None
        if master is None and weights is not None and self.trains:
            master = weights[self._share.start : self._share.stop]
        if zero == 3:
            assert weights is not None
            self._free(weights)
        return weights, master

    def _filled(self, flat: Tensor) -> Tensor:
        """This replica's share of the parameters, as they are before they are cast."""
        self._fill(flat.zero_(), self.parameters)
        return flat

    def _fill(self, flat: Tensor, given: Sequence[Tensor]) -> None:
        """Puts this replica's share of what is given, one for each slot, into a flat tensor."""
        values = dict(zip(self.bucket.slots, given, strict=True))
        for piece in self.pieces:
            slot = piece.slot
            elements = slot.elements(values[slot], flat.dtype)
            start = piece.start - self._share.start
            flat[start : start + piece.stop - piece.start].copy_(
                elements[piece.start - slot.start : piece.stop - slot.start]
            )
        self.home.settle([flat])

    def _made_masters(self) -> Iterator[nn.Parameter]:
        """What the optimizer gets: one for each piece."""
        if not self.trains:
            return
        if self._master is None:
            yield from self.parameters
            return
        parameters = dict(zip(self.bucket.slots, self.parameters, strict=True))
        for piece in self.pieces:
            master = nn.Parameter(piece.view(self._master, self._share.start))
            master.__dict__.update(parameters[piece.slot].__dict__)  # an optimizer may look at attributes
            yield master

    @torch.inference_mode(False)
    def unshard(self) -> Pending:
        """Begins to gather the parameters (ZeRO-3)."""
        self._unshards += 1
        if self._unshards > 1:  # a parameter of two stages, for the other of which it is here
            return self._arrival
        weights, master = self._weights, self._master
        assert weights is not None and master is not None
        weights.untyped_storage().resize_(weights.numel() * weights.element_size())
        share(weights, self.bucket.cuts, self.across.index).copy_(master)
        self.home.settle([master])
        if self._rests:
            self._rests = False
            for parameter, slot in zip(self.parameters, self.bucket.slots, strict=True):
                parameter.data = slot.view(weights)
        self._arrival = self.across.all_gather(weights, self.bucket.cuts)
        return self._arrival

    def reshard(self) -> None:
        """Gives the gathered parameters' memory back; what autograd keeps of it fills at the next unshard."""
        self._unshards -= 1
        if not self._unshards:
            assert self._weights is not None
            self._weights.untyped_storage().resize_(0)

    @torch.inference_mode(False)
    def rest(self) -> None:
        """Between calls: whoever reads a parameter shall find its shape and NaNs, not freed memory."""
        if self._sharding.zero == 3 and not self._rests:
            assert self._weights is not None
            self._unshards = 0
            self._free(self._weights)

    def _free(self, weights: Tensor) -> None:
        self._rests = True
        for parameter in self.parameters:
            nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)
        storage = weights.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > _OUR_REFERENCES:
            # Somebody has kept a view of a weight, who shall find NaN and no freed memory.
            storage.resize_(weights.numel() * weights.element_size())
            weights.fill_(float("nan"))
            self._weights = weights = torch.empty_like(weights)
            storage = weights.untyped_storage()
        storage.resize_(0)

    def forget(self) -> None:
        """Lets go of what is under way."""
        self._arrival = done

    def note_versions(self) -> None:
        """After a call: what is written to the parameters from now on, others write."""
        self._versions = [parameter._version for parameter in self.parameters]

    def written(self, *, in_call: bool = False) -> str | None:
        """A parameter that others have written to since, though it is only a copy of what is trained.

        Args:
            in_call: in a call replicas write different things.
        """
        if self._is_apart or self.has_copies or (in_call and self.across.size > 1):
            for slot, parameter, version in zip(
                self.bucket.slots, self.parameters, self._versions, strict=True
            ):
                if parameter._version != version:
                    return slot.name
        return None

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Takes values for all parameters, in any precision, by their names in the unsplit model."""
        given = [values[slot.name] for slot in self.bucket.slots]
        with torch.no_grad():
            if self._is_apart:
                assert self._master is not None
                self._fill(self._master, given)
            if self._sharding.zero < 3:
                for parameter, value in zip(self.parameters, given, strict=True):
                    parameter.copy_(value)
        self.note_versions()

    # -------------------------------------------------------------- gradients

    def collect(self, *, leave: bool = False) -> None:
        """Takes what a backward has put into `.grad`, and adds it up.

        Args:
            leave: leave it there where the bucket's reduction comes next, and where it takes no memory.
        """
        if leave and not self._sharding.accumulates and len(self.bucket.stages) == 1:
            return
        fresh, there, added, totals = [], [], [], []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or gradient is self._in_place.get(index):
                continue
            parameter.grad = None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            total = self._sums[index]
            if total is not None:
                totals.append(total)
                added.append(gradient)
                continue
            self.used[index] = True
            if self._sharding.accumulates:
                self._sums[index] = total = self.bucket.slots[index].view(self._gradient())
                fresh.append(total)
                there.append(gradient)
                if total.dtype == parameter.dtype:
                    # While a gradient is in the cache, as autograd has it, adding it up costs least.
                    parameter.grad = self._in_place[index] = total
            else:
                self._sums[index] = gradient.to(self.bucket.sum_dtype)
        if fresh:
            torch._foreach_copy_(fresh, there)
        if totals:
            torch._foreach_add_(totals, added)

    def overflowing(self) -> str | None:
        """The first parameter with a gradient that isn't finite, before it is collected."""
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return slot.name
        return None

    def reduce(self, spares: "Spares") -> "Reduction | None":
        """Begins to add up what all replicas have collected since the last reduction."""
        if not self._is_due:
            return None  # on no replica
        self._is_reduced = True
        if self._sharding.accumulates:
            flat = self._gradient()
            self.collect()
            for index, slot in enumerate(self.bucket.slots):
                if self._sums[index] is None:
                    slot.view(flat).zero_()
        else:
            flat = self._in_transit(spares)
        if self._sharding.zero >= 2:
            self._sums = [None] * len(self.parameters)
            self._release()
            self._full = None  # what comes meanwhile needs another buffer
        return Reduction(self, self.across.reduce_scatter(flat, self.bucket.cuts), flat)

    def _release(self) -> None:
        """Takes the sums from autograd."""
        for index in self._in_place:
            self.parameters[index].grad = None
        self._in_place.clear()

    def _in_transit(self, spares: "Spares") -> Tensor:
        """This microbatch's gradients in a buffer of their own."""
        flat = spares.take(self.bucket, self._device)
        end = 0
        for index, (slot, parameter) in enumerate(zip(self.bucket.slots, self.parameters, strict=True)):
            view, total, gradient = slot.view(flat), self._sums[index], parameter.grad
            flat[end : slot.start].zero_()
            end = slot.stop
            if total is not None:
                view.copy_(total)
            elif gradient is None:
                view.zero_()
            if gradient is not None:
                self.used[index] = True
                parameter.grad = None
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                view.copy_(gradient) if total is None else view.add_(gradient)
        flat[end:].zero_()
        return flat

    def add(self, flat: Tensor) -> None:
        """ZeRO-2 and 3: adds a reduction's result to this replica's share of the gradient."""
        if self._sharding.accumulates and self._full is None:
            self._full = flat
        reduced = share(flat, self.bucket.cuts, self.across.index)
        if self._shard is None:
            self._shard = torch.empty_like(reduced)
        if self._shard_is_empty:
            self._shard.copy_(reduced)
        else:
            self._shard.add_(reduced)
        self._shard_is_empty = False

    def spread(self) -> Pending:
        """zero=0: begins to give each replica the sums that the others have."""
        if self._sharding.zero or not self._is_reduced:
            return done
        return self.across.all_gather(self._gradient(), self.bucket.cuts)

    @property
    def gradient(self) -> Tensor | None:
        """The sum over all replicas, as far as this one has it to step with; None before any came."""
        if self._sharding.zero >= 2:
            return None if self._shard_is_empty else self._shard
        if self._full is None or not self._is_reduced:
            return None
        return self._full[self._share.start : self._share.stop]

    def gradient_of(self, piece: Piece, flat: Tensor) -> Tensor:
        """A piece's, in `gradient` or in a copy of it."""
        return piece.view(flat, self._share.start)

    def begin(self) -> None:
        """Before a call."""
        self._is_due = self._is_due or any([parameter.requires_grad for parameter in self.parameters])

    def clear(self) -> None:
        """Forgets all gradients."""
        self.home.reset()
        self._is_due = self._is_reduced = False
        self._in_place.clear()
        self._sums = [None] * len(self.parameters)
        self.used = [False] * len(self.parameters)
        self._shard_is_empty = True
        for parameter in self.parameters:
            parameter.grad = None

    def _gradient(self) -> Tensor:
        if self._full is None:
            self._full = torch.zeros(self.bucket.size, dtype=self.bucket.sum_dtype, device=self._device)
        return self._full

    # ----------------------------------------------------------------- update

    def give(self, flat: Tensor) -> None:
        """Lets the optimizer find the gradients, in `gradient` or a copy of it."""
        used = dict(zip(self.bucket.slots, self.used, strict=True))
        for master, piece in zip(self.masters, self._stepped(), strict=True):
            master.grad = self.gradient_of(piece, flat) if used[piece.slot] else None

    def take_back(self) -> None:
        """After the step."""
        if self._master is not None:
            for master in self.masters:
                master.grad = None

    def publish(self) -> Pending:
        """Brings stepped master weights to the parameters of all replicas."""
        weights, master = self._weights, self._master
        if not self.trains or self._sharding.zero == 3 or master is None:
            return done
        if weights is None:
            views = [slot.view(master) for slot in self.bucket.slots]
            torch._foreach_copy_([parameter.data for parameter in self.parameters], views)
            return done
        own = share(weights, self.bucket.cuts, self.across.index)
        if own.data_ptr() != master.data_ptr():
            own.copy_(master, non_blocking=True)
        return self.across.all_gather(weights, self.bucket.cuts)

    def _stepped(self) -> Sequence[Piece]:
        return self.pieces if self.masters else ()

    # ---------------------------------------------------------------- reading

    @property
    def is_scattered(self) -> bool:
        """Whether no replica has all of what a state dict needs."""
        return bool(self._sharding.zero) and self._master is not None and not self._is_in_weights

    @property
    def _is_in_weights(self) -> bool:
        return self._sharding.zero < 3 and self.bucket.dtype == self.bucket.sum_dtype

    def values(self) -> tuple[Pending, dict[str, Tensor]]:
        """Each parameter in the precision that it is trained in; a collective where that `is_scattered`."""
        if self._master is None or (self._sharding.zero and self._is_in_weights):
            pairs = zip(self.bucket.slots, self.parameters, strict=True)
            return done, {slot.name: parameter.detach() for slot, parameter in pairs}
        flat, pending = self._master, done
        if self._sharding.zero:
            flat = torch.empty(self.bucket.size, dtype=self._master.dtype, device=self._device)
            share(flat, self.bucket.cuts, self.across.index).copy_(self._master)
            self.home.settle([self._master])
            pending = self.across.all_gather(flat, self.bucket.cuts)
        return pending, {slot.name: slot.view(flat).detach() for slot in self.bucket.slots}


class Reduction(NamedTuple):
    """One that is under way."""

    held: Held
    pending: Pending
    flat: Tensor


class Spares:
    """Buffers of reductions that are over: in a step there are many, each of some bucket's size."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, bucket: Bucket, device: torch.device) -> Tensor:
        """Room for a bucket's sums, with anything in it."""
        for index, buffer in enumerate(self._buffers):
            if buffer.numel() >= bucket.size and (buffer.dtype, buffer.device) == (bucket.sum_dtype, device):
                return self._buffers.pop(index)[: bucket.size]
        return torch.empty(bucket.size, dtype=bucket.sum_dtype, device=device)

    def give(self, flat: Tensor) -> None:
        """Gives back what was taken."""
        self._buffers.append(flat if flat._base is None else flat._base)

    def clear(self) -> None:
        self._buffers.clear()


class Holding:
    """All buckets that one rank of one replica holds."""

    def __init__(self, held: Sequence[Held], sharding: Sharding) -> None:
        self.held = held
        self.sharding = sharding
        self.by_stage: Mapping[int, list[Held]] = {
            stage: [one for one in held if stage in one.bucket.stages]
            for stage in sorted({stage for one in held for stage in one.bucket.stages})
        }
        self.checks = False  # whether a gradient that isn't finite is an error
        self._arriving: dict[int, list[Pending]] = {}
        self._under_way: list[Reduction] = []
        self._spares = Spares()

    @property
    def is_alone(self) -> bool:
        """Whether there are no other replicas."""
        return all(held.across.size == 1 for held in self.held)

    def collect(self, stage: int, microbatch: int, *, leave: bool) -> None:
        """Takes a stage's gradients after an action of its backward.

        Raises:
            PipelineError: one isn't finite, where that can't be helped.
        """
        for held in self.by_stage.get(stage, ()):
            if self.checks:
                name = held.overflowing()
                if name is not None:
                    raise PipelineError(
                        f"the gradient of {name} (stage {stage}) overflows fp16 in microbatch {microbatch}, "
                        "and the loss scale is 1 already: amp=bf16 has fp32's range, and keep_fp32= takes "
                        "the layers that need it out of half precision"
                    )
            held.collect(leave=leave)

    def reduce(self, buckets: Iterable[Held]) -> None:
        """Begins the reductions of some buckets."""
        for held in buckets:
            if self.sharding.zero >= 2:  # each holds a buffer of its own
                self.is_settled(leave=_UNDER_WAY - 1)
            reduction = held.reduce(self._spares)
            if reduction is not None:
                self._under_way.append(reduction)

    def is_settled(self, *, leave: int = 0) -> bool:
        """Whether no more than some reductions are under way. (Between processes: waits until it is so.)"""
        while len(self._under_way) > leave:
            held, pending, flat = self._under_way[0]
            if not pending():
                return False
            del self._under_way[0]
            if self.sharding.zero >= 2:
                held.add(flat)
            if not self.sharding.accumulates:
                self._spares.give(flat)
        return True

    def finish(self) -> None:
        """After the last backward: all reductions are over, and their buffers not needed."""
        if self.sharding.zero < 2 and self.is_alone:
            self.reduce(self.held)  # no plan says so
        settled = self.is_settled()
        assert settled, "all members of this process are through their programs"
        self._spares.clear()

    def may_reduce(self) -> bool:
        """Whether the next reductions may start."""
        return self.sharding.zero < 2 or self.is_settled(leave=_UNDER_WAY)

    def unshard(self, stage: int) -> None:
        self._arriving[stage] = [held.unshard() for held in self.by_stage.get(stage, ())]

    def has_arrived(self, stage: int) -> bool:
        """Whether a stage's parameters are there."""
        arriving = self._arriving.get(stage, ())
        while arriving:
            if not arriving[0]():
                return False
            del arriving[0]
        return True

    def reshard(self, stage: int) -> None:
        for held in self.by_stage.get(stage, ()):
            held.reshard()

    def forget(self) -> None:
        """What a call that failed has begun: works that are kept keep the connections."""
        self._under_way.clear()
        for held in self.held:
            held.forget()

    def rest(self) -> None:
        self._arriving.clear()
        for held in self.held:
            held.rest()

    def clear(self) -> None:
        self._under_way.clear()
        self._spares.clear()
        for held in self.held:
            held.clear()
