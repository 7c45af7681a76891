"""What several verbs read: prompts from files and built-in sources, and the target itself."""

from ..data.prompts import Prompt, read_prompts
from ..data.stdlib import Split
from ..target.model import Target
from ..train.material import BUILT_IN, DTYPES, built_in_prompts

SEED = 0  # of the built-in sources: the split of a recipe with the same seed


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
