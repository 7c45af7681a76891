"""Comparison with an engine: worked histograms, layers like another one, patterns by name."""

from typing import Any

import pytest
import torch

from spec.eval.decode import Decoded
from spec.export.diagnosis import diagnose_drafter, diagnose_features, diagnose_passes
from spec.export.parity import LayerMatch, PassResult, compare_features, compare_pass
from spec.target.engine import Answer

K = 3


def ours(*accepted: int, text: tuple[int, ...] = (1, 2)) -> Decoded:
    return Decoded(list(text), "length", list(accepted), [K] * len(accepted), 0.0)


def theirs(*counts: int, text: tuple[int, ...] = (1, 2), cached: int = 0) -> Answer:
    meta = {"spec_correct_drafts_histogram": list(counts), "cached_tokens": cached}
    return Answer(list(text), meta)


def test_histograms_are_compared_request_by_request() -> None:
    """3, 0, 1 accepted is [1, 1, 0, 1]; the engine leaves trailing zeros out."""
    answers = [theirs(1, 1, 0, 1), theirs(2), theirs(0, 2)]
    decoded = [ours(3, 0, 1), ours(0, 0), ours(0, 2)]
    result = compare_pass("single", answers, [[1, 2]] * 3, decoded, K)
    assert result.num_equal_histogram == 2
    assert result.different == [
        {
            "request": 2,
            "histogram": [0, 2, 0, 0],
            "histogram_ours": [1, 0, 1, 0],
            "same_text": True,
        }
    ]
    assert result.histogram == [3, 3, 0, 1]
    assert result.acceptance_length == 1 + (3 + 3) / 7
    assert result.acceptance_length_ours == 1 + (4 + 0 + 2) / 7
    assert result.survival_at == [4 / 7, 1 / 7, 1 / 7]


def test_equal_sums_of_unequal_requests_are_no_match() -> None:
    answers = [theirs(0, 0, 0, 1), theirs(1)]
    decoded = [ours(0), ours(3)]
    result = compare_pass("single", answers, [[1, 2]] * 2, decoded, K)
    assert result.acceptance_length == result.acceptance_length_ours
    assert result.num_equal_histogram == 0
    assert [f.severity for f in diagnose_passes([result], exact_text=True, tolerance=0.0)] == [
        "defect"
    ]


def test_an_engine_that_drafts_more_differs() -> None:
    result = compare_pass("single", [theirs(0, 0, 0, 0, 1)], [[1, 2]], [ours(3)], K)
    assert result.num_equal_histogram == 0


def test_text_is_compared_with_the_engines_plain_decoding() -> None:
    answers = [theirs(1, text=(1, 2)), theirs(1, text=(1, 3))]
    result = compare_pass("single", answers, [[1, 2], [1, 2]], [ours(0), ours(0)], K)
    assert result.num_equal_text == 1
    found = diagnose_passes([result], exact_text=True, tolerance=0.0)
    assert "1 of 2 answers differ from the engine's own plain decoding" in found[0].what


def test_in_bfloat16_lengths_of_the_requests_with_our_text_count() -> None:
    """The second answer went another way, where its rounds say little of the drafter."""
    answers = [theirs(0, 0, 0, 10), theirs(0, 0, 1, text=(9,))]
    result = compare_pass("single", answers, [[1, 2]] * 2, [ours(*[3] * 10), ours(3)], K)
    assert result.acceptance_length_same_text == result.acceptance_length_same_text_ours == 4.0
    assert diagnose_passes([result], exact_text=False, tolerance=0.01) == []
    assert diagnose_passes([result], exact_text=True, tolerance=0.0) != []


