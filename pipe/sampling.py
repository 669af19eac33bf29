"""Which samples of each global batch are a replica's?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler


class BatchShard(Sampler[list[int]]):
    """A batch sampler: one replica's share of each batch of the whole data set.

    The batches, and so the samples of each step, don't depend on the number of replicas. Shares differ by at
    most one sample, the larger ones first. A last batch with fewer samples than replicas is left out.

    Args:
        batch_size: of the global batch.
        share, shares: which of how many shares is this process's.
        replicas: of the pipeline, which share what a process gets.
        shuffle: draw another order in each epoch (`set_epoch`), the same in all processes.
        drop_last: leave out a last batch that isn't full.

    Raises:
        ValueError: a batch that can't give every replica a sample.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        share: int,
        shares: int,
        *,
        replicas: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        if batch_size < replicas:
            raise ValueError(f"batch_size={batch_size} for {replicas} replicas: each needs a sample")
        self._order: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed
        )
        self._batch_size = batch_size
        self._share, self._shares = share, shares
        self._least = batch_size if drop_last else replicas

    def set_epoch(self, epoch: int) -> None:
        """Before each epoch, so that it has an order of its own."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.tensor(list(self._order))
        for batch in torch.split(order, self._batch_size):
            if len(batch) >= self._least:
                yield batch.tensor_split(self._shares)[self._share].tolist()

    def __len__(self) -> int:
        full, rest = divmod(len(self._order), self._batch_size)
        return full + (rest >= self._least)
