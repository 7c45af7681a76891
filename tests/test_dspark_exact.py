"""Whatever a DSpark drafter proposes and however much of it is verified: plain decoding's output.

fp32, greedy, on a trained target; drafters that have learned enough to be right now and then.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from accelerate import PartialState
from torch import Tensor
from trained_target import NEW_TOKENS, plain, prompts, trained_target

from spec.data.cache import CacheReader
from spec.data.rows import Row
from spec.dspark.config import DSparkConfig
from spec.dspark.draft import DSparkDraft
from spec.dspark.schedule import Schedule
from spec.eval.decode import Decoded, speculate
from spec.eval.drafter import NetworkDrafter
from spec.recipes.load import load_recipe
from spec.train.drafter import make_draft
from spec.train.material import Material
from spec.train.step import make_run, train_step

pytestmark = pytest.mark.slow
K = 4
NUM_PROMPTS = 10  # the list to copy and a repeat among them
BATCH = 4
TRAINING = (
    "target.make=null", "target.path=unused", "data.prompts=[]", "data.rows=[unused]",
    "draft.algorithm=dspark", f"draft.block_size={K}", "draft.num_layers=1", "draft.markov_rank=16",
    "draft.target_layer_ids=[1, 3]", "train.steps=60", "train.batch_size=1", "loss.labels=hard",
)  # fmt: skip
HEADS = {
    "vanilla": ("draft.markov_head_type=vanilla",),
    "gated": ("draft.markov_head_type=gated",),
    "rnn": ("draft.markov_head_type=rnn",),
    "rank 0": ("draft.markov_rank=0",),
    "confidence without markov": ("draft.confidence_head_with_markov=false",),
    "no confidence": ("draft.confidence_head=false",),
    "rank 0, no confidence": ("draft.markov_rank=0", "draft.confidence_head=false"),
}
TELLING = [name for name, overrides in HEADS.items() if HEADS["no confidence"][0] not in overrides]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DSparkDraft]:
    """A drafter of every head, two seconds of training each on some of the answers."""
    target = trained_target()
    rows = [
        Row(str(i), prompt + answer, [0] * len(prompt) + [1] * len(answer))
        for i, (prompt, answer) in enumerate(zip(prompts(), plain(NUM_PROMPTS), strict=False))
    ]
    made: dict[str, DSparkDraft] = {}
    for name, heads in HEADS.items():
        recipe = load_recipe("tiny", [*TRAINING, *heads])
        cache = CacheReader(tmp_path_factory.mktemp("none"), recipe.teacher)
        draft = make_draft(recipe.draft, target, 0)
        assert isinstance(draft, DSparkDraft)
        run = make_run(recipe, target, draft, Material(rows, [], cache, 0.0))
        assert run.num_steps is not None
        for step in range(run.num_steps):
            train_step(run, 1.0 - step / run.num_steps, PartialState(cpu=True), elapsed=0.0)
            run.state.step += 1
        made[name] = draft.eval()
    return made


def decode(draft: DSparkDraft, schedule: Schedule | None) -> list[Decoded]:
    results = speculate(
        trained_target(),
        NetworkDrafter(draft, trained_target()),
        prompts()[:NUM_PROMPTS],
        max_new_tokens=NEW_TOKENS,
        batch_size=BATCH,
        schedule=schedule,
    )
    assert [r.output_ids for r in results] == plain(NUM_PROMPTS)
    return results


def lengths_of(results: list[Decoded]) -> set[int]:
    return {length for r in results for length in r.num_drafted}


def accepted_of(results: list[Decoded]) -> set[int]:
    return {accepted for r in results for accepted in r.num_accepted}


@pytest.mark.parametrize("name", HEADS)
def test_every_head_verified_in_full(drafters: dict[str, DSparkDraft], name: str) -> None:
    results = decode(drafters[name], None)
    assert lengths_of(results) == {K}
    assert accepted_of(results) >= {0, 1, K}
    for r in results:
        told = [len(logits) for logits in r.confidence]
        assert told == ([K] * len(r.num_drafted) if name in TELLING else [])


@pytest.mark.parametrize("length", range(K + 1))
@pytest.mark.parametrize("name", TELLING)
def test_every_verification_length(
    drafters: dict[str, DSparkDraft], name: str, length: int
) -> None:
    results = decode(drafters[name], lambda logits: logits.new_full((len(logits),), length).long())
    assert lengths_of(results) == {length}
    assert accepted_of(results) >= {0, length}


@pytest.mark.parametrize("name", TELLING)
def test_each_request_its_own_length(drafters: dict[str, DSparkDraft], name: str) -> None:
    rounds = itertools.count()
    seen: set[tuple[int, ...]] = set()

    def schedule(logits: Tensor) -> Tensor:
        """2, 4, 1, 3, 0, 2, ... over the requests of a round, shifted each round."""
        lengths = (2 * torch.arange(1, len(logits) + 1) + next(rounds)) % (K + 1)
        seen.add(tuple(lengths.tolist()))
        return lengths

    results = decode(drafters[name], schedule)
    assert lengths_of(results) == set(range(K + 1))
    assert accepted_of(results) >= {0, K}
    assert max(len(set(lengths)) for lengths in seen) == BATCH  # side by side, all different


@pytest.mark.parametrize("name", TELLING)
def test_a_length_by_confidence(drafters: dict[str, DSparkDraft], name: str) -> None:
    """As a threshold does it; a shorter verification keeps what the longer one would have kept."""

    def likely(logits: Tensor) -> Tensor:
        return (logits.sigmoid().cumprod(1) >= 0.5).sum(1)

    results = decode(drafters[name], likely)
    assert len(lengths_of(results)) > 1
    for r in results:
        for logits, drafted in zip(r.confidence, r.num_drafted, strict=True):
            assert drafted == int(likely(torch.tensor([logits])))


def test_another_block_size_from_the_same_weights(drafters: dict[str, DSparkDraft]) -> None:
    """A drafter trained on four slots decodes with two and with seven: K is not in its weights."""
    for block_size in (2, 7):
        draft = drafters["rnn"]
        config = replace(draft.config, block_size=block_size)
        assert isinstance(config, DSparkConfig)
        other = DSparkDraft(config)
        other.load_state_dict(draft.state_dict())
        assert lengths_of(decode(other.eval(), None)) == {block_size}
