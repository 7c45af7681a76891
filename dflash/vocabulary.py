"""A sampled head: the whole vocabulary's softmax at the price of a part of it.

All rows that can be a label stay; of the others a few are drawn anew each step, and each drawn one
stands for its share of them in the sum under the softmax (its logit gets `log(others / drawn)`).
That sum is then right on average, so every token of the vocabulary is pushed down in turn; dropping
the rare ones instead would let the deployed full head propose tokens never trained against.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from .loss import Head


class SampledHead:
    """Draws heads of `len(kept) + num_drawn` rows from the full one."""

    def __init__(self, head: Head, kept: Tensor, num_drawn: int) -> None:
        """kept [R]: token ids that may be labels, each once."""
        V = len(head.weight)
        device = head.weight.device
        absent = torch.ones(V, dtype=torch.bool, device=device)
        absent[kept] = False
        self._head, self._kept = head, kept
        self._others = absent.nonzero()[:, 0]
        self._num_drawn = min(num_drawn, len(self._others))
        self.row_of_label = torch.full((V,), -1, device=device)
        self.row_of_label[kept] = torch.arange(len(kept), device=device)

    def draw(self, generator: torch.Generator) -> Head:
        """A head over the kept rows, then the drawn ones."""
        if not self._num_drawn:
            return self._rows(self._kept, torch.zeros(len(self._kept)))
        chosen = torch.randperm(len(self._others), generator=generator)[: self._num_drawn]
        rows = torch.cat([self._kept, self._others[chosen.to(self._others.device)]])
        log_share = torch.zeros(len(rows))
        log_share[len(self._kept) :] = math.log(len(self._others) / self._num_drawn)
        return self._rows(rows, log_share)

    def _rows(self, rows: Tensor, log_share: Tensor) -> Head:
        bias = self._head.bias
        return replace(
            self._head,
            weight=self._head.weight[rows],
            bias=None if bias is None else bias[rows],
            rows=rows,
            log_share=log_share.to(rows.device),
        )