def one_pass(survival: list[float], own: list[float], name: str = "single", **more: Any) -> Any:
    lengths = {
        "acceptance_length": 1 + sum(survival),
        "acceptance_length_ours": 1 + sum(own),
        "acceptance_length_same_text": None,
        "acceptance_length_same_text_ours": None,
    }
    counts = {"num_requests": 10, "num_equal_text": 10, "num_equal_histogram": 0}
    counts |= {"num_our_text": 10, "num_our_text_plain": 10}
    counts |= {"num_shared_tokens": 640, "num_shared_tokens_plain": 640}
    histograms: dict[str, Any] = {"histogram": [400], "histogram_ours": [400], "different": []}
    fields = {"cached_tokens": 0, **lengths, **counts, **histograms, **more}
    return PassResult(name=name, survival_at=survival, survival_at_ours=own, **fields)


RIGHT = [0.9, 0.7, 0.5, 0.4]


@pytest.mark.parametrize(
    ("survival", "named"),
    [
        ([0.02, 0.0, 0.0, 0.0], "all slots near zero"),
        ([0.88, 0.1, 0.0, 0.0], "slot 1 fine and the rest dead"),
        ([0.3, 0.25, 0.2, 0.15], "slot 1 dead and the rest fine"),
        ([0.85, 0.6, 0.4, 0.3], "every slot a little"),
        ([0.99, 0.95, 0.9, 0.9], "more than this drafter earns"),
    ],
)
def test_patterns_have_names(survival: list[float], named: str) -> None:
    found = diagnose_passes([one_pass(survival, RIGHT)], exact_text=True, tolerance=0.0)
    assert len(found) == 1 and named in found[0].what, found


def test_a_server_that_does_not_draft_is_no_small_difference() -> None:
    """Whatever the tolerance, and even where we accept nothing either."""
    answers = [theirs(), theirs()]
    result = compare_pass("single", answers, [[1, 2]] * 2, [ours(0), ours(0)], K)
    for tolerance in (0.0, 0.2):
        found = diagnose_passes([result], exact_text=False, tolerance=tolerance)
        assert [each.severity for each in found] == ["defect"] and "does not draft" in found[0].what


def test_lengths_are_not_compared_on_other_texts() -> None:
    """One answer of six is ours, with a drafter or without: its rounds prove nothing."""
    answers = [theirs(0, 0, 0, 2), *(theirs(0, 0, 0, 2, text=(7, 7)) for _ in range(5))]
    plain = [[1, 2], *[[7, 7]] * 5]
    result = compare_pass("single", answers, plain, [ours(3, 3)] * 6, K)
    found = diagnose_passes([result], exact_text=False, tolerance=0.01)
    assert len(found) == 1 and "1 of 6 answers are ours, too few to compare" in found[0].what


WEAK = [0] * 26 + [1] * 11 + [2] * 3 + [3]
TEXT = tuple(range(64))


def bfloat16(
    parts_at: list[int], *, plain_parts_at: list[int], made_up: bool = False
) -> PassResult:
    """Answers that part from ours at a token, 64 for never; `made_up` rounds where they do."""
    counts = [26, 11, 3, 1]

    def parted(at: int) -> tuple[int, ...]:
        return (*TEXT[:at], *[99] * (64 - at))

    answers = [
        theirs(*([1, 0, 0, 9] if made_up and at < 64 else counts), text=parted(at))
        for at in parts_at
    ]
    plain = [list(parted(at)) for at in plain_parts_at]
    return compare_pass("single", answers, plain, [ours(*WEAK, text=TEXT)] * len(answers), K)


NEAR_TIES = [64] * 15 + [8, 16, 24, 32, 40] * 5  # 15 of 40 texts equal, as in two right ones


def judged(*passes: PassResult) -> list[str]:
    return [f.what for f in diagnose_passes(passes, exact_text=False, tolerance=0.01)]


def test_texts_that_part_at_near_ties_pass_in_bfloat16() -> None:
    fewer = [64] * 13 + [5] * 3 + [8, 16, 24, 32] * 6
    right = [bfloat16(each, plain_parts_at=NEAR_TIES) for each in (NEAR_TIES, fewer)]
    assert [(each.num_our_text, each.num_our_text_plain) for each in right] == [(15, 15), (13, 15)]
    assert right[0].num_shared_tokens == 15 * 64 + 5 * 120
    assert judged(*right) == []


