"""What the verbs read: prompts from files and built-in sources, the target, drafters."""

from pathlib import Path

from ..data.prompts import Prompt, read_prompts
from ..data.stdlib import Split
from ..eval.decode import Drafter, NetworkDrafter
from ..eval.ngram import NgramDrafter
from ..recipes import algorithms
from ..target.model import Target
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


def load_drafter(path: str, target: Target, num_draft_tokens: int) -> Drafter:
    """The drafter of a directory, or n-gram lookup with `num_draft_tokens` proposals."""
    if path == NGRAM:
        return NgramDrafter(num_draft_tokens)
    draft = algorithms.load_draft(path, dtype=target.dtype, device=str(target.device))
    return NetworkDrafter(draft, target)


def drafter_name(path: str) -> str:
    """What reports call a drafter: never the path on this machine."""
    if path == NGRAM:
        return path
    folder = Path(path).resolve()
    # A run's drafter is always called `draft`: the run says more.
    return f"{folder.parent.name}/{folder.name}" if folder.name == "draft" else folder.name


def algorithm_of(path: str) -> str:
    """The report's `algorithm`."""
    return NGRAM if path == NGRAM else algorithms.algorithm_of(path)
