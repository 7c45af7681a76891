"""Softmax rows over a whole vocabulary, held tile by tile so that every pass stays in cache.

Shapes: n rows, V vocabulary in tiles of T, H hidden, r rank.
"""

import torch
from torch import Tensor

from ..dflash.loss import Head

TILE = 2048


class Tiles:
    """Room for the probabilities of `rows` rows, [tiles, rows, T] float32.

    `fill` leaves each tile relative to its own maximum, with the factor that makes probabilities of
    it; `normalize` applies it. So the exponential is taken once, in the pass that makes the logits.
    """

    def __init__(self, head: Head, rows: int) -> None:
        V, device = len(head.weight), head.weight.device
        self.head = head
        self.bounds = [(start, min(start + TILE, V)) for start in range(0, V, TILE)]
        self.values = torch.empty(len(self.bounds), rows, TILE, device=device)
        self.factors = torch.empty(rows, len(self.bounds), device=device)
        # Of a soft-capped head: d logit / d (scaled product).
        self.slopes = torch.empty_like(self.values) if head.softcap is not None else None

    def tile(self, index: int, first: int, last: int) -> Tensor:
        """Rows [first, last) of a tile, [n, T] (the last tile may be narrower)."""
        start, stop = self.bounds[index]
        return self.values[index, first:last, : stop - start]

    def slope(self, index: int, last: int) -> Tensor | None:
        start, stop = self.bounds[index]
        return None if self.slopes is None else self.slopes[index, :last, : stop - start]

    def normalize(self, index: int, first: int, last: int) -> Tensor:
        """The tile's probabilities, in place."""
        return self.tile(index, first, last).mul_(self.factors[first:last, index, None])

    def fill(
        self,
        first: int,
        hidden: Tensor,
        latent: Tensor | None = None,
        w2: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows from `first` on: softmax of `head(hidden) + latent w2^T`, hidden [n, H].

        Returns the log-probability of labels [n] (0 without) and whether each is the largest.
        """
        n = len(hidden)
        tops, sums = (hidden.new_empty(n, len(self.bounds), dtype=torch.float32) for _ in range(2))
        label_logit = torch.zeros_like(tops[:, 0])
        for index, (start, stop) in enumerate(self.bounds):
            x = self.tile(index, first, first + n)
            self._logits(index, first, hidden, x)
            if latent is not None and w2 is not None:
                add_product(x, latent, w2[start:stop])
            if self.head.log_share is not None:
                x += self.head.log_share[start:stop]
            if labels is not None:
                here = (labels >= start) & (labels < stop)
                column = (labels - start).clamp(0, stop - start - 1)
                label_logit = torch.where(here, x.gather(1, column[:, None])[:, 0], label_logit)
            torch.amax(x, 1, out=tops[:, index])
            x.sub_(tops[:, index, None]).exp_()
            torch.sum(x, 1, out=sums[:, index])
        top = tops.amax(1)
        log_total = top + (sums * (tops - top[:, None]).exp()).sum(1).log()
        self.factors[first : first + n] = (tops - log_total[:, None]).exp()
        return label_logit - log_total, label_logit >= top

    def _logits(self, index: int, first: int, hidden: Tensor, out: Tensor) -> None:
        """The head's own logits of a tile into `out` [n, T]."""
        head, (start, stop) = self.head, self.bounds[index]
        weight = head.weight[start:stop]
        if weight.dtype == torch.float32:
            torch.mm(hidden, weight.T, out=out)
        else:
            out.copy_(hidden @ weight.T)
        if head.bias is not None:
            out += head.bias[start:stop]
        if head.scale != 1.0:
            out *= head.scale
        if head.softcap is not None:
            assert self.slopes is not None
            torch.tanh(out.div_(head.softcap), out=out)
            slope = self.slopes[index, first : first + len(hidden), : stop - start]
            torch.mul(out, out, out=slope)
            slope.neg_().add_(1)
            out *= head.softcap

    def keep(self, first: int, last: int) -> None:
        """Move rows [first, last) to the front; the others are free again."""
        if first:
            self.values[:, : last - first] = self.values[:, first:last].clone()


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [n, T] float32 += a [n, r] b[T, r]^T."""
    if a.dtype == torch.float32:
        out.addmm_(a, b.T)
    else:
        out += a @ b.T
