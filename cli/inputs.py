"""What the verbs read: prompts from files and built-in sources, the target, drafters."""

import warnings
from pathlib import Path

from ..data.prompts import Prompt, read_prompts
from ..data.stdlib import Split
from ..dflash.files import read_provenance, stated
from ..dspark.calibration import STS, read_sts
from ..dspark.draft import DSparkDraft
from ..dspark.schedule import Schedule, static_threshold
from ..eval.drafter import Drafter, NetworkDrafter
from ..eval.ngram import NgramDrafter
from ..eval.sts import difference_from_fit
from ..recipes import algorithms
from ..target.files import target_revision
from ..target.model import Target
from ..target.sampling import Sampling
from ..train.material import BUILT_IN, DTYPES, built_in_prompts

NGRAM = "ngram"  # the drafter that copies from the text so far; it has no directory
SEED = 0  # of the built-in sources: the order of a recipe with the same seed


def read_sources(sources: list[str], split: Split, limit: int | None) -> list[Prompt]:
    """The prompts of each source in turn, at most `limit` of each; a built-in one gives `split`."""
    prompts: list[Prompt] = []
    for source in sources:
        found = (
            built_in_prompts(source, split, SEED) if source in BUILT_IN else read_prompts(source)
        )
        prompts += found[:limit]
    return prompts


def load_target(path: str, dtype: str) -> Target:
    """The target in float32 or bfloat16."""
    return Target.load(path, dtype=DTYPES[dtype])


def sampling(temperature: float, top_p: float, top_k: int, seed: int) -> Sampling:
    """The options of a verb; ValueError also for those that greedy decoding would ignore."""
    chosen = Sampling(temperature, top_p, top_k, seed)
    if temperature == 0 and (top_p < 1 or top_k):
        raise ValueError(
            f"top-p {top_p:g} and top-k {top_k} at temperature 0, which takes the likeliest token; "
            "expected a --temperature above 0 beside them"
        )
    return chosen


def load_drafter(path: str, target: Target, num_draft_tokens: int) -> Drafter:
    """The drafter of a directory, or n-gram lookup with `num_draft_tokens` proposals."""
    if path == NGRAM:
        return NgramDrafter(num_draft_tokens)
    draft = algorithms.load_draft(path, dtype=target.dtype, device=str(target.device))
    warn_of_another_target(path, target)
    return NetworkDrafter(draft, target)


def warn_of_another_target(path: str, target: Target) -> None:
    """A warning where the drafter's spec.json names another target than this one.

    Of the same shape it decodes correctly, and accepts little.
    """
    record = read_provenance(path)
    name, revision = stated(record, "target", "name"), stated(record, "target", "revision")
    found = target_revision(target.path)
    if revision is not None and revision != found:  # not every drafter says
        warnings.warn(
            f"{drafter_name(path)} was trained for {name} ({revision}), this target is "
            f"{target.name} ({found}): its acceptance says little; give the target it was made for",
            stacklevel=2,
        )


def schedules(
    paths: list[str], drafters: list[Drafter], threshold: float | None, sampling: Sampling
) -> list[tuple[Schedule | None, str | None]]:
    """Schedule and name for each drafter: the threshold for the first, none for the others."""
    found: list[tuple[Schedule | None, str | None]] = [(None, None)] * len(paths)
    if threshold is not None:
        found[0] = threshold_schedule(paths[0], drafters[0], threshold, sampling)
    return found


def threshold_schedule(
    path: str, drafter: Drafter, threshold: float, sampling: Sampling
) -> tuple[Schedule, str]:
    """The static confidence threshold and its name; calibrated where the drafter has sts.json.

    Warns where that was fitted on other weights or another sampling. Raises ValueError for a
    drafter without a confidence head.
    """
    network = drafter.draft if isinstance(drafter, NetworkDrafter) else None
    if not isinstance(network, DSparkDraft) or network.confidence_head is None:
        raise ValueError(
            f"{drafter_name(path)} has no confidence head; expected one for --threshold: give a "
            "DSpark drafter trained with draft.confidence_head=true, or leave --threshold out"
        )
    sts = Path(path) / STS
    temperatures = read_sts(sts) if sts.is_file() else None
    changed = difference_from_fit(path, sampling) if temperatures else None
    if changed:
        warnings.warn(
            f"{sts.name} of {drafter_name(path)} was fitted on something else: {changed}; survival "
            "may be off: run `spec calibrate` as you serve",
            stacklevel=2,
        )
    name = f"confidence threshold {threshold:g}, {'calibrated' if temperatures else 'raw'}"
    return static_threshold(threshold, temperatures), name


def drafter_name(path: str) -> str:
    """What reports call a drafter: never the path on this machine."""
    if path == NGRAM:
        return path
    folder = Path(path).resolve()
    # A run's drafter is always called `draft`: the run says more.
    return f"{folder.parent.name}/{folder.name}" if folder.name == "draft" else folder.name
