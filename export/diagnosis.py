"""What a comparison with an engine means: the pattern, named, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from .findings import Finding, defect, warning
from .parity import FEATURE_TOLERANCE, LayerMatch, PassResult
from .probe import Probe

DEAD = 1.1  # an acceptance length below this is that of an untrained drafter
ALIVE = 0.9  # of the right share: a slot that still works
COLLAPSED = 0.5
LEAST_SAME_TEXT = 0.25  # of the answers, where lengths are compared and not histograms
FAR_BELOW = 0.6  # of what was measured after training, on whatever prompts


def diagnose_features(layers: Sequence[LayerMatch], dtype: str) -> list[Finding]:
    """Whether the engine reads the layers that the drafter was made for."""
    tolerance = FEATURE_TOLERANCE[dtype]
    wrong = [layer for layer in layers if not layer.error <= tolerance]
    if not wrong:
        return []
    found = [(m.layer_id, m.nearest_layer, m.nearest_error <= tolerance) for m in wrong]
    steps = {nearest - layer_id for layer_id, nearest, near in found}
    if all(near for *_, near in found) and len(steps) == 1:
        return [
            defect(
                f"the engine's features of layers {[k for k, *_ in found]} are those of layers "
                f"{[nearest for _, nearest, _ in found]}: it counts layers otherwise",
                "check the layer ids it was started with and the capture hook of this target",
                "SGLang",
            )
        ]
    worst = max(wrong, key=lambda layer: layer.error)
    return [
        defect(
            f"the engine's features of layer {worst.layer_id} differ from ours by "
            f"{worst.error:.2g} of their size, more than {tolerance:g}, and resemble no layer: it "
            "computes the target otherwise",
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
    found: list[Finding] = []
    for each in passes:
        if tolerance and each.num_our_text < LEAST_SAME_TEXT * each.num_requests:
            found.append(
                defect(
                    f"{each.name}: {each.num_our_text} of {each.num_requests} answers are ours, "
                    "too few to compare acceptance lengths on",
                    "verify in float32, or with a smaller --max-new-tokens",
                    "SGLang",
                )
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
        return [*found, defect(f"{_lengths(differing[0])}, {where}", cure, "SGLang")]
    return [*found, _pattern(differing[0])]


def agrees(each: PassResult, tolerance: float) -> bool:
    """Tolerance 0: every histogram equal.

    Else the acceptance lengths of the answers that are ours, within that share: where a text goes
    another way, its rounds say nothing of the drafter.
    """
    if tolerance == 0:
        return each.num_equal_histogram == each.num_requests
    theirs, own = each.acceptance_length_same_text, each.acceptance_length_same_text_ours
    if theirs is None or own is None:
        return True  # has a finding of its own
    return abs(theirs - own) <= tolerance * own


def _lengths(each: PassResult) -> str:
    return (
        f"the engine accepts {each.acceptance_length:.3f} tokens a step where "
        f"{each.acceptance_length_ours:.3f} is right "
        f"({each.num_equal_histogram} of {each.num_requests} histograms equal)"
    )


def _pattern(each: PassResult) -> Finding:
    """One defect for a pass that accepts otherwise than ours in every pass."""
    theirs, own = (_conditional(s) for s in (each.survival_at, each.survival_at_ours))
    lengths = _lengths(each)
    ratios = [a / b if b else 1.0 for a, b in zip(theirs, own, strict=False)]
    if each.acceptance_length < DEAD <= each.acceptance_length_ours:
        return defect(
            f"{lengths}, all slots near zero: it reads other weights, layer ids, RoPE or "
            "vocabulary than we do",
            "spec check tells which names and keys the engine reads; compare the features above",
            "SGLang",
        )
    if ratios and ratios[0] >= ALIVE and min(ratios[1:], default=1.0) < COLLAPSED:
        return defect(
            f"{lengths}, slot 1 fine and the rest dead: the sequential head or the positions of "
            "the later slots",
            "check that the head's tensors carry the names the engine loads, and its block size",
            "SGLang",
        )
    if ratios and ratios[0] < COLLAPSED and max(ratios[1:], default=0.0) >= ALIVE:
        return defect(
            f"{lengths}, slot 1 dead and the rest fine: slots are shifted by one",
            "check the algorithm it was started with (DFLASH drafts from slot 1, DSPARK from 0)",
            "SGLang",
        )
    return defect(
        f"{lengths}, every slot a little: numbers, not meaning",
        "look for another dtype of weights or KV cache, a quantization taken over from the target, "
        "or another RoPE scaling",
        "SGLang",
    )


def _conditional(survival: Sequence[float]) -> list[float]:
    """Of rounds that kept 1..k-1, the share that kept k."""
    before = [1.0, *survival]
    return [b / a if a else 0.0 for a, b in zip(before, survival, strict=False)]


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
