"""Run by the engine's interpreter, never imported: would SGLang's ServerArgs accept a command line?

Reads {"arguments": [...]} from stdin and prints one JSON line after whatever the engine prints:
its version, the words of its refusal (null where it accepts), and what it made of the drafter.
"""

import contextlib
import importlib.metadata
import io
import json
import sys
from typing import Any


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
    server.resolve_once()
    view = resolved_view(server)
    draft = ModelConfig.from_server_args(
        server, model_path=view.speculative_draft_model_path, is_draft_model=True
    )
    return {
        "draft_quantization": draft.quantization,
        "quantization": ModelConfig.from_server_args(server).quantization,
        "num_draft_tokens": view.speculative_num_draft_tokens,
        "draft_attention_backend": view.speculative_draft_attention_backend,
        "attention_backend": view.attention_backend,
        "max_running_requests": view.max_running_requests,
    }


def main() -> None:
    sys.path.pop(0)  # this folder, whose files are no packages of the engine's
    arguments = json.load(sys.stdin)["arguments"]
    words, resolved, said = None, {}, io.StringIO()
    with contextlib.redirect_stderr(said):  # argparse says there why it leaves
        try:
            resolved = resolve(arguments)
        except SystemExit:
            lines = [line for line in said.getvalue().splitlines() if line.strip()]
            words = lines[-1] if lines else "it left without a word"
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    version = importlib.metadata.version("sglang")
    print(json.dumps({"version": version, "words": words, "resolved": resolved}))


if __name__ == "__main__":
    main()
