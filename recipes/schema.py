"""The recipe: everything a run depends on, in one strict YAML file.

Each default is written here and nowhere else; load.py reads files and overrides. The resolved
recipe is printed and saved beside the run.
"""

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..dspark.config import MAX_RANK, MarkovHeadType
from ..target.teacher import Teacher

BOUNDS = ("steps", "epochs", "minutes")  # of a run's length: exactly one
Dtype = Literal["float32", "bfloat16"]
Algorithm = Literal["dflash", "dspark"]
# Keys that only DSpark has, with what they are where a DSpark recipe leaves them out: the paper's.
DSPARK_DEFAULTS: dict[str, dict[str, Any]] = {
    "draft": {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "loss": {"ce": 0.1, "l1": 0.9, "renyi": 0.0, "confidence": 1.0, "ce_until": 0.0},
}
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the recipe: frozen, and no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSection(Section):
    """The frozen model.

    Exactly what `spec inspect` takes, or a model the run makes or converts under `out/target`.
    """

    path: str | None = Field(None, description="directory, hub id or .gguf file")
    gguf_package: str | None = Field(
        None, description="installed package whose GGUF file stands in when no hub answers"
    )
    make: Literal["tiny"] | None = Field(None, description="train the tiny byte-level target first")
    dtype: Dtype = Field("bfloat16", description="compute dtype of the target")
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "TargetSection":
        if (self.make is None) == (self.path is None and self.gguf_package is None):
            raise ValueError(
                "name a target: target.path (or target.gguf_package), or target.make=tiny, not both"
            )
        return self


class DataSection(Section):
    """Where rows come from.

    Prompts are answered by the target itself; conversations and rows are taken as they are.
    """

    prompts: list[str] = Field(
        [], description="prompt files (JSONL), or the built-in sources stdlib and tiny"
    )
    conversations: list[str] = Field(
        [], description="conversation files; assistant turns are supervised"
    )
    rows: list[str] = Field([], description="files of token-id rows")
    heldout: list[str] = Field(
        [], description="prompt files for acceptance; empty: the built-in source's held-out part"
    )
    max_prompts: int | None = Field(None, gt=0, description="prompts to answer at most")
    max_new_tokens: int = Field(256, gt=0, description="longest answer")
    max_length: int = Field(
        4096, gt=1, description="longest row; longer prompts are dropped and counted"
    )
    batch_size: int = Field(64, gt=0, description="answers generated at once by one process")
    temperature: float = Field(0.0, ge=0.0, description="of the regenerated answers; 0 is greedy")
    minutes: float | None = Field(None, gt=0, description="stop answering prompts after this long")
    features: Literal["cache", "recompute"] = Field(
        "recompute", description="keep context features on disk, or recompute"
    )
    cache_dtype: Literal["bfloat16", "float8"] = Field(
        "bfloat16", description="float8: one scale a row of features"
    )

    @model_validator(mode="after")
    def _some_source(self) -> "DataSection":
        if not (self.prompts or self.conversations or self.rows):
            raise ValueError(
                "name at least one source of rows: data.prompts, data.conversations or data.rows"
            )
        return self


class DraftSection(Section):
    """The drafter's shape. What is left out follows the target."""

    algorithm: Algorithm = "dflash"
    num_layers: int = Field(5, gt=0)
    block_size: int = Field(16, ge=2, description="input positions of a block, anchor included")
    num_features: int = Field(
        5, gt=0, description="target layers read, spread evenly; target_layer_ids overrides"
    )
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = Field(
        None, ge=0, description="free row of the target's embedding; none: suggested"
    )
    is_causal: bool = False
    init: Literal["random", "target"] = Field(
        "random", description="target: copy the target's last layers that fit"
    )
    init_from: str | None = Field(
        None, description="warm start from this drafter directory; the shape is taken from it"
    )
    markov_rank: int | None = Field(
        None, ge=0, le=MAX_RANK, description="dspark: rank of the sequential head; 0: none"
    )
    markov_head_type: MarkovHeadType | None = Field(None, description="dspark")
    confidence_head: bool | None = Field(
        None, description="dspark: predict whether a drafted token survives"
    )
    confidence_head_with_markov: bool | None = Field(
        None, description="dspark: the confidence sees the token drafted before, too"
    )

    @model_validator(mode="after")
    def _shape_from_one_place(self) -> "DraftSection":
        shaped = [
            name
            for name, field in type(self).model_fields.items()
            if name not in ("algorithm", "init_from") and getattr(self, name) != field.default
        ]
        if self.init_from is not None and shaped:
            raise ValueError(
                f"draft.{shaped[0]} has no effect beside draft.init_from, whose drafter has its "
                "own shape; remove one of them"
            )
        return self


class LossSection(Section):
    weighting: Literal["decay", "dpace"] = "decay"
    gamma: float | None = Field(7.0, gt=0, description="decay of position weights; null: none")
    alpha: float = Field(0.5, ge=0, le=1, description="D-PACE's smoothing of the confidence")
    labels: Literal["hard", "soft"] = Field(
        "hard", description="soft: the target's distribution (KL), same cost"
    )
    sampled_rows: int | None = Field(
        None,
        ge=0,
        description="softmax over the data's own tokens and so many drawn others; none: all",
    )
    ce: float | None = Field(None, ge=0, description="dspark: weight of the cross-entropy")
    l1: float | None = Field(
        None, ge=0, description="dspark: weight of sum |p - q| against the target's distribution"
    )
    renyi: float | None = Field(
        None, ge=0, description="dspark: weight of the Renyi divergence of order 1/2"
    )
    confidence: float | None = Field(
        None, ge=0, description="dspark: weight of the confidence head's cross-entropy"
    )
    ce_until: float | None = Field(
        None,
        ge=0,
        le=1,
        description="dspark: up to this share of the run, the cross-entropy has l1's and renyi's "
        "weight as well",
    )


class TrainSection(Section):
    """The loop.

    Give `steps`, `epochs`, or `minutes` for a run bounded by time; the schedule's end is the last
    step of any.
    """

    steps: int | None = Field(None, gt=0)
    epochs: float | None = Field(None, gt=0, description="passes over the packed sequences")
    minutes: float | None = Field(None, gt=0)
    processes: int = Field(1, gt=0, description="started by spec itself unless a launcher did")
    seq_length: int = Field(4096, gt=1, description="tokens of a packed sequence")
    num_anchors: int = Field(512, gt=0, description="blocks a packed sequence")
    batch_size: int = Field(8, gt=0, description="packed sequences a step, over all processes")
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(6e-4, gt=0)
    muon_lr: float = Field(0.02, gt=0, description="learning rate of the matrices under muon")
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = Field(0.04, ge=0, lt=1, description="share of the run that warms up")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    dtype: Dtype = Field(
        "bfloat16", description="compute dtype of the drafter; masters are float32"
    )
    seed: int = 0
    log_every: int = Field(10, gt=0)
    eval_every: int = Field(
        500, gt=0, description="steps between held-out measurements (the best drafter is kept)"
    )
    save_every: int = Field(500, gt=0, description="steps between checkpoints")
    keep: int = Field(2, gt=0, description="checkpoints to keep")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")

    @model_validator(mode="after")
    def _one_bound(self) -> "TrainSection":
        if sum(getattr(self, name) is not None for name in BOUNDS) != 1:
            raise ValueError("give train.steps, train.epochs or train.minutes, exactly one")
        return self


class EvalSection(Section):
    """Held-out acceptance length: a few prompts during training, more at the end."""

    prompts: int = Field(
        16, gt=0, description="held-out prompts at each measurement during training"
    )
    final_prompts: int = Field(64, gt=0, description="held-out prompts of the closing report")
    max_new_tokens: int = Field(128, gt=0)
    batch_size: int = Field(16, gt=0)
    baselines: bool = Field(
        True, description="also measure an untrained drafter and n-gram lookup at the end"
    )


class WandbSection(Section):
    project: str
    mode: Literal["online", "offline"] = "online"
    name: str | None = None


class Recipe(Section):
    """A whole run; it writes only under `out`."""

    out: str
    unsupported: str | None = Field(
        None, description="why a shipped recipe cannot run yet; it is refused with this reason"
    )
    target: TargetSection
    data: DataSection
    draft: DraftSection = DraftSection()  # pyright: ignore[reportCallIssue]
    loss: LossSection = LossSection()  # pyright: ignore[reportCallIssue]
    train: TrainSection
    eval: EvalSection = EvalSection()  # pyright: ignore[reportCallIssue]
    wandb: WandbSection | None = None

    @model_validator(mode="after")
    def _heads_and_terms(self) -> "Recipe":
        """Refuse keys of another algorithm, and heads and terms that do not go together."""
        draft, loss = self.draft, self.loss
        if draft.algorithm != "dspark":
            for name, keys in DSPARK_DEFAULTS.items():
                for key in keys:
                    if getattr(getattr(self, name), key) is not None:
                        raise ValueError(
                            f"{name}.{key} is a key of dspark; set draft.algorithm=dspark"
                        )
            return self
        if draft.confidence_head_with_markov and not (draft.confidence_head and draft.markov_rank):
            raise ValueError(
                "draft.confidence_head_with_markov needs draft.confidence_head and a "
                "draft.markov_rank above 0"
            )
        if draft.markov_rank == 0 and draft.markov_head_type != "vanilla":
            raise ValueError(
                f"draft.markov_head_type={draft.markov_head_type} needs a draft.markov_rank above 0"
            )
        if draft.init_from is None and bool(draft.confidence_head) != bool(loss.confidence):
            raise ValueError(
                f"draft.confidence_head is {draft.confidence_head} and loss.confidence "
                f"{loss.confidence}: a head that is not trained, or a loss without a head"
            )
        if not (loss.ce or loss.l1 or loss.renyi):
            raise ValueError("loss.ce, loss.l1 and loss.renyi are all 0: nothing to learn")
        return self

    @property
    def teacher(self) -> Teacher | None:
        """What the loss needs of the target at each supervised position."""
        loss, soft = self.loss, self.loss.labels == "soft"
        if self.draft.algorithm == "dspark":
            return "last" if soft or loss.l1 or loss.renyi or loss.confidence else None
        return "expected" if soft else None

    def to_yaml(self) -> str:
        """The resolved recipe, every value written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
