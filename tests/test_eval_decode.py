"""Speculative decoding says what plain decoding says, whatever the drafter proposes."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from spec.dflash.config import DFlashConfig
from spec.dflash.draft import Choose, DFlashDraft, Proposal
from spec.eval.decode import Decoded, speculate
from spec.eval.drafter import NO_TOKEN, Drafter, NetworkDrafter, NoDrafter
from spec.eval.ngram import NgramDrafter
from spec.eval.pair import check_pair
from spec.target.capture import capture
from spec.target.generate import generate
from spec.target.model import Target

VOCABULARY = 61
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        weight.data.mul_(10.0 if weight.dim() > 1 else 1.0)
    return Target.of(model, None, name="tiny")


def prompts(n: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 25))] for _ in range(n)]


ANSWERS: dict[tuple[int, ...], list[int]] = {}


def plain(target: Target, some: Sequence[list[int]], count: int) -> list[list[int]]:
    """The target's answers, each decoded alone and plainly."""
    for prompt in some:
        if tuple(prompt) not in ANSWERS:
            limit = min(40, 128 - len(prompt))
            [result] = generate(
                target, [prompt], max_new_tokens=limit, batch_size=1, stop_token_ids=()
            )
            ANSWERS[tuple(prompt)] = result.output_ids
    return [ANSWERS[tuple(prompt)][:count] for prompt in some]


