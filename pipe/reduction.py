"""From the gradients that replicas hold to a step of master weights, in buckets and shards."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, optim

from pipe.across import Pending
from pipe.errors import PipelineError
from pipe.optimization import Uses, widest
from pipe.optimizers import is_elementwise, is_observed, only
from pipe.shards import Held, Holding
from pipe.transport import Transport


class Reduced:
    """The gradients of the holdings that live in this process.

    Args:
        holdings: by member (`pipe.transport.Place`).
        replicas: of the pipeline.
        num_parameters: of the unsplit model.
    """

    def __init__(
        self,
        holdings: Mapping[int, Holding],
        *,
        replicas: int,
        num_parameters: int,
        checks_overflow: bool,
        device: torch.device,
    ) -> None:
        self._holdings = holdings
        self._replicas = replicas
        self._num_parameters = num_parameters
        self._checks_overflow = checks_overflow
        self._device = device
        self._norm_dtype = widest(held.bucket.sum_dtype.to_real() for held in self._held())

    def _held(self) -> Iterator[Held]:
        for holding in self._holdings.values():
            yield from holding.held

    def begin(self, *, check: bool) -> None:
        for holding in self._holdings.values():
            holding.checks = check
            for held in holding.held:
                held.begin()

    def finish(self) -> None:
        for holding in self._holdings.values():
            holding.finish()
        _wait([held.spread() for held in self._held()])

    def uses(self) -> Uses | None:
        if all(holding.is_alone for holding in self._holdings.values()):
            return None
        return {
            member: bytes(flag for held in holding.held for flag in held.used)
            for member, holding in self._holdings.items()
        }

    def hear(self, said: Sequence[Uses]) -> None:
        found = {member: use for part in said for member, use in part.items()}
        for member, holding in self._holdings.items():
            rank = member // self._replicas
            others = [use for other, use in found.items() if other // self._replicas == rank]
            used = iter([any(flags) for flags in zip(*others, strict=True)])
            for held in holding.held:
                held.used = [next(used) for _ in held.used]

    def scale(self, factor: float) -> Tensor | None:
        found = None
        for held in self._held():
            gradient = held.gradient
            if gradient is None:
                continue
            if not self._checks_overflow:
                if factor != 1.0:
                    gradient.mul_(factor)
                continue
            here = torch.zeros(1, device=gradient.device)
            multiplier = torch.full((1,), factor, device=gradient.device)
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            torch._amp_foreach_non_finite_check_and_unscale_([real], here, multiplier)
            found = here.to(self._device) if found is None else found + here.to(self._device)
        return found

    def norm(self, transport: Transport) -> Tensor:
        squares = torch.zeros(self._num_parameters, dtype=torch.float64, device=self._device)
        for member, holding in self._holdings.items():
            if holding.sharding.zero or not member % self._replicas:  # else replica 0 says the same
                for held in holding.held:
                    _add_squares(squares, held)
        everyone = transport.all_gather_tensors([squares], [self._num_parameters] * transport.size)
        # In the unsplit order, so that the sum is the same for every partition.
        return torch.stack(everyone).sum(0).sum().sqrt().to(self._norm_dtype)

    def clip(self, limit: float, norm: Tensor) -> None:
        coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for held in self._held():
            if held.gradient is not None:
                held.gradient.mul_(coefficient.to(held.gradient.device))

    def step(self, optimizer: optim.Optimizer) -> None:
        self._check_groups(optimizer)
        there = [held for held in self._held() if held.trains and held.gradient is not None]
        if is_elementwise(optimizer) and not is_observed(optimizer):
            pending = _step_by_bucket(optimizer, there)
        else:
            pending = _step_at_once(optimizer, there)
        _wait(pending)

    def _check_groups(self, optimizer: optim.Optimizer) -> None:
        """A parameter that came later has no master weights, and would never be stepped with."""
        known = sum(len(held.masters) for held in self._held())
        found = sum(len(group["params"]) for group in optimizer.param_groups)
        if found != known:
            raise PipelineError(
                f"the optimizer was built with {known} parameters (or shards of them) and has {found} now: "
                "with dp, amp or zero it gets all at the start (requires_grad_(False) may freeze some later)"
            )

    def clear(self) -> None:
        for holding in self._holdings.values():
            holding.clear()


def _step_by_bucket(optimizer: optim.Optimizer, there: Sequence[Held]) -> list[Pending]:
    """One bucket after the other: what a step needs besides is no larger than a bucket.

    fetch 0 | fetch 1, step 0, publish 0 | fetch 2, step 1, publish 1 | ...
    """
    pending = []
    fetched = [_fetch(held) for held in there[:1]]
    for index, held in enumerate(there):
        fetched += [_fetch(held) for held in there[index + 1 : index + 2]]
        held.home.wait()
        held.give(fetched.pop(0))
        assert held.bucket.group is not None
        with only(optimizer, held.bucket.group, held.masters):
            optimizer.step()
        held.take_back()
        pending.append(held.publish())
        held.home.settle_state(optimizer, held.masters)
    return pending


def _step_at_once(optimizer: optim.Optimizer, there: Sequence[Held]) -> list[Pending]:
    """For optimizers that may count their steps."""
    for held in there:
        gradient = held.gradient
        assert gradient is not None
        held.give(gradient.to("cpu", copy=True) if held.home.offloads else gradient)
    optimizer.step()
    pending = []
    for held in there:
        held.take_back()
        pending.append(held.publish())
        held.home.settle_state(optimizer, held.masters)
    return pending


def _fetch(held: Held) -> Tensor:
    assert held.gradient is not None
    return held.home.fetch(held.gradient)


def _wait(pending: Sequence[Pending]) -> None:
    for one in pending:
        is_done = one()
        assert is_done, "the replicas of this process have all come here"


@torch.no_grad()
def _add_squares(squares: Tensor, held: Held) -> None:
    gradient = held.gradient
    if gradient is None:
        return
    used = dict(zip(held.bucket.slots, held.used, strict=True))
    pieces = [piece for piece in held.pieces if used[piece.slot]]
    if not pieces:
        return
    views = [held.gradient_of(piece, gradient) for piece in pieces]
    views = [torch.view_as_real(view) if view.is_complex() else view for view in views]
    norms = torch.stack(torch._foreach_norm(views, 2.0, dtype=torch.float64)).to(squares.device)
    indices = torch.tensor([piece.slot.index for piece in pieces], device=squares.device)
    squares.index_add_(0, indices, norms.square())
