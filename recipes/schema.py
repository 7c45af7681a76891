"""The recipe: everything a run depends on, in one strict YAML file.

Each default is written here and nowhere else. An unknown key is an error that names the nearest
known one; `key=value` overrides use dotted keys. The resolved recipe is printed and saved beside
the run.
"""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..target.teacher import Teacher

SHIPPED = Path(__file__).parent
BOUNDS = {"train.steps": "minutes", "train.minutes": "steps"}
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
        None, ge=0, le=512, description="dspark: rank of the sequential head; 0: none"
    )
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = Field(None, description="dspark")
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

    Give `steps`, or `minutes` for a run bounded by time; the schedule's end is the last step of
    either.
    """

    steps: int | None = Field(None, gt=0)
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
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give train.steps or train.minutes, exactly one")
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
    target: TargetSection
    data: DataSection
    draft: DraftSection = DraftSection()  # pyright: ignore[reportCallIssue]
    loss: LossSection = LossSection()  # pyright: ignore[reportCallIssue]
    train: TrainSection
    eval: EvalSection = EvalSection()  # pyright: ignore[reportCallIssue]
    wandb: WandbSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_dspark(cls, data: Any) -> Any:
        """A DSpark recipe's own defaults; a drafter to start from keeps its heads."""
        draft = data.get("draft") if isinstance(data, dict) else None
        if not isinstance(draft, dict) or draft.get("algorithm") != "dspark":
            return data
        filled = dict(data)
        for name, defaults in DSPARK_DEFAULTS.items():
            section = filled.get(name) or {}
            if not isinstance(section, dict) or (name == "draft" and draft.get("init_from")):
                continue
            given = {key: value for key, value in section.items() if value is not None}
            if name == "draft" and given.get("markov_rank") == 0:
                defaults = {**defaults, "confidence_head_with_markov": False}
            if name == "draft" and given.get("confidence_head") is False:
                defaults = {**defaults, "confidence_head_with_markov": False}
            if name == "loss" and draft.get("confidence_head") is False:
                defaults = {**defaults, "confidence": 0.0}
            filled[name] = {**section, **defaults, **given}
        return filled

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


def load_recipe(name: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by path, or by the name of a shipped one, and apply `a.b=value` overrides.

    Raises ValueError in one line a mistake: unknown key (with the nearest), value out of range,
    missing key.
    """
    path = find_recipe(name)
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    for override in overrides or []:
        _apply(data, override)
    try:
        return Recipe.model_validate_json(_json(data))
    except ValidationError as error:
        raise ValueError(
            f"{path.name}: " + "; ".join(_explain(problem) for problem in error.errors())
        ) from None


def find_recipe(name: str | Path) -> Path:
    """A path as it is, or a shipped recipe by its name without `.yaml`."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{path.stem}.yaml"
    # A clone's documentation says recipes/tiny.yaml; from another folder that means the shipped one
    # as well.
    if (
        path.parent in (Path("."), Path("recipes"))
        and path.suffix in ("", ".yaml")
        and shipped.is_file()
    ):
        return shipped
    known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.yaml")))
    raise ValueError(f"no recipe {str(name)!r}: give the path of a YAML file or one of {known}")


def known_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """All dotted keys of the schema."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        keys.append(prefix + name)
        if section is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _apply(data: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise ValueError(f"override {override!r} is not key=value, for example train.steps=100")
    if key not in known_keys():
        raise ValueError(f"unknown key {key!r}{_nearest(key)}")
    root = data
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(data.get(parent), dict):
            data[parent] = {}
        data = data[parent]
    try:
        data[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"override {override!r}: {text!r} is not a YAML value") from None
    # A run has one bound: asking for minutes on a recipe that counts steps means minutes.
    if key in BOUNDS and data[last] is not None:
        root["train"].pop(BOUNDS[key], None)


def _as_number(text: str) -> str | float:
    """YAML takes 1e-4 for a string; a recipe means the number."""
    try:
        return (
            float(text)
            if any(c.isdigit() for c in text) and set(text) <= set("0123456789eE+-.")
            else text
        )
    except ValueError:
        return text


def _json(data: Any) -> str:
    def fix(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): fix(item) for key, item in value.items()}
        return _as_number(value) if isinstance(value, str) else value

    # YAML knows dates and sets; as text they meet the schema's own message.
    return json.dumps(fix(data), default=str)


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(key)}"
    if problem["type"] == "missing":
        return f"missing key {key!r}"
    message = problem["msg"].removeprefix("Value error, ")
    named = "." in message.split(" ")[0] or "name" in message  # the message says which key
    return message if not key or (named and not key.count(".")) else f"{key}: {message}"


def _nearest(key: str) -> str:
    """A hint at the closest key: same last part elsewhere, or the most alike spelling."""
    keys = known_keys()
    last = key.rsplit(".", 1)[-1]
    same = [other for other in keys if other.rsplit(".", 1)[-1] == last]
    close = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(
        last, [k.rsplit(".", 1)[-1] for k in keys], n=1, cutoff=0.5
    )
    return f"; nearest is {close[0]!r}" if close else ""
