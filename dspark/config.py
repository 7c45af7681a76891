"""What a DSpark drafter is: DFlash's config, one more drafted token, and the heads.

Slot j of a block predicts the token at anchor + j + 1, the anchor's slot too. The keys are flat in
`config.json`, as SGLang and DeepSpec's checkpoints have them. `markov_rank` 0 is the backbone alone
with these slots (what DeepSpec calls "dflash"); SGLang does not serve it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from ..dflash.config import DFlashConfig

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
HEAD_TYPES: tuple[str, ...] = get_args(MarkovHeadType)
HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
MAX_RANK = 512


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """DFlash's fields, and which heads there are."""

    markov_rank: int
    markov_head_type: MarkovHeadType = "vanilla"  # means nothing at rank 0
    enable_confidence_head: bool
    confidence_head_with_markov: bool = False

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3DSparkModel", "DSparkDraftModel")
    required_keys: ClassVar[tuple[str, ...]] = (
        *DFlashConfig.required_keys,
        "markov_rank",
        "enable_confidence_head",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(**{key: getattr(self, key) for key in HEAD_KEYS})

    @property
    def num_draft_tokens(self) -> int:
        """Tokens a block proposes: one a slot, the anchor's too."""
        return self.block_size

    @property
    def first_slot(self) -> int:
        """The block slot that drafts the first token: the anchor's."""
        return 0

    def _own_keys(self) -> dict[str, Any]:
        return {
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
            "input_embedding_scale": self.input_embedding_scale,
            **{key: getattr(self, key) for key in HEAD_KEYS},
        }

    @classmethod
    def _read_own(cls, own: dict[str, Any], where: str) -> dict[str, Any]:
        if own.get("sample_from_anchor", True) is not True:
            raise ValueError(
                f"{where}: sample_from_anchor is {own['sample_from_anchor']!r}; only drafters "
                "whose anchor slot predicts the first token are supported"
            )
        needed = {"markov_head_type": own["markov_rank"] != 0}
        needed["confidence_head_with_markov"] = bool(own["enable_confidence_head"])
        missing = [key for key, wanted in needed.items() if wanted and own.get(key) is None]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}; add what it was trained with")
        found = {key: own[key] for key in HEAD_KEYS if own.get(key) is not None}
        try:
            check_heads(**found)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return found


def check_heads(
    *,
    markov_rank: object,
    markov_head_type: object = "vanilla",
    enable_confidence_head: object,
    confidence_head_with_markov: object = False,
) -> None:
    """ValueError for heads that do not exist or do not go together."""
    rank, kind = markov_rank, markov_head_type
    confidence, with_markov = enable_confidence_head, confidence_head_with_markov
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise ValueError(f"markov_rank is {rank!r}, expected a whole number from 0 to {MAX_RANK}")
    if kind not in HEAD_TYPES:
        raise ValueError(f"markov_head_type is {kind!r}, expected one of {', '.join(HEAD_TYPES)}")
    for key, value in (
        ("enable_confidence_head", confidence),
        ("confidence_head_with_markov", with_markov),
    ):
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}, expected true or false")
    if with_markov and not confidence:
        raise ValueError("confidence_head_with_markov without enable_confidence_head; drop one")
    if with_markov and rank == 0:
        raise ValueError(
            "confidence_head_with_markov needs a Markov embedding: set markov_rank above 0, or "
            "confidence_head_with_markov to false"
        )
