"""The serving recipe: which target and drafter an engine serves, and how; strict like a run's.

Each default is written here and nowhere else. What an option of the engine is called is
command.py's business.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..recipes.load import SHIPPED, find_recipe, known_keys, read_mapping, set_key, validated
from ..recipes.schema import Algorithm, Dtype, Section

SHIPPED_SERVE = SHIPPED / "serve"
# What a drafter's file is, by the quant_method of its config.json.
DraftQuantization = Literal["none", "compressed-tensors", "fp8"]
DRAFT_QUANTIZATIONS: tuple[str, ...] = get_args(DraftQuantization)
Gpu = Literal["hopper", "blackwell"]
KvCacheDtype = Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


def _is_word(text: str) -> str:
    """On the engine's command line it stands behind an option."""
    if not text.strip() or text.startswith("-"):
        raise ValueError(f"found {text!r}; expected a name or path, and no dash before it")
    return text


def _is_host(text: str) -> str:
    if re.fullmatch(r"[\w.:%][\w.:%-]*", text) is None:
        raise ValueError(
            f"found {text!r}; expected a host's name or address: 127.0.0.1, 0.0.0.0 or ::1"
        )
    return text


def _with_text(environment: Any) -> Any:
    """Whole numbers as text, which variables are: {NAME: 1}."""
    if not isinstance(environment, dict):
        return environment
    return {key: str(n) if type(n) is int else n for key, n in environment.items()}


def _are_variables(environment: dict[str, str]) -> dict[str, str]:
    for name in environment:
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise ValueError(f"found {name!r}; expected names of letters, digits and _")
    return environment


Word = Annotated[str, AfterValidator(_is_word)]
Host = Annotated[str, AfterValidator(_is_host)]
Variables = Annotated[dict[str, str], BeforeValidator(_with_text), AfterValidator(_are_variables)]


class TargetSection(Section):
    """The frozen model."""

    path: Word = Field(description="directory or hub id")
    quantization: Word | None = Field(
        None, description="as the engine names it, modelopt_fp4 for NVFP4; none: by its config.json"
    )
    dtype: Dtype | None = Field(None, description="compute dtype; none: by its config.json")
    trust_remote_code: bool = False


class DraftSection(Section):
    """The drafter, in the layout that SGLang loads."""

    path: Word = Field(description="directory or hub id")
    algorithm: Algorithm = "dflash"
    num_draft_tokens: int | None = Field(
        None, gt=0, description="tokens a round proposes; none: as it was trained"
    )
    quantization: DraftQuantization | None = Field(
        None, description="null: by its config.json; none: bf16 (or another float type)"
    )
    attention_backend: Word | None = Field(None, description="none: the engine's choice")
    kv_cache_dtype: KvCacheDtype | None = Field(None, description="none: as the target's")
    window: int | None = Field(
        None, gt=0, description="dflash: latest context positions it attends to; none: all"
    )
    sts: Word | None = Field(None, description="dspark: sts.json for cap-accept and compact modes")
    sps: Word | None = Field(None, description="dspark: sps.json for cap-accept and compact modes")


class HiCacheSection(Section):
    """The key-value cache goes on in host memory."""

    ratio: float | None = Field(None, gt=0, description="host pool over device pool")
    gigabytes: int | None = Field(None, gt=0, description="size of the host pool")
    write_policy: Literal["write_back", "write_through", "write_through_selective"] = (
        "write_through"
    )
    storage: Word | None = Field(None, description="a third tier: file, mooncake, hf3fs, nixl, ...")

    @model_validator(mode="after")
    def _one_size(self) -> "HiCacheSection":
        if self.ratio is not None and self.gigabytes is not None:
            raise ValueError("engine.hicache has a ratio and gigabytes; keep one of them")
        return self


class EngineSection(Section):
    """The server: parallelism, memory, cache, what it tells."""

    device: Literal["cuda", "cpu"] = "cuda"
    gpu: Gpu | None = Field(
        None, description="what the engine's checks assume on a machine without a GPU"
    )
    host: Host = Field("127.0.0.1", description="0.0.0.0: reachable from other machines")
    port: int = Field(30000, gt=0, lt=65536)
    served_name: Word | None = Field(None, description="model name of the API; none: target.path")
    tensor_parallel: int = Field(1, gt=0)
    attention_data_parallel: int = Field(
        1,
        gt=0,
        description="groups of the tensor-parallel ranks with their own attention and cache",
    )
    pipeline_parallel: int = Field(1, gt=0, description="dflash needs 1")
    attention_backend: Word | None = Field(None, description="none: the engine's choice")
    kv_cache_dtype: KvCacheDtype = Field("auto", description="auto: as the target computes")
    memory_fraction: float | None = Field(
        None, gt=0, lt=1, description="of a GPU, for weights and cache; none: the engine's choice"
    )
    context_length: int | None = Field(None, gt=0, description="none: the target's")
    max_running_requests: int | None = Field(
        None, gt=0, description="none: the engine's choice, 48 with a drafter"
    )
    chunked_prefill_size: int | None = Field(None, gt=0, description="none: the engine's choice")
    hicache: HiCacheSection | None = Field(None, description="absent: no host cache")
    metrics: bool = Field(True, description="Prometheus metrics at /metrics")
    return_token_ids: bool = Field(True, description="token ids in chat answers, for logs")
    reasoning_parser: Word | None = None
    tool_call_parser: Word | None = None
    arguments: list[str] = Field([], description="more options of the engine, a word an entry")
    environment: Variables = Field({}, description="variables for the engine's process")
    start_timeout: float = Field(1800.0, gt=0, description="seconds until it has to be ready")


class SmokeSection(Section):
    """The check after the start: greedy answers whose acceptance length must reach the floor."""

    floor: float = Field(ge=1, description="least acceptance length, bonus token included")
    prompts: list[str] = Field(
        [
            "Write a Python function that merges two sorted lists.",
            "List the first ten prime numbers and explain the last one.",
            "Explain in three sentences what a hash table is.",
            "Write a SQL query that counts orders by customer.",
        ],
        min_length=1,
    )
    chat: bool = Field(True, description="prompts are user turns; false: plain text to continue")
    max_new_tokens: int = Field(128, gt=1, description="longest answer")
    timeout: float = Field(600.0, gt=0, description="seconds for one answer")


class ServeRecipe(Section):
    """All that a serving command depends on."""

    target: TargetSection
    draft: DraftSection
    engine: EngineSection = EngineSection()  # pyright: ignore[reportCallIssue]
    smoke: SmokeSection

    @model_validator(mode="after")
    def _keys_of_the_algorithm(self) -> "ServeRecipe":
        if self.draft.algorithm == "dspark" and self.draft.window is not None:
            raise ValueError("draft.window has no effect with dspark; remove it")
        for key in ("sts", "sps"):
            if self.draft.algorithm == "dflash" and getattr(self.draft, key) is not None:
                raise ValueError(f"draft.{key} is a key of dspark; set draft.algorithm=dspark")
        return self


def load_serve_recipe(name: str | Path, overrides: list[str] | None = None) -> ServeRecipe:
    """Read a recipe by path or by a shipped name, and apply `a.b=value` overrides.

    Raises ValueError in one line a mistake, as recipes/load.py does.
    """
    path = find_recipe(name, SHIPPED_SERVE)
    data = read_mapping(path)
    keys = known_keys(ServeRecipe)
    for override in overrides or []:
        set_key(data, override, keys)
    return validated(ServeRecipe, data, path.name)
