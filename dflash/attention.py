"""Attention of block slots over their context: cost is anchors x (context + block), never
(sequence)^2.

Each block attends to the context features before its anchor and to its own slots. The two parts are
computed apart and merged by their log-sum-exp. The context part walks over groups of neighbouring
anchors: a group shares the prefix up to its last anchor, so one matrix product serves all its
blocks and only the short stretch between the group's first and last anchor needs a mask. The
backward pass recomputes the scores group by group; no [slots, context] tensor outlives its group.

Shapes: A anchors, K block size, S context length, N query heads, M key-value heads, G = N / M, D
head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# query rows (anchors x block x G) a group aims at: large enough for the matrix units, small enough
# for cache
GROUP_ROWS = 256
EMPTY = -1e30  # log-sum-exp of a block without context; finite, so that differences stay numbers


@dataclass(frozen=True)
class Group:
    """Anchors first..last (exclusive) of one document.

    They see context[start:stop], less what lies at or after each anchor.
    """

    first: int
    last: int
    start: int
    stop: int
    dense: int  # columns before this index of the prefix are seen by every block of the group


def group_anchors(anchors: list[int], starts: list[int], rows_per_anchor: int) -> list[Group]:
    """Cut ascending anchors into groups of one document each."""
    size = max(1, GROUP_ROWS // rows_per_anchor)
    groups: list[Group] = []
    first = 0
    while first < len(anchors):
        last = first + 1
        while last < len(anchors) and last - first < size and starts[last] == starts[first]:
            last += 1
        start = starts[first]
        groups.append(Group(first, last, start, anchors[last - 1], anchors[first] - start))
        first = last
    return groups


def block_attention(
    q: Tensor,
    *,
    k_block: Tensor,
    v_block: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    groups: list[Group],
    anchors: Tensor,
    is_causal: bool = False,
) -> Tensor:
    """Attention output [A, K, N, D] of q [A, K, N, D] over k/v_block [A, K, M, D] and k/v_context
    [S, M, D].

    The scale 1/sqrt(D) is applied here. Keys and queries come rotated.
    """
    A, K, N, D = q.shape
    M = k_block.shape[2]
    G = N // M
    q_MARD = (q * D**-0.5).view(A, K, M, G, D).permute(2, 0, 1, 3, 4).reshape(M, A, K * G, D)
    out_c, lse_c = _ContextAttention.apply(
        q_MARD,
        k_context.transpose(0, 1).contiguous(),
        v_context.transpose(0, 1).contiguous(),
        groups,
        anchors,
    )
    k_MAKD, v_MAKD = k_block.permute(2, 0, 1, 3), v_block.permute(2, 0, 1, 3)
    scores = (q_MARD @ k_MAKD.transpose(-1, -2)).float()
    if is_causal:
        slot = torch.arange(K, device=q.device)
        scores = scores.masked_fill(
            slot[None, :] > slot.repeat_interleave(G)[:, None], float("-inf")
        )
    lse_b = scores.logsumexp(-1)
    out_b = (scores - lse_b[..., None]).exp().to(q.dtype) @ v_MAKD
    share = torch.sigmoid(lse_c - lse_b)[..., None].to(q.dtype)
    out = torch.lerp(out_b, out_c, share)
    return out.view(M, A, K, G, D).permute(1, 2, 0, 3, 4).reshape(A, K, N, D)


class _ContextAttention(torch.autograd.Function):
    """softmax(q k^T) v over each block's own prefix, with the log-sum-exp needed for merging.

    q [M, A, R, D] scaled, k and v [M, S, D] -> out [M, A, R, D], lse [M, A, R] float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: list[Group], anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:-1], EMPTY, dtype=torch.float32)
        for group in groups:
            if group.stop == group.start:
                continue
            scores = _scores(q, k, group, anchors)
            top = scores.amax(-1, keepdim=True).clamp_min_(EMPTY)
            scores.sub_(top).exp_()
            total = scores.sum(-1, keepdim=True)
            shape = (q.shape[0], group.last - group.first, q.shape[2])
            part = torch.bmm(scores.to(q.dtype), v[:, group.start : group.stop])
            # A first block without context has total 0: its output stays 0 and its weight in the
            # merge is 0.
            out[:, group.first : group.last] = part.div_(total.clamp_min(1e-30)).view(*shape, -1)
            lse[:, group.first : group.last] = torch.where(
                total > 0, top + total.log(), EMPTY
            ).view(shape)
        ctx.save_for_backward(q, k, v, out, lse, anchors)
        ctx.groups = groups
        return out, lse

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_out: Tensor, grad_lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, anchors = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.zeros_like(q), _zeros_float(k), _zeros_float(v)
        delta = (grad_out.float() * out.float()).sum(-1) - grad_lse
        for group in ctx.groups:
            if group.stop == group.start:
                continue
            rows, cols = slice(group.first, group.last), slice(group.start, group.stop)
            flat = (q.shape[0], -1, 1)
            probs = _scores(q, k, group, anchors).sub_(lse[:, rows].reshape(flat)).exp_()
            g_out = grad_out[:, rows].reshape(q.shape[0], -1, q.shape[-1])
            grad_v[:, cols] += torch.bmm(probs.to(q.dtype).transpose(1, 2), g_out)
            d_scores = torch.bmm(g_out, v[:, cols].transpose(1, 2)).float()
            d_scores.sub_(delta[:, rows].reshape(flat)).mul_(probs)
            d_scores = d_scores.to(q.dtype)
            grad_q[:, rows] = torch.bmm(d_scores, k[:, cols]).view_as(grad_q[:, rows])
            q_rows = q[:, rows].reshape(q.shape[0], -1, q.shape[-1])
            grad_k[:, cols] += torch.bmm(d_scores.transpose(1, 2), q_rows)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _scores(q: Tensor, k: Tensor, group: Group, anchors: Tensor) -> Tensor:
    """Scores [M, rows, prefix] in float32; columns at or after a block's own anchor are -inf."""
    M, _, R, D = q.shape
    rows = q[:, group.first : group.last].reshape(M, -1, D)
    scores = torch.bmm(rows, k[:, group.start : group.stop].transpose(1, 2)).float()
    if group.stop > group.start + group.dense:
        tail = scores[:, :, group.dense :].view(M, group.last - group.first, R, -1)
        columns = torch.arange(group.start + group.dense, group.stop, device=q.device)
        hidden = columns >= anchors[group.first : group.last, None]
        tail.masked_fill_(hidden[None, :, None, :], float("-inf"))
    return scores


def _zeros_float(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)
