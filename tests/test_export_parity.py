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
    """The second answer went another way, where its rounds say nothing of the drafter."""
    answers = [theirs(0, 0, 0, 10), theirs(5, text=(9,))]
    result = compare_pass("single", answers, [[1, 2]] * 2, [ours(*[3] * 10), ours(*[3] * 5)], K)
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
    counts["num_our_text"] = 10
    histograms: dict[str, Any] = {"histogram": [9], "histogram_ours": [9], "different": []}
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
    """One answer of six is ours: its rounds prove nothing for the rest."""
    answers = [theirs(0, 0, 0, 2), *(theirs(0, 0, 0, 2, text=(7, 7)) for _ in range(5))]
    result = compare_pass("single", answers, [[1, 2]] * 6, [ours(3, 3)] * 6, K)
    found = diagnose_passes([result], exact_text=False, tolerance=0.01)
    assert "1 of 6 answers are ours, too few to compare" in found[0].what


def test_what_is_not_a_number_is_null_in_the_report() -> None:
    nan = float("nan")
    assert LayerMatch(1, nan, 1, nan).to_json()["error"] is None
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
    """[L+1, T, H]: the embedding and five layers."""
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
    matches = [LayerMatch(1, 0.2, 1, 0.2), LayerMatch(3, 0.4, 3, 0.4)]
    found = diagnose_features(matches, "float32")
    assert "layer 3 differ" in found[0].what and "resemble no layer" in found[0].what


def test_nan_in_the_features_is_no_match() -> None:
    assert diagnose_features([LayerMatch(1, float("nan"), 1, float("nan"))], "float32")


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
