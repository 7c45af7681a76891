"""Sampled speculative decoding as a whole: the target's distribution, seeds, limits, schedules."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec.dflash.draft import Choose, Proposal
from spec.dspark.config import DSparkConfig
from spec.dspark.draft import DSparkDraft
from spec.eval.decode import Decoded, speculate
from spec.eval.drafter import NetworkDrafter, NoDrafter
from spec.eval.ngram import NgramDrafter
from spec.target.generate import generate
from spec.target.model import Target
from spec.target.sampling import Sampling, distribution

VOCABULARY, K = 10, 3
WARM = Sampling(1.2, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.mul_(12.0 if weight.dim() > 1 else 1.0)
    return Target.of(model, None, name="toy")


class Guessing:
    """Drafts by a table of what follows a token; its confidence in a slot is the last token's."""

    target_layer_ids = None
    num_draft_tokens = K

    def __init__(self) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def allocate(self, num_slots: int, max_length: int) -> None: ...

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None: ...

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None: ...

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        chain, probs = [anchors], []
        for k in range(K):
            logits = self.table[chain[-1]]
            if choose is None:
                chain.append(logits.argmax(-1))
                continue
            tokens, drawn_from = choose(k, logits)
            chain.append(tokens)
            probs.append(drawn_from)
        tokens = torch.stack(chain, dim=1)
        told = torch.stack(probs, dim=1) if probs else None
        return Proposal(tokens[:, 1:], told, tokens[:, :-1] - VOCABULARY / 2)


def by_confidence(confidence: Tensor) -> Tensor:
    """Verify up to the first slot after a token of the lower half: 0 to K."""
    return (confidence >= 0).long().cumprod(dim=-1).sum(dim=-1)


