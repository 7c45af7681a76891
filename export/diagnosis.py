"""What a comparison with an engine means: the pattern, named, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .findings import Finding, defect, warning
from .parity import FEATURE_TOLERANCE, TAIL_TOLERANCE, LayerMatch, PassResult
from .probe import Probe

DEAD = 1.1  # an acceptance length below this is that of an untrained drafter
ALIVE = 0.9  # of the right share: a slot that still works
COLLAPSED = 0.5
LEAST_SAME_TEXT = 0.25  # of the answers, where lengths are compared and not histograms
LEAST_OF_BEST = 0.5  # of the text that the plain server, or another pass, has in common with ours
FEW_ANSWERS = 4  # so many may part by chance
ALL_TOLERANCE = 0.1  # of the acceptance length of all answers, those of another text among them
SEVERAL = 0.03  # of the acceptance length: a smaller difference has no pattern
LEAST_ROUNDS = 30  # that reach slot 2, before anything is said of the slots behind the first
CLEARLY_NEARER = 0.5  # of the stated layer's error
FAR_BELOW = 0.6  # of what was measured after training, on whatever prompts
NUMBERS = (
    "look for another dtype of weights or KV cache, a quantization taken over from the target, or "
    "another RoPE scaling"
)


def diagnose_features(layers: Sequence[LayerMatch], dtype: str) -> list[Finding]:
    """Whether the engine reads the layers that the drafter was made for."""
    tolerance = FEATURE_TOLERANCE[dtype]
    tail = TAIL_TOLERANCE * tolerance
    wrong = [
        m
        for m in layers
        # Not a number is no match.
        if not (m.error <= tolerance and m.error_tail <= tail)
        or m.nearest_error < CLEARLY_NEARER * m.error
    ]
    unlike = [m for m in wrong if m.nearest_layer == m.layer_id or not m.nearest_error <= tolerance]
    if not wrong:
        return []
    if not unlike:
        steps = {m.nearest_layer - m.layer_id for m in wrong}
        return [
            defect(
                f"the engine's features of layers {[m.layer_id for m in wrong]} are those of "
                f"layers {[m.nearest_layer for m in wrong]}: it "
                f"{'counts layers otherwise' if len(steps) == 1 else 'captures other layers'}",
                "check the layer ids it was started with and the capture hook of this target",
                "SGLang",
            )
        ]
    worst = max(unlike, key=lambda m: (m.error, m.error_tail))
    most = f"{worst.error:.2g} of a token's size at the median, more than {tolerance:g}"
    some = f"{worst.error_tail:.2g} of its size in one token of twenty, more than {tail:g}"
    return [
        defect(
            f"the engine's features of layer {worst.layer_id} differ from ours by "
            + (
                f"{some}: it computes some tokens otherwise"
                if worst.error <= tolerance
                else f"{most}, and resemble no layer: it computes the target otherwise"
            ),
            "serve the same weights in the same dtype, without quantization, and verify again",
            "SGLang",
        )
    ]


def diagnose_passes(
    passes: Sequence[PassResult], *, exact_text: bool, tolerance: float
) -> list[Finding]:
    """What is wrong with the passes; nothing where they agree.

    `exact_text` asks for plain decoding's text; `tolerance` is `agrees`'.
    """
    silent = [each.name for each in passes if not sum(each.histogram)]
    if silent:
        return [
            defect(
                f"{', '.join(silent)}: the engine reports no verified round: it does not draft",
                "start it with the drafter's algorithm and without options that turn it off",
                "SGLang",
            )
        ]
    found = _of_text(passes, exact_text=exact_text, tolerance=tolerance)
    differing = [each for each in passes if not agrees(each, tolerance)]
    if not differing:
        return found
    if len(differing) < len(passes):
        names = ", ".join(each.name for each in differing)
        fine = ", ".join(each.name for each in passes if each not in differing)
        where = f"only in the passes {names}; {fine} agrees"
        cures = {
            "cached": "context features of tokens that came from the prefix cache are at fault: "
            "serve with --disable-radix-cache until they are mended",
            "batched": "requests in one batch disturb each other: report it to the engine",
        }
        cure = cures.get(differing[0].name, "serve as the passes that agree")
        if _differs_hardly(differing[0]):
            cure = f"single rounds prove no fault of these passes; {NUMBERS}"
        return [*found, defect(f"{_lengths(differing[0])}, {where}", cure, "SGLang")]
    if all(_same_text_agrees(each, tolerance) for each in differing):
        return [
            *found,
            defect(
                f"{_lengths(differing[0])}: rounds of answers that are not ours cannot be this "
                "drafter's",
                "verify in float32, where every answer has to be plain decoding's",
                "SGLang",
            ),
        ]
    return [*found, _pattern(differing[0])]


def _of_text(passes: Sequence[PassResult], *, exact_text: bool, tolerance: float) -> list[Finding]:
    """What the answers themselves say, pass by pass."""
    found: list[Finding] = []
    # Two right implementations in bfloat16 part at near-ties: the plain server shows how often.
    counts = [n for each in passes for n in (each.num_our_text, each.num_our_text_plain)]
    shared = [n for each in passes for n in (each.num_shared_tokens, each.num_shared_tokens_plain)]
    best, longest = max(counts, default=0), max(shared, default=0)
    for each in passes:
        one = longest / each.num_requests  # answer, in tokens
        foreign = _far_below(each.num_our_text, best, 1) or _far_below(
            each.num_shared_tokens, longest, one
        )
        if exact_text and each.num_equal_text < each.num_requests:
            found.append(
                defect(
                    f"{each.name}: {each.num_requests - each.num_equal_text} of "
                    f"{each.num_requests} answers differ from the engine's own plain decoding; a "
                    "drafter cannot do that, verification is at fault",
                    "report it to the engine, and do not serve with these options",
                    "SGLang",
                )
            )
        elif not exact_text and foreign:
            found.append(
                defect(
                    f"{each.name}: {each.num_our_text} of {each.num_requests} answers are ours and "
                    f"{each.num_shared_tokens} tokens before they part from ours; the plain server "
                    f"or another pass has {best} and {longest}: more than rounding, verification "
                    "is at fault",
                    "verify in float32, where every answer has to be plain decoding's",
                    "SGLang",
                )
            )
        elif tolerance and each.num_our_text < LEAST_SAME_TEXT * each.num_requests:
            found.append(
                defect(
                    f"{each.name}: {each.num_our_text} of {each.num_requests} answers are ours, "
                    "too few to compare acceptance lengths on",
                    "verify in float32, or with a smaller --max-new-tokens",
                    "SGLang",
                )
            )
    return found


def _far_below(count: float, best: float, answer: float) -> bool:
    """By half of the best, and by more answers than part by chance where prompts are few."""
    return best - count > max(FEW_ANSWERS * answer, (1 - LEAST_OF_BEST) * best)


def agrees(each: PassResult, tolerance: float) -> bool:
    """Tolerance 0: every histogram equal.

    Else the acceptance lengths of the answers that are ours, within that share, and of all answers
    within a wider one: where a text goes another way, its rounds say less of the drafter.
    """
    if tolerance == 0:
        return each.num_equal_histogram == each.num_requests
    bound = max(tolerance, ALL_TOLERANCE) * each.acceptance_length_ours
    near = abs(each.acceptance_length - each.acceptance_length_ours) <= bound
    return near and _same_text_agrees(each, tolerance)


def _same_text_agrees(each: PassResult, tolerance: float) -> bool:
    theirs, own = each.acceptance_length_same_text, each.acceptance_length_same_text_ours
    if tolerance == 0:
        return False  # histograms count
    if theirs is None or own is None:
        return True  # has a finding of its own
    return abs(theirs - own) <= tolerance * own


def _differs_hardly(each: PassResult) -> bool:
    """Whether the lengths are so near that no slot can be dead: of all answers and of ours."""
    difference = abs(each.acceptance_length - each.acceptance_length_ours)
    theirs, own = each.acceptance_length_same_text, each.acceptance_length_same_text_ours
    same = theirs is None or own is None or abs(theirs - own) <= SEVERAL * own
    return same and difference <= SEVERAL * each.acceptance_length_ours


def _lengths(each: PassResult) -> str:
    lengths = (
        f"the engine accepts {each.acceptance_length:.3f} tokens a step where "
        f"{each.acceptance_length_ours:.3f} is right "
        f"({each.num_equal_histogram} of {each.num_requests} histograms equal)"
    )
    theirs, own = each.acceptance_length_same_text, each.acceptance_length_same_text_ours
    if theirs is None or own is None or each.num_our_text == each.num_requests:
        return lengths
    return f"{lengths}, on the {each.num_our_text} answers that are ours {theirs:.3f} for {own:.3f}"


def _pattern(each: PassResult) -> Finding:
    """One defect for a pass that accepts otherwise than ours in every pass."""
    lengths = _lengths(each)
    if _differs_hardly(each):
        return defect(
            f"{each.num_requests - each.num_equal_histogram} of {each.num_requests} requests "
            f"differ in single rounds while the lengths nearly agree, which is no pattern: "
            f"{lengths}",
            NUMBERS,
            "SGLang",
        )
    accepted, right = each.acceptance_length - 1, each.acceptance_length_ours - 1
    if each.acceptance_length > (1 + ALL_TOLERANCE) * each.acceptance_length_ours:
        return defect(
            f"{lengths}, more than this drafter earns: it counts or verifies otherwise than "
            "greedy decoding",
            "serve without options that accept more, and report it to the engine",
            "SGLang",
        )
    if each.acceptance_length < DEAD and accepted < COLLAPSED * right:
        return defect(
            f"{lengths}, all slots near zero: it reads other weights, layer ids, RoPE or "
            "vocabulary than we do",
            "spec check tells which names and keys the engine reads; compare the features above",
            "SGLang",
        )
    first, rest = _kept(each)
    if first >= ALIVE and rest < COLLAPSED:
        return defect(
            f"{lengths}, slot 1 fine and the rest dead: the sequential head or the positions of "
            "the later slots",
            "check that the head's tensors carry the names the engine loads, and its block size",
            "SGLang",
        )
    if first < COLLAPSED and rest >= ALIVE:
        return defect(
            f"{lengths}, slot 1 dead and the rest fine: slots are shifted by one",
            "check the algorithm it was started with (DFLASH drafts from slot 1, DSPARK from 0)",
            "SGLang",
        )
    return defect(f"{lengths}, every slot a little: numbers, not meaning", NUMBERS, "SGLang")


def _kept(each: PassResult) -> tuple[float, float]:
    """Of what is right, what the engine keeps in slot 1, and behind it where slot 1 was kept.

    Slots behind the first are one pool: few rounds reach the last, and one of them proves nothing.
    Not a number, which is no pattern, where too few rounds reach slot 2.
    """
    theirs, own = each.survival_at, each.survival_at_ours
    reached = min(
        survival[0] * sum(histogram)
        for survival, histogram in ((theirs, each.histogram), (own, each.histogram_ours))
    )
    if reached < LEAST_ROUNDS or not sum(own[1:]):
        return math.nan, math.nan
    behind, behind_ours = sum(theirs[1:]) / theirs[0], sum(own[1:]) / own[0]
    return theirs[0] / own[0], behind / behind_ours


def diagnose_drafter(probed: Probe | None, own: float, recorded: float | None) -> list[Finding]:
    """Faults that the engine and we share: the files say something else than was trained.

    `own` is our acceptance length, `recorded` the one measured after training.
    """
    found: list[Finding] = []
    if probed is not None and probed.better:
        best = probed.better[0]
        found.append(
            defect(
                f"{best.mistake}; with {best.what} it accepts {best.acceptance_length:.2f} tokens "
                f"a step, as it is {probed.acceptance_length:.2f}",
                best.cure,
            )
        )
    if own < DEAD and not found:
        found.append(
            defect(
                f"almost nothing is accepted ({own:.2f} tokens a step), by us either, and no "
                "likely mistake explains it: untrained, another target's, or other weights",
                "measure the run's own draft directory with spec eval; train it with this target",
            )
        )
    elif recorded is not None and own < FAR_BELOW * recorded and not found:
        found.append(
            warning(
                f"it accepts {own:.2f} tokens a step here and {recorded:.2f} after training "
                "(spec.json), on other prompts",
                "verify with prompts like the held-out ones; if they are, the weights changed",
            )
        )
    return found