def test_a_server_that_answers_mostly_otherwise_fails_in_bfloat16() -> None:
    """Its ten answers that are ours, and their rounds, are right."""
    wrong = bfloat16([64] * 10 + [0] * 30, plain_parts_at=[64] * 40)
    assert wrong.acceptance_length_same_text == wrong.acceptance_length_same_text_ours
    (found,) = judged(wrong)
    assert "10 of 40 answers are ours and 640 tokens" in found and "40 and 2560" in found


def test_texts_that_part_at_once_are_no_near_ties() -> None:
    """As many answers are ours as of the plain server; the others part at the first token."""
    shared = [64] * 12 + [0] * 28
    (found,) = judged(bfloat16(shared, plain_parts_at=[64] * 14 + [32] * 26))
    assert "verification is at fault" in found


def test_a_pass_far_below_the_others_fails_in_bfloat16() -> None:
    """A plain server of another text does not excuse it."""
    ties = [30] * 40
    good, bad = (bfloat16(each, plain_parts_at=ties) for each in ([64] * 40, [64] * 15 + ties[15:]))
    (found,) = judged(good, bad)
    assert "15 of 40 answers are ours" in found


def test_made_up_rounds_of_other_texts_fail_in_bfloat16() -> None:
    """The length over all answers is near too, text or no text."""
    (found,) = judged(bfloat16(NEAR_TIES, plain_parts_at=NEAR_TIES, made_up=True))
    assert "answers that are not ours cannot be this drafter's" in found
    assert "on the 15 answers that are ours 1.488 for 1.488" in found


def test_one_round_of_forty_requests_is_no_pattern() -> None:
    """We keep 3 in a round where the engine keeps 2: few rounds come so far at all."""
    deep = [0] * 26 + [1] * 11 + [2] * 3
    decoded = [ours(*deep, 3), *[ours(*deep)] * 39]
    answers = [theirs(26, 11, 4), *[theirs(26, 11, 3)] * 39]
    plain = [[1, 2]] * 40
    passes = [compare_pass(name, answers, plain, decoded, K) for name in ("single", "batched")]
    (found,) = diagnose_passes(passes, exact_text=True, tolerance=0.0)
    assert found.severity == "defect" and "1 of 40 requests differ in single rounds" in found.what
    assert "dead" not in found.what
    right = compare_pass("single", answers, plain, [*[ours(*deep, 2)], *decoded[1:]], K)
    (found,) = diagnose_passes([right, passes[1]], exact_text=True, tolerance=0.0)
    assert "only in the passes batched" in found.what and "single rounds" in found.cure


def test_slots_that_few_rounds_reach_have_no_pattern() -> None:
    few = one_pass([0.9, 0.1, 0.0, 0.0], RIGHT, histogram=[30], histogram_ours=[30])
    (found,) = diagnose_passes([few], exact_text=True, tolerance=0.0)
    assert "every slot a little" in found.what


def test_what_is_not_a_number_is_null_in_the_report() -> None:
    nan = float("nan")
    assert LayerMatch(1, nan, nan, 1, nan).to_json()["error"] is None
    matches = compare_features([torch.full((7, 4), nan)], [states()], [1])
    assert diagnose_features(matches, "float32")


def test_a_pass_that_differs_alone_points_at_what_it_adds() -> None:
    good = {"num_equal_histogram": 10}
    passes = [
        one_pass(RIGHT, RIGHT, "single", **good),
        one_pass(RIGHT, RIGHT, "batched", **good),
        one_pass([0.5, 0.2, 0.1, 0.0], RIGHT, "cached"),
    ]
    found = diagnose_passes(passes, exact_text=True, tolerance=0.0)
    assert len(found) == 1
    assert "only in the passes cached" in found[0].what and "prefix cache" in found[0].cure


def test_agreement_has_no_finding() -> None:
    assert (
        diagnose_passes(
            [one_pass(RIGHT, RIGHT, num_equal_histogram=10)], exact_text=True, tolerance=0.0
        )
        == []
    )


