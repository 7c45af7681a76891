"""Start one process a rank with torch's own launcher, and end them with us."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from ..recipes.schema import Recipe

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def launched() -> bool:
    """Whether a launcher (ours, torchrun, accelerate) started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def end_with_parent() -> None:
    """On Linux: get SIGTERM when the process that started this one is gone, even by kill -9."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launch(recipe: Recipe, recipe_file: Path, *, resume: bool, lock: int) -> None:
    """Run `recipe.train.processes` workers on this machine and wait; SIGTERM is passed on.

    `lock` is the descriptor that holds `out`; it is held until the workers have ended as well.

    Raises ValueError (the workers have said why) when one of them failed.
    """
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(recipe.train.processes),
        ),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "spec.train.worker", str(recipe_file), "--locked"),
        *([] if resume else ["--no-resume"]),
    ]
    # One thread a worker: two spinning pools on the same cores cost more than they bring.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TORCHELASTIC_ERROR_FILE": os.devnull}
    workers = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        preexec_fn=end_with_parent,
        pass_fds=(lock,),
    )

    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        workers.send_signal(signal.SIGTERM)  # Ctrl-C as well: the workers save and end

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = workers.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if workers.poll() is None:
            workers.kill()
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if code not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        raise ValueError(f"a training process failed (exit code {code}); its message is above")
