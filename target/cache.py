"""A key-value cache of slots: many requests of different lengths in one forward pass of the target.

Shapes: B rows of a call, T tokens a row, S slots, G key-value heads, Q query heads, D head size, H
hidden.

Every slot is a row of one tensor per layer, with a length of its own. A call appends tokens at each
slot's length; forgetting tokens is writing a smaller length. Two functions are registered with
transformers under the name `spec_slots`: one builds the model's own mask pattern (causal, sliding,
chunked) at every row's own positions, the other attends without repeating keys and values for
grouped queries.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .model import Target

SLOTS = "spec_slots"
GROWTH = 64  # tokens by which the tensors of a cache grow
# Arguments of an attention call that the mask already expresses, or that do not change the result.
_EXPRESSED = frozenset(
    {"sliding_window", "position_ids", "cache_position", "use_cache", "is_causal", "chunk_size"}
)


@dataclass
class _Call:
    """Where one forward pass writes and reads."""

    rows: Tensor  # [B] rows of the preallocated tensors
    positions: Tensor  # [B, T] absolute; padding repeats the row's last valid position
    valid: (
        tuple[Tensor, Tensor] | None
    )  # (row of the call, column) of the tokens that are no padding
    window: int  # keys that each row reads: up to the longest row's end, or the whole tensor
    block: slice | None  # the rows as one slice, where they lie side by side in order


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [S, G, capacity, D]; allocated at the first call."""

    is_sliding = False

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__()
        self.slots = slots
        self.max_length = max_length
        self.call: _Call | None = None
        self.capacity = 0
        self.indexer_keys: Tensor | None = None  # [S, 1, capacity, D], sparse-attention models only

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: positions that a shorter slot has not written are masked, and a mask
        # does not stop a NaN.
        *_, heads, _, size = like.shape
        return like.new_zeros(self.slots, heads, self.capacity, size)

    def reserve(self, capacity: int) -> None:
        """Room for `capacity` tokens a slot; what is stored moves along."""
        held, self.capacity = self.capacity, capacity
        for name in ("keys", "values", "indexer_keys"):
            old: Tensor | None = getattr(self, name)
            if old is not None:
                new = self._allocate(old)
                new[:, :, :held] = old
                setattr(self, name, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, G, T, D] at each row's length; return [B, G, window, D] of both."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self._append(self.keys, key_states), self._append(self.values, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same for the one-headed keys [B, T, D] of a sparse-attention indexer."""
        if self.indexer_keys is None:
            self.indexer_keys = self._allocate(indexer_key_states[:, None])
        return self._append(self.indexer_keys, indexer_key_states[:, None])[:, 0]

    def _append(self, store: Tensor, new: Tensor) -> Tensor:
        call = self.call
        assert call is not None, "a SlotCache is used through forward_slots"
        new = new.transpose(1, 2)
        if call.valid is None:
            store[call.rows[:, None], :, call.positions] = new
        else:
            row, column = call.valid
            store[call.rows[row], :, call.positions[row, column]] = new[row, column]
        if call.block is not None:
            return store[call.block, :, : call.window]
        return store[:, :, : call.window].index_select(0, call.rows)

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.keys, self.values, self.indexer_keys) if t is not None]

    def get_seq_length(self) -> int:
        return 0 if self.call is None else self.call.window - self.call.positions.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.call is None else self.call.window), 0

    def get_max_length(self) -> int:
        return self.max_length