class Scripted:
    """Knows every answer; spoils the draft from position `right(index, round)` on.

    Also checks what it is told: the observed tokens are the prompt and the answer so far, each
    once.
    """

    algorithm = "scripted"

    target_layer_ids: tuple[int, ...] | None = None

    def __init__(
        self, some: Sequence[list[int]], answers: Sequence[list[int]], right: Sequence[int], k: int
    ) -> None:
        self.num_draft_tokens = k
        self.texts = {tuple(p): p + a for p, a in zip(some, answers, strict=True)}
        self.right = right
        self.text: dict[int, list[int]] = {}
        self.seen: dict[int, list[int]] = {}
        self.rounds = 0

    def allocate(self, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots

    def begin(self, slot: int, prompt_ids: Sequence[int]) -> None:
        assert slot < self.num_slots
        self.text[slot], self.seen[slot] = self.texts[tuple(prompt_ids)], []

    def observe(
        self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
    ) -> None:
        for slot, row, count in zip(slots.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            self.seen[slot] += row[:count]

    def propose(self, slots: Tensor, anchors: Tensor, choose: Choose | None = None) -> Proposal:
        rows = []
        for slot, anchor in zip(slots.tolist(), anchors.tolist(), strict=True):
            text, at = self.text[slot], len(self.seen[slot])
            assert [*self.seen[slot], anchor] == text[: at + 1]
            row = text[at + 1 : at + 1 + self.num_draft_tokens]
            row += [0] * (self.num_draft_tokens - len(row))
            right = self.right[self.rounds % len(self.right)]
            self.rounds += 1
            rows.append(row[:right] + [(t + 1) % VOCABULARY for t in row[right:]])
        return Proposal(torch.tensor(rows).view(len(rows), self.num_draft_tokens))


def run(
    target: Target, drafter: Drafter, some: Sequence[list[int]], count: int, size: int
) -> list[Decoded]:
    return speculate(
        target, drafter, some, max_new_tokens=count, batch_size=size, stop_token_ids=()
    )


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_output_is_plain_decoding_for_any_mix_of_accepts(
    target: Target, k: int, batch_size: int
) -> None:
    some = prompts(8)
    answers = plain(target, some, 20)
    known = plain(target, some, 20 + k)
    mixed = [r % (k + 1) for r in (0, 3, 1, 9, 2, 5, 7)]
    for right in ([0], [k], mixed):
        results = run(target, Scripted(some, known, right, k), some, 17, batch_size)
        assert [r.output_ids for r in results] == [a[:17] for a in answers]
        assert all(r.finish_reason == "length" for r in results)
        assert all(d == k for r in results for d in r.num_drafted)


def test_the_oracle_keeps_everything_and_the_liar_nothing(target: Target) -> None:
    some = prompts(3)
    known = plain(target, some, 40)
    for right, per_round in ((4, 5), (0, 1), (2, 3)):
        results = run(target, Scripted(some, known, [right], 4), some, 16, 2)
        for result in results:
            assert result.num_accepted == [right] * len(result.num_accepted)
            assert len(result.num_accepted) == -(
                -15 // per_round
            )  # the first token is the prompt's


@pytest.mark.parametrize("count", range(1, 14))
def test_max_new_tokens_is_exact_and_the_cut_round_counts_in_full(
    target: Target, count: int
) -> None:
    some = prompts(3)
    known = plain(target, some, 30)
    results = run(target, Scripted(some, known, [5], 5), some, count, 2)
    for result, answer in zip(results, known, strict=True):
        assert result.output_ids == answer[:count]
        assert result.num_accepted == [5] * -(-(count - 1) // 6)


@pytest.mark.parametrize("at", range(9))
def test_a_stop_token_inside_the_block_ends_the_output_there(target: Target, at: int) -> None:
    [prompt] = some = prompts(1)
    [known] = plain(target, some, 30)
    first = known.index(known[at])  # an earlier equal token stops there
    [result] = speculate(
        target,
        Scripted([prompt], [known], [5], 5),
        some,
        max_new_tokens=20,
        batch_size=1,
        stop_token_ids=[known[at], VOCABULARY - 1],
    )
    assert result.output_ids == known[: first + 1]
    assert result.finish_reason == "stop"
    # Output 0 is the prompt's; each round yields 5 drafted tokens and the bonus.
    whole, rest = divmod(first, 6)
    assert result.num_accepted == [5] * whole + ([rest] if rest else [])


def test_a_stop_token_past_the_limit_does_not_count(target: Target) -> None:
    [prompt] = some = prompts(1)
    [known] = plain(target, some, 30)
    at = next(i for i in range(2, 6) if known[i] not in known[:i])
    [result] = speculate(
        target,
        Scripted([prompt], [known], [5], 5),
        some,
        max_new_tokens=at,
        batch_size=1,
        stop_token_ids=[known[at]],
    )
    assert result.output_ids == known[:at]
    assert result.finish_reason == "length"
    assert result.num_accepted == [5]


def test_the_same_prompt_twice_and_a_shorter_one_in_the_same_slot(target: Target) -> None:
    long, other = sorted(prompts(8), key=len)[-2:]
    some = [long, long, other[:2], long]
    known = plain(target, some, 30)
    for size in (1, 2, 4):
        results = run(target, Scripted(some, known, [3, 0, 1], 3), some, 12, size)
        assert [r.output_ids for r in results] == [a[:12] for a in known]
    assert results[0].output_ids == results[1].output_ids


def test_no_drafter_is_plain_decoding(target: Target) -> None:
    some = prompts(5)
    results = run(target, NoDrafter(), some, 10, 2)
    assert [r.output_ids for r in results] == plain(target, some, 10)
    assert results[0].num_accepted == [0] * 9


def test_features_reach_the_drafter_once_a_token_in_order(target: Target) -> None:
    some = prompts(5)
    known = plain(target, some, 30)

    class Checking(Scripted):
        target_layer_ids = LAYERS

        def __init__(self) -> None:
            super().__init__(some, known, [2, 0, 4, 1], 4)
            self.features: dict[int, list[Tensor]] = {}

        def begin(self, slot: int, prompt_ids: Sequence[int]) -> None:
            self.check(slot)
            super().begin(slot, prompt_ids)
            self.features[slot] = []

        def observe(
            self, slots: Tensor, tokens: Tensor, features: Tensor | None, counts: Tensor
        ) -> None:
            super().observe(slots, tokens, features, counts)
            assert features is not None
            for slot, row, count in zip(slots.tolist(), features, counts.tolist(), strict=True):
                self.features[slot].append(row[:count].clone())

        def check(self, slot: int) -> None:
            if self.features.get(slot):
                [alone] = capture(target, [self.seen[slot]], LAYERS)
                mine = torch.cat(self.features[slot])
                torch.testing.assert_close(mine, alone.context, atol=2e-5, rtol=1e-4)
                self.checked += 1

        checked = 0

    drafter = Checking()
    run(target, drafter, some, 12, 2)
    for slot in (0, 1):
        drafter.check(slot)
    assert drafter.checked == 5


def test_a_network_drafter_changes_no_token(target: Target) -> None:
    drafter = NetworkDrafter(random_draft(target), target)
    some = prompts(6)
    results = run(target, drafter, some, 20, 3)
    assert [r.output_ids for r in results] == plain(target, some, 20)
    again = run(target, drafter, some, 20, 2)
    assert [r.num_accepted for r in again] == [r.num_accepted for r in results]


def random_draft(target: Target, *, layer_ids: tuple[int, ...] = LAYERS) -> DFlashDraft:
    torch.manual_seed(1)
    config = DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        block_size=5,
        target_layer_ids=layer_ids,
        num_target_layers=target.num_layers,
        mask_token_id=60,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return DFlashDraft(config).eval()


def test_a_drafter_of_another_target_is_refused(target: Target) -> None:
    draft = random_draft(target)
    check_pair(draft, target)
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
        )
    )
    with pytest.raises(ValueError, match="vocabulary is 61, that of other is 64"):
        NetworkDrafter(draft, Target.of(other, None, name="other"))


def test_ngram_drafts_what_followed_the_longest_suffix() -> None:
    drafter = NgramDrafter(3)
    drafter.allocate(2, 99)
    drafter.begin(0, [])
    history = [1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2]
    drafter.observe(torch.tensor([0]), torch.tensor([history]), None, torch.tensor([len(history)]))

    def draft(anchor: int) -> list[int]:
        return drafter.propose(torch.tensor([0]), torch.tensor([anchor])).tokens[0].tolist()

    assert draft(3) == [4, 9, 2]  # (1, 2, 3) occurred; (2, 3) more recently, but it is shorter
    assert draft(9) == [2, 3, 5]  # only (9,) occurred
    assert draft(2) == [2, NO_TOKEN, NO_TOKEN]  # (2,) last occurred just before the anchor
    assert draft(8) == [NO_TOKEN] * 3


def test_ngram_rounds_of_different_sizes_decode_exactly(target: Target) -> None:
    draw = random.Random(5)
    motif = [draw.randrange(VOCABULARY) for _ in range(6)]
    some = [motif * 3, [7], motif[:3] + motif, prompts(2)[1]]
    results = run(target, NgramDrafter(4), some, 40, 3)
    assert [r.output_ids for r in results] == plain(target, some, 40)
    drafted = [d for r in results for d in r.num_drafted]
    assert 0 in drafted and 4 in drafted
    assert any(a > 0 for r in results for a in r.num_accepted)


def test_prompts_that_do_not_fit_are_refused(target: Target) -> None:
    fits = [[3] * 100]
    run(target, Scripted(fits, plain(target, fits, 28), [0], 4), fits, 24, 1)
    with pytest.raises(ValueError, match="exceeds the 128 positions"):
        run(target, Scripted([], [], [0], 4), fits, 25, 1)
