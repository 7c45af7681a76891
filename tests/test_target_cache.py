"""Slots of different lengths, roll-backs and releases give what one plain forward pass gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from spec.target.cache import SlotCache, forward_slots
from spec.target.model import Target

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen3-sliding": lambda: Qwen3Config(
        **SHAPE, head_dim=16, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "mistral-sliding": lambda: MistralConfig(**SHAPE, sliding_window=5),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    # A cap that bites: were it ignored, the logits would be far off.
    "gemma2-softcap": lambda: Gemma2Config(
        **SHAPE, head_dim=16, sliding_window=6, attn_logit_softcapping=0.02
    ),
    "gpt-oss-sinks": lambda: GptOssConfig(
        **SHAPE, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek-v3-mla": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, **MLA, **MOE, n_group=1, topk_group=1
    ),
    "llama4-chunked": lambda: Llama4TextConfig(
        **SHAPE, head_dim=16, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=48
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(0)
    # transformers 5.19 runs this one on a kernel that leaves the cap out, without a word.
    kernel = "eager" if name.endswith("softcap") else None
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=kernel)
    # Sharper than the default start, so that attention patterns matter to the logits.
    for weight in model.parameters():
        weight.data.mul_(3.0 if weight.dim() > 1 else 1.0)
    return Target.of(model.to(dtype), None, name=name)


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator) for n in lengths]


def feed(
    target: Target, cache: SlotCache, slots: list[int], pieces: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Append one piece a slot, padded with garbage; the logits of the valid tokens."""
    counts = torch.tensor([len(p) for p in pieces])
    tokens = torch.full((len(pieces), int(counts.max())), 5)
    for row, piece in zip(tokens, pieces, strict=True):
        row[: len(piece)] = piece
    hidden = forward_slots(target, cache, torch.tensor(slots), tokens, counts)
    return [target.logits(hidden[b, : len(p)]) for b, p in enumerate(pieces)]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_uneven_chunks_and_rollbacks_equal_one_forward_pass(name: str) -> None:
    target = build(name)
    before = target.config._attn_implementation
    whole = sequences(23, 17, 9)
    cache = SlotCache(target, slots=4, max_length=40)
    slots, done = [2, 0, 3], [0, 0, 0]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for sizes in ([7, 5, 2], [1, 1, 1], [4, 2, 3], [11, 9, 3]):
        feed(target, cache, slots, sequences(3, 2, 1))  # rejected tokens
        cache.lengths[torch.tensor(slots)] -= torch.tensor([3, 2, 1])
        pieces = [s[d : d + n] for s, d, n in zip(whole, done, sizes, strict=True)]
        for b, logits in enumerate(feed(target, cache, slots, pieces)):
            parts[b].append(logits)
            done[b] += sizes[b]
    for sequence, part in zip(whole, parts, strict=True):
        expected = target.model(input_ids=sequence[None], use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat(part), expected, atol=2e-5, rtol=1e-4)
    assert target.config._attn_implementation == before


def test_bf16_on_a_full_batch_stays_near_fp32() -> None:
    """The batched products of the CPU's bf16 path: same pattern, bf16 rounding."""
    exact, rounded = build("llama"), build("llama", torch.bfloat16)
    exact.model.load_state_dict({k: v.float() for k, v in rounded.model.state_dict().items()})
    results = []
    for target in (exact, rounded):
        cache = SlotCache(target, slots=3, max_length=100)
        feed(target, cache, [0, 1, 2], sequences(70, 50, 9))
        results.append(torch.cat(feed(target, cache, [0, 1, 2], sequences(4, 3, 4))).float())
    scale = results[0].abs().max()
    assert (results[0] - results[1]).abs().max() < 0.03 * scale


def test_released_slots_leave_the_others_untouched_and_side_by_side() -> None:
    target = build("llama")
    cache = SlotCache(target, slots=4, max_length=32)
    whole = sequences(12, 10, 8, 14)
    feed(target, cache, [0, 1, 2, 3], [s[:-1] for s in whole])
    cache.release(1)
    cache.release(0)
    assert cache.lengths.tolist() == [0, 0, 7, 13]
    order = cache.in_order([2, 3])
    call = cache._plan(torch.tensor(order), 1, torch.ones(2, dtype=torch.long))
    assert call.block == slice(0, 2)  # read in place, no gather
    for slot, logits in zip(
        order, feed(target, cache, order, [whole[s][-1:] for s in order]), strict=True
    ):
        expected = target.model(input_ids=whole[slot][None], use_cache=False).logits[0, -1:]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_a_freed_slot_serves_a_shorter_request_exactly() -> None:
    target = build("llama")
    cache = SlotCache(target, slots=2, max_length=32)
    long, short = sequences(30, 5)
    feed(target, cache, [0], [long])
    cache.lengths[0] = 0
    [logits] = feed(target, cache, [0], [short])
    expected = target.model(input_ids=short[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_a_slot_that_would_overflow_is_refused() -> None:
    target = build("llama")
    cache = SlotCache(target, slots=1, max_length=8)
    with pytest.raises(ValueError, match="would hold 9 tokens, the cache holds 8"):
        feed(target, cache, [0], sequences(9))


def test_targets_that_cannot_roll_back_are_refused() -> None:
    recurrent = AutoModelForCausalLM.from_config(Qwen3NextConfig(**SHAPE))
    with pytest.raises(ValueError, match="recurrent state"):
        SlotCache(Target.of(recurrent, None, name="recurrent"), 1, 8)
    bloom = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    )
    with pytest.raises(ValueError, match="attention interface"):
        SlotCache(Target.of(bloom, None, name="bloom"), 1, 8)
