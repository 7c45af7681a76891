"""Speculative decoding in fp32 equals plain decoding on a target that has learned something."""

import pytest
import torch
from trained_target import NEW_TOKENS, plain, prompts, trained_target

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.eval.decode import Decoded, speculate
from spec.eval.drafter import Drafter, NetworkDrafter, NoDrafter
from spec.eval.ngram import NgramDrafter
from spec.target.capture import default_layer_ids
from spec.target.model import Target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Target:
    return trained_target()


def network(target: Target, block_size: int) -> NetworkDrafter:
    torch.manual_seed(2)
    config = DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=target.vocab_size,
        block_size=block_size,
        target_layer_ids=default_layer_ids(target.num_layers, 2),
        num_target_layers=target.num_layers,
        mask_token_id=target.vocab_size - 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return NetworkDrafter(DFlashDraft(config).eval(), target)


def decode(target: Target, drafter: Drafter, prompts: list[list[int]], size: int) -> list[Decoded]:
    return speculate(target, drafter, prompts, max_new_tokens=NEW_TOKENS, batch_size=size)


def test_64_prompts_of_128_tokens(target: Target) -> None:
    assert len(prompts()) == 64
    for drafter in (NoDrafter(), NgramDrafter(7), network(target, 8)):
        results = decode(target, drafter, prompts(), 16)
        assert [r.output_ids for r in results] == plain()
    assert any(r.finish_reason == "stop" for r in results)


@pytest.mark.parametrize("k", range(1, 8))
def test_every_number_of_draft_tokens(target: Target, k: int) -> None:
    some = prompts()[:10]  # the list to copy and a repeat among them
    accepted: set[int] = set()
    for drafter in (NgramDrafter(k), network(target, k + 1)):
        results = decode(target, drafter, some, 4)
        assert [r.output_ids for r in results] == plain()[:10]
        accepted |= {a for r in results for a in r.num_accepted}
    assert accepted >= {0, k}  # nothing kept and everything kept both occurred
