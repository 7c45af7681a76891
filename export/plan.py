"""What the parity gate is asked to do. Light to import: its defaults are those of `spec verify`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Plan:
    """What to verify, and how the engine is started."""

    directory: Path
    name: str  # what the report calls it
    target: str
    python: str
    logs: Path  # directory of the engine's logs
    dtype: Dtype = "float32"
    device: Device = "cpu"
    tensor_parallel: int = 1
    max_new_tokens: int = 64
    tolerance: float = 0.01  # of the acceptance length, in bfloat16 or of an FP8 drafter
    timeout: float = 600.0  # seconds for the engine to start, and for each request
    engine_arguments: tuple[str, ...] = ()
    check_first: bool = True
    probe: bool = True