def states() -> torch.Tensor:
    """[L, T, H]: the embedding and five layers."""
    return torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(0))


def test_features_equal_to_ours_match_their_own_layer() -> None:
    own = states()
    captured = torch.cat([own[2], own[4]], dim=-1)
    matches = compare_features([captured], [own], [1, 3])
    assert [(m.layer_id, m.error, m.nearest_layer) for m in matches] == [(1, 0.0, 1), (3, 0.0, 3)]
    assert diagnose_features(matches, "float32") == []


def test_layers_read_one_too_high_are_recognized() -> None:
    own = states()
    captured = torch.cat([own[3], own[5]], dim=-1)
    found = diagnose_features(compare_features([captured], [own], [1, 3]), "float32")
    assert "layers [1, 3] are those of layers [2, 4]" in found[0].what


def test_features_like_no_layer_are_another_target() -> None:
    matches = [LayerMatch(1, 0.2, 0.2, 1, 0.2), LayerMatch(3, 0.4, 0.4, 3, 0.4)]
    found = diagnose_features(matches, "float32")
    assert "layer 3 differ" in found[0].what and "resemble no layer" in found[0].what


BF16 = "bfloat16"


def with_sink() -> torch.Tensor:
    """[L, T, H] whose first token is 150 times the others, the same in every layer."""
    draw = torch.Generator().manual_seed(1)
    first = 150 * torch.randn(1, 1, 16, generator=draw).expand(6, 1, 16)
    return torch.cat([first, torch.randn(6, 63, 16, generator=draw)], dim=1)


def noisy(rows: torch.Tensor, share: float, first: int, last: int) -> torch.Tensor:
    """Tokens first..last-1 moved by that share of their size."""
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2))
    noise *= share * rows.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    changed = rows.clone()
    changed[first:last] += noise[first:last]
    return changed


def test_an_attention_sink_hides_no_other_token() -> None:
    own = with_sink()
    one_norm = (own[4] - own[3]).norm() / own[3].norm()
    assert one_norm < 0.1, "one norm over all tokens sees the sink alone"

    def said(captured: torch.Tensor) -> list[str]:
        return [f.what for f in diagnose_features(compare_features([captured], [own], [2]), BF16)]

    assert said(noisy(own[3], 0.02, 0, 64)) == [], "rounding"
    assert said(noisy(own[3], 0.3, 10, 12)) == [], "two tokens of 64"
    assert "layers [2] are those of layers [3]" in said(own[4])[0]
    assert "resemble no layer" in said(noisy(own[3], 0.3, 1, 64))[0]
    assert "one token of twenty" in said(noisy(own[3], 0.3, 10, 20))[0]


def test_another_layer_clearly_nearer_is_read_though_both_are_near() -> None:
    near = [LayerMatch(20, 0.025, 0.03, 21, 0.005), LayerMatch(8, 0.01, 0.02, 8, 0.01)]
    (found,) = diagnose_features(near, BF16)
    assert "layers [20] are those of layers [21]" in found.what
    assert diagnose_features([LayerMatch(20, 0.025, 0.03, 21, 0.02)], BF16) == []


def test_nan_in_the_features_is_no_match() -> None:
    assert diagnose_features(
        [LayerMatch(1, float("nan"), float("nan"), 1, float("nan"))], "float32"
    )


def test_rows_missing_for_cached_tokens_are_refused() -> None:
    own = states()
    with pytest.raises(ValueError, match="--disable-radix-cache"):
        compare_features([own[2][:5]], [own], [1])


def test_a_dead_drafter_without_an_explanation_is_a_defect() -> None:
    found = diagnose_drafter(None, 1.03, None)
    assert found[0].severity == "defect" and "almost nothing is accepted" in found[0].what


def test_far_below_the_recorded_length_is_a_warning() -> None:
    assert [f.severity for f in diagnose_drafter(None, 2.0, 5.0)] == ["warning"]
    assert diagnose_drafter(None, 4.0, 5.0) == []
