"""Run by the engine's interpreter, never imported: would SGLang's ServerArgs accept a command line?

Reads {"arguments": [...], "gpu": "blackwell"} from stdin and prints one JSON line after whatever
the engine prints: its version, the words of its refusal (null where it accepts), what it made of
the drafter, and the GPU that was assumed (null where there is one, or none was named).
"""

import contextlib
import importlib.metadata
import io
import json
import sys
from typing import Any

# What the engine asks of a GPU when it checks arguments.
FACTS = {
    "hopper": {"is_sm90": True, "device_sm": 90, "device_capability": (9, 0)},
    "blackwell": {
        "is_sm100": True,
        "is_sm100_or_sm110": True,
        "is_blackwell": True,
        "device_sm": 100,
        "device_capability": (10, 0),
    },
}


def assume(gpu: str | None) -> str | None:
    """Let the engine's checks see this GPU where the machine has none; the one assumed."""
    import torch
    from sglang.srt.runtime_context import (  # pyright: ignore[reportMissingImports]
        override_platform,
    )

    if gpu is None or torch.cuda.is_available():
        return None
    override_platform(**FACTS[gpu]).install()
    torch.cuda.get_device_capability = lambda *_: FACTS[gpu]["device_capability"]
    return gpu


def resolve(arguments: list[str]) -> dict[str, Any]:
    """What the engine makes of the arguments. Raises whatever it raises."""
    from sglang.srt.arg_groups.overrides import (  # pyright: ignore[reportMissingImports]
        resolved_view,
    )
    from sglang.srt.configs.model_config import (  # pyright: ignore[reportMissingImports]
        ModelConfig,
    )
    from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import (  # pyright: ignore[reportMissingImports]
        prepare_server_args,
    )

    load_plugins()
    server = prepare_server_args(arguments)
    asked = {  # before the engine resolves a hub id
        "model_path": server.model_path,
        "draft_model_path": server.speculative_draft_model_path,
    }
    server.resolve_once()
    view = resolved_view(server)
    target = ModelConfig.from_server_args(server)
    draft = ModelConfig.from_server_args(
        server,
        model_path=view.speculative_draft_model_path,
        is_draft_model=True,
        context_length=target.context_len,  # as its worker does
    )
    return {
        **asked,
        "algorithm": view.speculative_algorithm,
        "accept_threshold_single": view.speculative_accept_threshold_single,
        "accept_threshold_acc": view.speculative_accept_threshold_acc,
        "draft_quantization": draft.quantization,
        "quantization": target.quantization,
        "num_draft_tokens": view.speculative_num_draft_tokens,
        "draft_attention_backend": view.speculative_draft_attention_backend,
        "attention_backend": view.attention_backend,
        "max_running_requests": view.max_running_requests,
    }


def main() -> None:
    sys.path.pop(0)  # this folder, whose files are no packages of the engine's
    asked = json.load(sys.stdin)
    words, resolved, gpu, said = None, {}, None, io.StringIO()
    with contextlib.redirect_stderr(said):  # argparse says there why it leaves
        try:
            gpu = assume(asked["gpu"])
            resolved = resolve(asked["arguments"])
        except SystemExit:
            lines = [line for line in said.getvalue().splitlines() if line.strip()]
            words = lines[-1] if lines else "it left without a word"
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    version = importlib.metadata.version("sglang")
    print(json.dumps({"version": version, "words": words, "resolved": resolved, "gpu": gpu}))


if __name__ == "__main__":
    main()
