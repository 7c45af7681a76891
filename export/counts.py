"""How the engines count a drafter's block (DESIGN section 4.10).

Here a round proposes `num_draft_tokens`. SGLang's command line counts the anchor too, vLLM's does
not.
"""

import json

SGLANG_ALGORITHM = {"dflash": "DFLASH", "dspark": "DSPARK"}


def sglang_options(algorithm: str, num_draft_tokens: int | None, *, quantized: bool) -> list[str]:
    """The words of SGLang's options for a drafter; its path is not among them.

    Without a count the engine reads the drafter's own. A drafter that is not quantized has to say
    so, or it takes over the target's quantization.
    """
    words = ["--speculative-algorithm", SGLANG_ALGORITHM[algorithm]]
    if num_draft_tokens is not None:
        words += ["--speculative-num-draft-tokens", str(num_draft_tokens + 1)]
    return words if quantized else [*words, "--speculative-draft-model-quantization", "unquant"]


def vllm_speculative_config(algorithm: str, num_draft_tokens: int, model: str) -> str:
    """The JSON of vLLM's `--speculative-config`."""
    return json.dumps(
        {"method": algorithm, "model": model, "num_speculative_tokens": num_draft_tokens}
    )
