"""The DFlash network: target features in, a whole block of tokens out, in one pass.

The context features are projected once (`fc`, `hidden_norm`) and every layer makes its own keys and
values from them, rotated at their target positions, without an input norm. The block's slots run
through the layers as an ordinary pre-norm transformer and attend to that context and to each other.
Embedding and head belong to the target and are passed in.

Shapes: A blocks (anchors, or requests when decoding), K block_size, D = K - 1 drafted slots, S
context length, H hidden, V vocabulary. Paper: DFlash (2026), sections on the draft architecture and
KV injection.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .attention import Group, block_attention
from .config import DFlashConfig
from .files import WEIGHTS, check_tensors, check_values, read_weights
from .fp8 import has_own_dtype
from .layers import Layer, RMSNorm, rope_frequencies

INIT_STD = 0.02


class DraftCache:
    """Keys and values of the context features, one slot a request; `lengths` [slots] says how many
    positions are valid.

    Setting a length back is a roll-back; setting it to 0 frees the slot. Behind the valid part
    there is room for one block.
    """

    def __init__(self, draft: "DFlashDraft", num_slots: int, max_length: int) -> None:
        c = draft.config
        shape = (
            c.num_hidden_layers,
            num_slots,
            c.num_key_value_heads,
            max_length + c.block_size,
            c.head_dim,
        )
        self.keys = torch.zeros(shape, dtype=draft.dtype, device=draft.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(num_slots, dtype=torch.long, device=draft.device)

    def write(self, layer: int, slots_B: Tensor, columns_BT: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k, v [B, T, M, head_dim] at each slot's own columns."""
        self.keys[layer][slots_B[:, None], :, columns_BT] = k
        self.values[layer][slots_B[:, None], :, columns_BT] = v


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes after each anchor. B requests, D drafted tokens, V vocabulary."""

    tokens: Tensor  # [B, D]
    probs: Tensor | None = None  # [B, D, V] float32, what each token was drawn from; None: argmax
    confidence: Tensor | None = None  # [B, D] float32 logits: slot k survives, given those before


# choose(k, logits [B, V]) -> the tokens [B] of draft index k and the distribution they were drawn
# from [B, V] float32, None for a point mass.
Choose = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]


class DFlashDraft(nn.Module):
    """A DFlash drafter. Parameters carry the names of its file (DESIGN section 7)."""

    # Tensors of the target that a published file may carry along; kept aside in `carried`.
    target_tensors: ClassVar[tuple[str, ...]] = ()
    layers: Sequence[Layer]  # a ModuleList, which has no type of its items

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.carried: dict[str, Tensor] = {}
        self.layers = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            Layer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Neither parameter nor buffer: `.to(bfloat16)` would round the frequencies, and positions a
        # few hundred tokens on would be rotated by another angle than the loaded drafter's.
        self.rope_inverse, self.rope_scale = rope_frequencies(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def initialize(self) -> None:
        """Random weights of a drafter that is to be trained from scratch."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, head_dim] at integer positions [...], computed in float32 and cast
        to the draft's dtype.
        """
        if self.rope_inverse.device != positions.device:
            self.rope_inverse = self.rope_inverse.to(positions.device)
        angles = positions[..., None].float() * self.rope_inverse
        table = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (table.cos() * self.rope_scale).to(self.dtype), (table.sin() * self.rope_scale).to(
            self.dtype
        )

    def context(self, features: Tensor) -> Tensor:
        """Context features [..., n*H], layers ascending -> what every layer's keys and values read
        [..., H].
        """
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def forward(
        self,
        features: Tensor,
        *,
        positions: Tensor,
        embeds: Tensor,
        block_positions: Tensor,
        anchors: Tensor,
        groups: list[Group],
    ) -> Tensor:
        """Hidden states [A, K, H] (after the final norm) of all blocks of one packed sequence.

        features [S, n*H] and positions [S] of the sequence; embeds [A, K, H] the slots' input
        embeddings; block_positions [A, K]; anchors [A] ascending indices into the sequence; groups
        from `attention.group_anchors`.
        """
        context = self.context(features)
        context_rope, block_rope = self.rope(positions), self.rope(block_positions)
        x = embeds.to(self.dtype) * self.config.input_embedding_scale
        for layer in self.layers:
            k_context, v_context = layer.self_attn.key_value(context, context_rope)

            def attend(
                q: Tensor, k: Tensor, v: Tensor, kc: Tensor = k_context, vc: Tensor = v_context
            ) -> Tensor:
                return block_attention(
                    q,
                    k_block=k,
                    v_block=v,
                    k_context=kc,
                    v_context=vc,
                    groups=groups,
                    anchors=anchors,
                    is_causal=self.config.is_causal,
                )

            x = layer(x, block_rope, attend)
        return self.norm(x)

    # Decoding

    def new_cache(self, num_slots: int, max_length: int) -> DraftCache:
        """Room for `num_slots` requests of up to `max_length` context positions."""
        return DraftCache(self, num_slots, max_length)

    @torch.inference_mode()
    def extend(self, cache: DraftCache, slots: Tensor, features: Tensor, counts: Tensor) -> None:
        """Append context features [B, T, n*H] to slots [B].

        Row b has counts[b] valid positions, the rest is padding.
        """
        columns = cache.lengths[slots][:, None] + torch.arange(
            features.shape[1], device=features.device
        )
        # Padding lands behind the valid part, where the next round overwrites it, and never past
        # the end.
        columns = columns.clamp_max(cache.keys.shape[3] - 1)
        context = self.context(features)
        rope = self.rope(columns)
        for index, layer in enumerate(self.layers):
            cache.write(index, slots, columns, *layer.self_attn.key_value(context, rope))
        cache.lengths[slots] += counts

    @torch.inference_mode()
    def hidden(self, cache: DraftCache, slots: Tensor, embeds: Tensor) -> Tensor:
        """Hidden states [B, K, H] of one block a slot.

        The anchor's position is the slot's length. embeds [B, K, H].
        """
        B, K, _ = embeds.shape
        lengths = cache.lengths[slots]
        columns_BK = lengths[:, None] + torch.arange(K, device=embeds.device)
        longest = int(lengths.max()) + K
        limit_BK = columns_BK + 1 if self.config.is_causal else lengths[:, None].expand(B, K) + K
        mask_BKL = torch.arange(longest, device=embeds.device) < limit_BK[..., None]
        whole = cache.lengths.shape[0] == B and torch.equal(
            slots, torch.arange(B, device=slots.device)
        )
        rope = self.rope(columns_BK)
        x = embeds.to(self.dtype) * self.config.input_embedding_scale
        for index, layer in enumerate(self.layers):

            def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                cache.write(index, slots, columns_BK, k, v)
                keys, values = cache.keys[index], cache.values[index]
                if not whole:
                    keys, values = keys[slots], values[slots]
                return _attend_cached(q, keys[:, :, :longest], values[:, :, :longest], mask_BKL)

            x = layer(x, rope, attend)
        return self.norm(x)

    @torch.inference_mode()
    def propose(
        self,
        cache: DraftCache,
        slots: Tensor,
        anchors: Tensor,
        *,
        embedding: Tensor,
        head: Callable[[Tensor], Tensor],
        choose: Choose | None = None,
    ) -> Proposal:
        """Tokens after anchors [B]: the argmax of the target's head at each drafted slot.

        `choose` is not asked: all slots are drafted at once, so the drafter is a point mass.
        """
        hidden = self._hidden_of_anchors(cache, slots, anchors, embedding)
        # Contiguous: a product with a strided 3-D slice copies the head's weight once a row.
        return Proposal(head(hidden[:, self.config.first_slot :].contiguous()).argmax(-1))

    def _hidden_of_anchors(
        self, cache: DraftCache, slots: Tensor, anchors: Tensor, embedding: Tensor
    ) -> Tensor:
        inputs = anchors.new_full((len(anchors), self.config.block_size), self.config.mask_token_id)
        inputs[:, 0] = anchors
        return self.hidden(cache, slots, F.embedding(inputs, embedding))

    # Files

    def save(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write `config.json` and `model.safetensors` (each replaced atomically) so that `load` and
        engines read them. `dtype` is that of all but FP8 weights and their scales.
        """
        dtype = dtype or self.dtype
        out = Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: value.detach()
            .to("cpu", value.dtype if has_own_dtype(name, value) else dtype)
            .contiguous()
            for name, value in self.state_dict().items()
        }
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            save_file(tensors, Path(scratch) / WEIGHTS, metadata={"format": "pt"})
            text = (
                json.dumps(self.config.to_json(str(dtype).removeprefix("torch.")), indent=2) + "\n"
            )
            (Path(scratch) / "config.json").write_text(text)
            for name in (WEIGHTS, "config.json"):
                (Path(scratch) / name).chmod(0o644)  # safetensors makes files private
                os.replace(Path(scratch) / name, out / name)

    @classmethod
    def load_config(cls, directory: str | Path) -> DFlashConfig:
        """The config of a drafter of this algorithm."""
        return DFlashConfig.load(directory)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Load a drafter directory, strictly; `dtype` None keeps the file's, FP8 weights stay so.

        Raises ValueError that lists every missing and unexpected tensor, or the first shape that
        does not fit.
        """
        config = cls.load_config(directory)
        tensors = read_weights(directory)
        carried = {name: tensors.pop(name) for name in cls.target_tensors if name in tensors}
        with torch.device("meta"):
            draft = cls(config)
        check_tensors(tensors, {name: p.shape for name, p in draft.state_dict().items()}, directory)
        check_values(tensors, directory)
        kept = dtype or tensors["fc.weight"].dtype
        draft.load_state_dict(
            {
                name: value.to(device, value.dtype if has_own_dtype(name, value) else kept)
                for name, value in tensors.items()
            },
            assign=True,
        )
        draft.carried = carried
        return draft.eval()


def copy_layers(draft: DFlashDraft, layers: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Initialize draft layer i from the i-th state dict where names and shapes agree; returns the
    names copied.

    Only whole layers make sense: a layer whose projections do not all fit is left as it is.
    """
    copied: list[str] = []
    for index, (layer, source) in enumerate(zip(draft.layers, layers, strict=True)):
        own = layer.state_dict()
        fits = {
            name
            for name, value in own.items()
            if name in source and source[name].shape == value.shape
        }
        if {name for name in own if "proj" in name} <= fits:
            layer.load_state_dict(
                {name: source[name].to(draft.dtype) for name in fits}, strict=False
            )
            copied += [f"layers.{index}.{name}" for name in sorted(fits)]
    return copied


def _attend_cached(q: Tensor, keys: Tensor, values: Tensor, mask_BKL: Tensor) -> Tensor:
    """q [B, K, N, D] over keys, values [B, M, L, D].

    The query heads of a key head are folded into its rows.
    """
    B, K, N, D = q.shape
    M = keys.shape[1]
    folded = q.view(B, K, M, N // M, D).permute(0, 2, 3, 1, 4).reshape(B, M, -1, D)
    mask = mask_BKL[:, None, None].expand(B, 1, N // M, K, -1).reshape(B, 1, -1, keys.shape[2])
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.view(B, M, N // M, K, D).permute(0, 3, 1, 2, 4).reshape(B, K, N, D)