class SlotCache(Cache):
    """Keys and values for `slots` requests of up to `max_length` tokens, grown as they fill.

    `lengths` [S] is plain data: roll a slot back by writing a smaller length, free it by writing 0.
    Raises ValueError for a target whose state cannot be rolled back by a length.
    """

    def __init__(self, target: Target, slots: int, max_length: int) -> None:
        _require_slots(target)
        super().__init__(layers=[_SlotLayer(slots, max_length) for _ in range(target.num_layers)])
        self.slots = slots
        self.max_length = max_length
        self.lengths = torch.zeros(slots, dtype=torch.long, device=target.device)
        # Slot -> row of the tensors. Released slots trade places so that live ones stay side by
        # side: such a batch is read in place, any other is gathered, which costs a copy of the
        # cache a step.
        self._row = list(range(slots))
        self._live = set(range(slots))

    def in_order(self, slots: Sequence[int]) -> list[int]:
        """The slots in the order of their rows: a call in this order reads them without a copy."""
        return sorted(slots, key=lambda slot: self._row[slot])

    def release(self, slot: int) -> None:
        """Give a slot up for good: the live slot that lies last moves into its row."""
        self._live.discard(slot)
        self.lengths[slot] = 0
        last = max(self._live, key=lambda other: self._row[other], default=slot)
        hole, end = self._row[slot], self._row[last]
        if end > hole:
            length = int(self.lengths[last])
            for layer in self._slot_layers():
                for store in layer.tensors():
                    store[hole, :, :length] = store[end, :, :length]
            self._row[slot], self._row[last] = end, hole

    def get_query_offset(self, layer_idx: int = 0) -> Tensor | int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The positions [B, T] of the running call: `_slot_mask` knows them by being a tensor."""
        call = self._slot_layers()[layer_idx].call
        return 0 if call is None else call.positions

    @contextmanager
    def _calling(self, call: _Call) -> Iterator[None]:
        for layer in self._slot_layers():
            layer.call = call
        try:
            yield
        finally:
            for layer in self._slot_layers():
                layer.call = None

    def _reserve(self, length: int) -> int:
        layers = self._slot_layers()
        if length > layers[0].capacity:
            capacity = min(-(-length // GROWTH) * GROWTH, self.max_length)
            for layer in layers:
                layer.reserve(capacity)
        return layers[0].capacity

    def _slot_layers(self) -> list[_SlotLayer]:
        return self.layers  # pyright: ignore[reportReturnType]

    def _plan(self, slots: Tensor, width: int, counts: Tensor) -> _Call:
        rows = [self._row[slot] for slot in slots.tolist()]
        starts = self.lengths[slots]
        longest = int((starts + counts).max())
        if longest > self.max_length:
            raise ValueError(
                f"a slot would hold {longest} tokens, the cache holds {self.max_length}; allocate "
                "the cache "
                "for prompt + new tokens + one block"
            )
        capacity = self._reserve(longest)
        offsets = torch.arange(width, device=slots.device)
        padded = int(counts.min()) < width
        valid = None
        if padded:
            valid = tuple(torch.nonzero(offsets < counts[:, None], as_tuple=True))
            offsets = torch.minimum(offsets.expand(len(rows), -1), counts[:, None] - 1)
        side_by_side = rows == list(range(rows[0], rows[0] + len(rows)))
        return _Call(
            rows=torch.tensor(rows, device=slots.device),
            positions=starts[:, None] + offsets,
            valid=valid,  # pyright: ignore[reportArgumentType]
            # Reading the tensors to their end keeps them contiguous, which the product over them
            # needs to run without a copy; not where that end lies far beyond, nor in a prompt's
            # first call.
            window=capacity if width < longest and capacity < 1.5 * longest + GROWTH else longest,
            block=slice(rows[0], rows[0] + len(rows)) if side_by_side else None,
        )


@torch.no_grad()
def forward_slots(
    target: Target, cache: SlotCache, slots: Tensor, tokens: Tensor, lengths: Tensor
) -> Tensor:
    """Append tokens to slots and return the final norm's output for each, [B, T, H].

    `slots` [B] are distinct; row b of `tokens` [B, T] holds `lengths[b]` >= 1 tokens, then padding,
    which is computed, never stored, and whose output means nothing. Each token sees its own slot's
    earlier tokens. The head is the caller's: run it on the positions that need it.
    """
    call = cache._plan(slots, tokens.shape[1], lengths)
    body = target.backbone
    with cache._calling(call), _slot_attention(target):
        output = body(
            input_ids=tokens,
            position_ids=call.positions,
            use_cache=True,
            **{_cache_keyword(body): cache},
        )
    cache.lengths[slots] += lengths
    return output.last_hidden_state


@contextmanager
def _slot_attention(target: Target) -> Iterator[None]:
    """This module's attention for one forward pass; the model's own setting comes back after it."""
    config = target.config
    before = config._attn_implementation
    if before != SLOTS:
        config._attn_implementation = SLOTS
    # A model that runs eager does so because its attention has terms that the fused kernel lacks.
    token = _own_attention_only.append(before == "eager")
    try:
        yield token
    finally:
        _own_attention_only.pop()
        config._attn_implementation = before


_own_attention_only: list[bool] = []


def _slot_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor | None:
    """[B, 1, T, window]: the model's own pattern at each row's positions; None: plain causal."""
    assert isinstance(q_offset, Tensor) and mask_function is not None
    fits = local_size is None or kv_length <= local_size
    if (
        allow_is_causal_skip
        and fits
        and kv_length == q_length > 1
        and not int(q_offset[:, 0].max())
    ):
        return None
    device = q_offset.device
    return mask_function(
        torch.arange(batch_size, device=device)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device),
        q_offset[:, None, :, None],
        torch.arange(kv_length, device=device) + kv_offset,
    ).expand(batch_size, -1, q_length, kv_length)


def _slot_attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, Q, T, D] against [B, G, window, D] -> [B, T, Q, D], key and value heads never repeated.

    The query heads of a group become extra query rows of their key-value head. Anything beyond
    plain softmax attention (soft-capping, sinks, biases) goes to the model's own eager function
    instead.
    """
    extras = [
        k for k, v in kwargs.items() if v is not None and v is not False and k not in _EXPRESSED
    ]
    if extras or _own_attention_only[-1]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise ValueError(
                f"{type(module).__name__} passes {', '.join(extras) or 'no known kernel'} to its "
                "attention and "
                "has no eager attention beside it; this target cannot be decoded in process"
            )
        mask = _additive(attention_mask, query, key)
        return eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    batch, heads, width, size = query.shape
    groups = key.shape[1]
    if attention_mask is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != groups
        )
        return out.transpose(1, 2).contiguous(), None
    share = heads // groups
    if share > 1:
        query = query.reshape(batch, groups, share * width, size)
        if width > 1:
            attention_mask = attention_mask.repeat(1, 1, share, 1)
    # On a CPU the fused kernel multiplies bf16 matrices of a few rows one slot at a time.
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and key.is_contiguous():
        out = _attend_batched(query, key, value, attention_mask, scaling or size**-0.5)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def _attend_batched(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Softmax attention as two batched products over [B*G]; the softmax runs in fp32 inside."""
    batch, groups, window, size = key.shape
    flat = (query * scaling).reshape(batch * groups, -1, size)
    scores = torch.bmm(flat, key.view(batch * groups, window, size).transpose(1, 2))
    scores = scores.view(batch, groups, -1, window).add_(_additive(mask, query, key))
    weights = torch.softmax(scores, dim=-1).view(batch * groups, -1, window)
    return torch.bmm(weights, value.reshape(batch * groups, window, -1))


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    if mask is None:
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()
        mask = mask[None, None]
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~mask, lowest
    )


AttentionInterface.register(SLOTS, _slot_attend)
AttentionMaskInterface.register(SLOTS, _slot_mask)  # pyright: ignore[reportArgumentType]


def _cache_keyword(body: nn.Module) -> str:
    """`cache` from transformers 5.20 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def _require_slots(target: Target) -> None:
    target.require_rollback()
    config: PretrainedConfig = target.config
    if not getattr(target.backbone, "_supports_attention_backend", False):
        raise ValueError(
            f"{target.name}: the attention of {type(target.backbone).__name__} does not go "
            "through transformers' "
            "attention interface, which slot decoding needs; measure this target on a serving "
            "engine instead"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{target.name}: {config.num_kv_shared_layers} layers share the keys of others, which "
            "slot decoding "
            "does not do; measure this target on a serving engine instead"
        )
