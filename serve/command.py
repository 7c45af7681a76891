"""From a serving recipe to SGLang's exact command line."""

from ..export.counts import sglang_options
from ..target.launch import Launch, cpu_launch
from .models import Models
from .recipe import EngineSection, HiCacheSection, ServeRecipe


def launch(recipe: ServeRecipe, models: Models, python: str) -> Launch:
    """How to start the server that the recipe describes."""
    engine = recipe.engine
    own = cpu_launch(engine.tensor_parallel)[1] if engine.device == "cpu" else {}
    return Launch(
        python,
        (*_target(recipe), *_engine(engine), *_draft(recipe, models), *engine.arguments),
        {**own, **engine.environment},
        host=engine.host,
        port=engine.port,
    )


def num_draft_tokens(recipe: ServeRecipe, models: Models) -> int | None:
    """Tokens a round proposes: the recipe's, else what the drafter was trained with."""
    if recipe.draft.num_draft_tokens is not None:
        return recipe.draft.num_draft_tokens
    return None if models.draft is None else models.draft.facts["num_draft_tokens"]


def draft_quantization(recipe: ServeRecipe, models: Models) -> str | None:
    """What the drafter's weights are: the recipe's word, else its config.json's."""
    return recipe.draft.quantization or models.draft_quantization


def _target(recipe: ServeRecipe) -> list[str]:
    target = recipe.target
    return [
        *("--model-path", target.path),
        *_option("--served-model-name", recipe.engine.served_name),
        *_flag("--trust-remote-code", target.trust_remote_code),
        *_option("--quantization", target.quantization),
        *_option("--dtype", target.dtype),
    ]


def _engine(engine: EngineSection) -> list[str]:
    data_parallel = engine.attention_data_parallel
    device = ("--device", "cuda", *_option("--attention-backend", engine.attention_backend))
    without_gpu = cpu_launch(engine.tensor_parallel)[0]
    return [
        *(without_gpu if engine.device == "cpu" else device),
        *("--tp-size", str(engine.tensor_parallel)),
        *(("--pp-size", str(engine.pipeline_parallel)) if engine.pipeline_parallel > 1 else ()),
        # Drafters borrow the target's head, which has to be whole in each group.
        *(
            ("--attn-dp-size", str(data_parallel), "--enable-dp-lm-head")
            if data_parallel > 1
            else ()
        ),
        *_option("--kv-cache-dtype", _unless_auto(engine.kv_cache_dtype)),
        *_option("--mem-fraction-static", engine.memory_fraction),
        *_option("--context-length", engine.context_length),
        *_option("--max-running-requests", engine.max_running_requests),
        *_option("--chunked-prefill-size", engine.chunked_prefill_size),
        *(_hicache(engine.hicache) if engine.hicache is not None else ()),
        *_flag("--enable-metrics", engine.metrics),
        *_flag("--return-input-ids", engine.return_token_ids),
        *_flag("--return-output-ids", engine.return_token_ids),
        *_option("--reasoning-parser", engine.reasoning_parser),
        *_option("--tool-call-parser", engine.tool_call_parser),
    ]


def _hicache(hicache: HiCacheSection) -> list[str]:
    return [
        "--enable-hierarchical-cache",
        *_option("--hicache-ratio", hicache.ratio),
        *_option("--hicache-size", hicache.gigabytes),
        *("--hicache-write-policy", hicache.write_policy),
        *_option("--hicache-storage-backend", hicache.storage),
    ]


def _draft(recipe: ServeRecipe, models: Models) -> list[str]:
    draft, count = recipe.draft, num_draft_tokens(recipe, models)
    kind = draft_quantization(recipe, models)  # None: what is shown leaves it to the engine
    return [
        *sglang_options(draft.algorithm, count, quantized=kind != "none"),
        *("--speculative-draft-model-path", draft.path),
        # Beside an NVFP4 target the engine would read this drafter's 128 x 128 blocks as NVFP4:
        # it counts fp8 checkpoints among those that modelopt_fp4 requantizes.
        *(("--speculative-draft-model-quantization", "fp8") if kind == "fp8" else ()),
        *_option("--speculative-draft-attention-backend", draft.attention_backend),
        *_option("--speculative-draft-kv-cache-dtype", draft.kv_cache_dtype),
        *_option("--speculative-draft-window-size", draft.window),
        *_option("--speculative-dspark-confidence-sts-path", draft.sts),
        *_option("--speculative-dspark-sps-table-path", draft.sps),
    ]


def _unless_auto(dtype: str) -> str | None:
    return None if dtype == "auto" else dtype


def _option(name: str, value: object) -> tuple[str, ...]:
    return () if value is None else (name, str(value))


def _flag(name: str, wanted: bool) -> tuple[str, ...]:
    return (name,) if wanted else ()
