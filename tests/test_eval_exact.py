"""fp32 output of speculative decoding equals plain decoding on a target that has learned something.

The tiny target of the docs is trained here (about 15 CPU-seconds); its prompts include one that is
copied from.
"""

import itertools

import pytest
import torch

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import DFlashDraft
from spec.eval.decode import Decoded, speculate
from spec.eval.drafter import Drafter, NetworkDrafter, NoDrafter
from spec.eval.ngram import NgramDrafter
from spec.target.capture import default_layer_ids
from spec.target.generate import generate
from spec.target.grammar import samples
from spec.target.model import Target
from spec.target.tiny import make_tiny_target

pytestmark = pytest.mark.slow
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny"))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    """61 requests of the target's kind, a list of names with its copy begun, and two repeats."""
    tokenizer = target.require_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": sample.request}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for sample in itertools.islice(samples("heldout", seed=3), 61)
    ]
    names = "alpha_one, beta_two, gamma_three, delta_four\n"
    texts.insert(5, names * 3 + names[:12])
    texts.insert(9, texts[0])
    texts.append(texts[0])
    return [list(tokenizer(str(text), add_special_tokens=False).input_ids) for text in texts]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    results = generate(target, prompts, max_new_tokens=NEW_TOKENS, batch_size=1)
    return [r.output_ids for r in sorted(results, key=lambda r: r.index)]


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


def test_64_prompts_of_128_tokens(
    target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    assert len(prompts) == 64
    for drafter in (NoDrafter(), NgramDrafter(7), network(target, 8)):
        results = decode(target, drafter, prompts, 16)
        assert [r.output_ids for r in results] == plain
    assert any(r.finish_reason == "stop" for r in results)


@pytest.mark.parametrize("k", range(1, 8))
def test_every_number_of_draft_tokens(
    target: Target, prompts: list[list[int]], plain: list[list[int]], k: int
) -> None:
    some = prompts[:10]  # the list to copy and a repeat among them
    accepted: set[int] = set()
    for drafter in (NgramDrafter(k), network(target, k + 1)):
        results = decode(target, drafter, some, 4)
        assert [r.output_ids for r in results] == plain[:10]
        accepted |= {a for r in results for a in r.num_accepted}
    assert accepted >= {0, k}  # nothing kept and everything kept both occurred