def exact(target: Target, prompt: list[int], sampling: Sampling) -> Tensor:
    """[V, V, V]: the distribution of the first three tokens, by whole forward passes."""
    firsts = [[*prompt, a, b] for a, b in itertools.product(range(VOCABULARY), repeat=2)]
    logits = target.model(input_ids=torch.tensor(firsts)).logits[:, len(prompt) - 1 :]
    p = distribution(logits.flatten(0, 1), sampling).double()
    p = p.view(VOCABULARY, VOCABULARY, 3, VOCABULARY)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p-value; the cells that expect fewer than 5 are one cell."""
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None].clamp_min(1e-9)])
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc((torch.tensor(len(wanted)) - 1) / 2, statistic / 2))


CASES: dict[str, dict[str, Any]] = {
    "distributions": {"drafter": Guessing()},
    "scheduled": {"drafter": Guessing(), "schedule": by_confidence},
    "nothing verified": {"drafter": Guessing(), "schedule": lambda c: torch.zeros(len(c)).long()},
    "point masses": {"drafter": NgramDrafter(K, max_n=1)},
    "plain": {"drafter": NoDrafter()},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("sampling", [Sampling(1.0, seed=1), WARM], ids=["T=1", "top-p"])
def test_three_tokens_are_distributed_as_the_target(
    target: Target, sampling: Sampling, case: dict[str, Any]
) -> None:
    count, prompt = 3000, [3, 1, 4, 3]
    results = speculate(
        target,
        prompts=[prompt] * count,
        max_new_tokens=3,
        batch_size=1500,
        stop_token_ids=(),
        sampling=sampling,
        **case,
    )
    found = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for result in results:
        found[tuple(result.output_ids)] += 1
    expected = exact(target, prompt, sampling) * count
    assert chi_square(found.flatten(), expected.flatten()) > 0.01
    if "schedule" in case:
        lengths = {d for r in results for d in r.num_drafted}
        assert lengths == ({0, 1, 2, 3} if case["schedule"] is by_confidence else {0})


def dspark(target: Target) -> NetworkDrafter:
    torch.manual_seed(4)
    config = DSparkConfig(
        hidden_size=target.hidden_size,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        block_size=K,
        target_layer_ids=(0,),
        num_target_layers=target.num_layers,
        mask_token_id=VOCABULARY - 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        markov_rank=4,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    draft = DSparkDraft(config)
    for weight in draft.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.5)
    return NetworkDrafter(draft.eval(), target)


def test_a_dspark_network_that_samples_and_is_cut_by_its_confidence(target: Target) -> None:
    count, prompt = 3000, [3, 1, 4, 3]
    results = outputs(
        target,
        [prompt] * count,
        drafter=dspark(target),
        schedule=by_confidence,
        sampling=WARM,
        max_new_tokens=3,
        batch_size=1500,
    )
    found = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    for result in results:
        found[tuple(result.output_ids)] += 1
    expected = exact(target, prompt, WARM) * count
    assert chi_square(found.flatten(), expected.flatten()) > 0.01
    drafted = [d for r in results for d in r.num_drafted]
    accepted = [a for r in results for a in r.num_accepted]
    assert len(set(drafted)) > 1 and 0 < sum(accepted) < sum(drafted)


def outputs(target: Target, prompts: list[list[int]], **options: Any) -> list[Decoded]:
    defaults: dict[str, Any] = {"max_new_tokens": 20, "batch_size": 3, "stop_token_ids": ()}
    return speculate(target, options.pop("drafter"), prompts, **{**defaults, **options})


PROMPTS = [[1], [5, 2, 7], [1], [4, 4, 4, 4, 4, 9], [0, 8], [6] * 11]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_neighbours_do_not_matter_and_seeds_do(target: Target, case: dict[str, Any]) -> None:
    runs = [outputs(target, PROMPTS, batch_size=size, sampling=WARM, **case) for size in (1, 3, 6)]
    for other in runs[1:]:
        assert [r.output_ids for r in other] == [r.output_ids for r in runs[0]]
        assert [r.num_accepted for r in other] == [r.num_accepted for r in runs[0]]
    assert runs[0][0].output_ids != runs[0][2].output_ids  # the same prompt, another request
    changed = outputs(target, PROMPTS, sampling=Sampling(1.2, 0.9, seed=4), **case)
    assert changed[0].output_ids != runs[0][0].output_ids


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_limits_and_stop_tokens_are_exact(target: Target, case: dict[str, Any]) -> None:
    whole = [r.output_ids for r in outputs(target, PROMPTS, sampling=WARM, **case)]
    for count in range(1, 9):
        cut = outputs(target, PROMPTS, max_new_tokens=count, sampling=WARM, **case)
        assert [r.output_ids for r in cut] == [ids[:count] for ids in whole]
    for stops in ([whole[0][7]], [whole[1][2], whole[3][11]]):
        for result, ids in zip(
            outputs(target, PROMPTS, stop_token_ids=stops, sampling=WARM, **case),
            whole,
            strict=True,
        ):
            end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
            assert result.output_ids == ids[:end]
            assert result.finish_reason == ("length" if end is None else "stop")


@pytest.mark.parametrize("sampling", [WARM, Sampling(0.7, top_k=3), Sampling(1.5, seed=9)])
def test_without_a_drafter_it_is_plain_generation(target: Target, sampling: Sampling) -> None:
    results = generate(
        target,
        PROMPTS,
        max_new_tokens=20,
        batch_size=2,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=(),
    )
    expected = {r.index: r.output_ids for r in results}
    found = outputs(target, PROMPTS, drafter=NoDrafter(), sampling=sampling)
    assert [r.output_ids for r in found] == [expected[i] for i in range(len(PROMPTS))]


def test_a_drafter_with_the_targets_distribution_keeps_everything(target: Target) -> None:
    """A target whose layers add nothing sees one token, so that a table says all of it."""
    assert isinstance(target.model.config, LlamaConfig)
    flat = LlamaForCausalLM(target.model.config)
    for name, weight in flat.named_parameters():
        weight.data.mul_(0.0 if "o_proj" in name or "down_proj" in name else 12.0)
    blind = Target.of(flat, None, name="blind")
    drafter = Guessing()
    drafter.table = blind.model(input_ids=torch.arange(VOCABULARY)[:, None]).logits[:, 0]
    results = outputs(blind, PROMPTS, drafter=drafter, sampling=WARM)
    assert {a for r in results for a in r.num_accepted} == {K}


def test_greedy_output_is_plain_for_every_verification_length(target: Target) -> None:
    expected = [r.output_ids for r in outputs(target, PROMPTS, drafter=NoDrafter())]
    schedules = [lambda c, n=n: torch.full((len(c),), n) for n in range(K + 1)]
    mixed = itertools.cycle([2, 0, 3, 1, 3])
    schedules.append(lambda c, n=0: torch.tensor([next(mixed) for _ in range(len(c))]))
    for n, schedule in enumerate([*schedules, by_confidence]):
        results = outputs(target, PROMPTS, drafter=Guessing(), schedule=schedule)
        assert [r.output_ids for r in results] == expected
        drafted = {d for r in results for d in r.num_drafted}
        assert drafted == {n} if n <= K else len(drafted) > 2


def test_all_confidences_are_kept_whatever_is_verified(target: Target) -> None:
    for schedule in (None, by_confidence):
        [result] = outputs(target, [[7]], drafter=Guessing(), schedule=schedule)
        rounds = len(result.num_accepted)
        assert [len(row) for row in result.confidence] == [K] * rounds
        # The first slot's is the anchor's: the last token before the round.
        at = list(itertools.accumulate([1, *(a + 1 for a in result.num_accepted[:-1])]))
        anchors = [result.output_ids[i - 1] for i in at]
        assert [row[0] for row in result.confidence] == [a - VOCABULARY / 2 for a in anchors]
    [plain] = outputs(target, [[7]], drafter=NgramDrafter(K))
    assert plain.confidence == []


def test_a_schedule_needs_confidence(target: Target) -> None:
    with pytest.raises(ValueError, match="no confidence head"):
        outputs(target, PROMPTS, drafter=NgramDrafter(K), schedule=by_confidence)
