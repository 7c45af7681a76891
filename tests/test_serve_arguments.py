"""Options of the engine by name: what spec verify refuses behind its `--`, and short spellings."""

import pytest
from typer.testing import CliRunner

from spec.cli.main import app
from spec.serve.arguments import check_arguments, full_name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speculative-draft-model-path", "d"], "from the drafter's DIRECTORY"),
        (["--speculative-draft-model=d"], "from the drafter's DIRECTORY"),
        (["--speculative-algo", "NGRAM"], r"\(that is --speculative-algorithm\).*config.json"),
        (["--page-size", "1", "--model", "m"], "from --target"),
        (["--port", "1"], "it takes a free one"),
        (["--host", "h"], "it serves itself alone"),
        (["--tensor_parallel_size", "2"], r"\(that is --tensor-parallel-size\).*from --tp"),
        (["--speculative-accept-threshold-acc", "0.5"], "no longer the target's"),
        (["--speculative-accept-threshold-si=0.1"], "no longer the target's"),
        (["--ssl-certfile", "c.pem"], "put TLS in front of it"),
        (["--ssl-keyf=k.pem"], r"\(that is --ssl-keyfile\).*put TLS in front of it"),
        (["--config", "c.yaml"], "seen by none of our checks"),
    ],
)
def test_what_verify_writes_itself_or_must_not_be(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_arguments(words)


def test_what_verify_passes_on() -> None:
    check_arguments(["--mem-fraction-static", "0.6", "--attention-backend", "fa4", "--page-size=1"])
    check_arguments(["--api-key", "k", "--admin-api-key=k"])
    check_arguments(["--quantization", "modelopt_fp4", "--speculative-draft-window-size", "64"])
    check_arguments(["--disaggregation-decode-enable-radix-cache", "--speculative-adaptive"])


def test_the_verb_refuses_before_any_work() -> None:
    words = ["verify", "d", "-t", "t", "-p", "p", "--python", "x", "--", "--port", "30000"]
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, ValueError) and str(refused).startswith("--port after --: ")


def test_names_in_full() -> None:
    known = {"--tp", "--tp-size", "--port"}
    assert full_name("--tp", known) == "--tp"
    assert full_name("--tp_s=2", known) == "--tp-size"
    assert full_name("--po", known) == "--port"
    for free in ("--ports", "--x", "--", "-p", "po", ""):
        assert full_name(free, known) is None, free
