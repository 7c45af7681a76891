"""`engine.arguments`: options the recipe passes on, without those it has keys for, or must not."""

from collections.abc import Iterator

from ..export.findings import Finding
from ..recipes.schema import Algorithm
from .findings import defect, warning
from .recipe import ServeRecipe

# Options that a key of the recipe writes, under each of the engine's spellings.
KEYS = {
    "--model-path": "target.path",
    "--model": "target.path",
    "--quantization": "target.quantization",
    "--dtype": "target.dtype",
    "--trust-remote-code": "target.trust_remote_code",
    "--served-model-name": "engine.served_name",
    "--device": "engine.device",
    "--host": "engine.host",
    "--port": "engine.port",
    "--tp": "engine.tensor_parallel",
    "--tp-size": "engine.tensor_parallel",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--pp": "engine.pipeline_parallel",
    "--pp-size": "engine.pipeline_parallel",
    "--pipeline-parallel-size": "engine.pipeline_parallel",
    "--attn-dp-size": "engine.attention_data_parallel",
    "--attention-data-parallel-size": "engine.attention_data_parallel",
    "--enable-dp-attention": "engine.attention_data_parallel",
    "--enable-dp-lm-head": "engine.attention_data_parallel",
    "--attention-backend": "engine.attention_backend",
    "--kv-cache-dtype": "engine.kv_cache_dtype",
    "--mem-fraction-static": "engine.memory_fraction",
    "--context-length": "engine.context_length",
    "--max-running-requests": "engine.max_running_requests",
    "--chunked-prefill-size": "engine.chunked_prefill_size",
    "--enable-hierarchical-cache": "engine.hicache",
    "--enable-hicache": "engine.hicache",
    "--hicache-ratio": "engine.hicache.ratio",
    "--hicache-size": "engine.hicache.gigabytes",
    "--hicache-write-policy": "engine.hicache.write_policy",
    "--hicache-storage-backend": "engine.hicache.storage",
    "--enable-metrics": "engine.metrics",
    "--return-input-ids": "engine.return_token_ids",
    "--return-output-ids": "engine.return_token_ids",
    "--reasoning-parser": "engine.reasoning_parser",
    "--tool-call-parser": "engine.tool_call_parser",
    "--speculative-algorithm": "draft.algorithm",
    "--speculative-draft-model-path": "draft.path",
    "--speculative-draft-model": "draft.path",
    "--speculative-num-draft-tokens": "draft.num_draft_tokens",
    "--speculative-dflash-block-size": "draft.num_draft_tokens",
    "--speculative-dspark-block-size": "draft.num_draft_tokens",
    "--speculative-draft-model-quantization": "draft.quantization",
    "--speculative-draft-attention-backend": "draft.attention_backend",
    "--speculative-draft-kv-cache-dtype": "draft.kv_cache_dtype",
    "--speculative-draft-window-size": "draft.window",
    "--speculative-dspark-confidence-sts-path": "draft.sts",
    "--speculative-dspark-sps-table-path": "draft.sps",
}
# Refused by the engine, or worse: (why, for which algorithms).
BOTH: tuple[Algorithm, ...] = ("dflash", "dspark")
REFUSED: dict[str, tuple[str, tuple[Algorithm, ...]]] = {
    "--disaggregation-decode-enable-radix-cache": (
        "the engine refuses a decode server with a radix cache beside DFLASH",
        ("dflash",),
    ),
    "--enable-return-hidden-states": (
        "a speculative server refuses requests for hidden states; capture from a server without a "
        "drafter",
        BOTH,
    ),
    "--enable-return-aux-hidden-states": (
        "a speculative server refuses requests for hidden states; capture from a server without a "
        "drafter",
        BOTH,
    ),
    "--speculative-accept-threshold-single": (
        "it accepts tokens that the target would not have chosen: the output is no longer the "
        "target's",
        BOTH,
    ),
    "--speculative-accept-threshold-acc": (
        "it accepts tokens that the target would not have chosen: the output is no longer the "
        "target's",
        BOTH,
    ),
    "--enable-watermark": ("the engine refuses watermarks beside these drafters", BOTH),
}
# Taken without an error and then not used.
IGNORED: dict[str, str] = {
    "--speculative-adaptive": "for EAGLE only; DSpark adapts by its confidence and draft.sps",
    "--speculative-adaptive-config": "for EAGLE only; DSpark adapts by its confidence",
    "--speculative-num-steps": "the engine sets it to 1; draft.num_draft_tokens is the length",
    "--speculative-eagle-topk": "the engine sets it to 1: a block is one chain",
    "--speculative-use-rejection-sampling": "for EAGLE only",
    "--speculative-token-map": "for EAGLE only: these drafters use the target's whole head",
    "--speculative-draft-sink-size": "the window of a DFlash drafter has no sink",
}


def check_arguments(recipe: ServeRecipe) -> Iterator[Finding]:
    """What in `engine.arguments` has a key, is refused, or does nothing."""
    algorithm = recipe.draft.algorithm
    words = recipe.engine.arguments
    if words and not words[0].startswith("-"):
        yield defect(
            f"engine.arguments starts with {words[0]!r}; expected an option",
            "write each word as an entry: [--page-size, '64']",
        )
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            continue
        if " " in name:
            yield defect(
                f"engine.arguments has {word!r} as one word",
                "write each word as an entry: [--page-size, '64']",
            )
        elif name in KEYS:
            yield defect(
                f"{name} in engine.arguments: the key {KEYS[name]} writes it",
                f"set {KEYS[name]} and remove it there",
            )
        elif name in REFUSED and algorithm in REFUSED[name][1]:
            yield defect(f"{name} in engine.arguments: {REFUSED[name][0]}", "remove it")
        elif name in IGNORED:
            yield warning(f"{name} in engine.arguments has no effect: {IGNORED[name]}", "remove it")
