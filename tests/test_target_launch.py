"""What an engine is started with: its words, its variables, and what is shown of them."""

import pytest

from spec.target.launch import Launch, environment, value_of, without_secrets


def test_the_command_can_be_pasted() -> None:
    launch = Launch("py", ("--model-path", "a b", "--tp-size", "2"), {"B": "0|1"}, port=7)
    assert launch.shell() == (
        "B='0|1' py -m sglang.launch_server \\\n  --model-path 'a b' \\\n  --tp-size 2 \\\n"
        "  --host 127.0.0.1 \\\n  --port 7"
    )


def test_secrets_are_not_shown() -> None:
    words = ("--api-key", "abc", "--tp-size", "2", "--admin-api-key=abc", "--ap", "abc")
    shown = Launch("py", words, {"HF_TOKEN": "abc", "A": "1"}).shell()
    assert "abc" not in shown
    assert shown.startswith("A=1 HF_TOKEN='***' py ") and "--api-key '***'" in shown
    assert "--tp-size 2" in shown and "'--admin-api-key=***'" in shown


def test_only_secrets_are_masked() -> None:
    words = ["--api-key", "abc", "--tp-size", "2", "--admin-api-key=abc", "--dtype", "half"]
    shown = ["--api-key", "***", "--tp-size", "2", "--admin-api-key=***", "--dtype", "half"]
    assert without_secrets(words) == shown
    harmless = ["--max-total-tokens", "8", "--tokenizer-path", "t", "--attention-backend", "fa4"]
    assert without_secrets(harmless) == harmless


def test_values_as_the_engine_reads_them() -> None:
    words = ["--api-key", "a", "--page-size", "1", "--api=b", "--admin-api-key", "c"]
    assert value_of("--api-key", words) == "b"
    assert value_of("--admin-api-key", words) == "c"
    assert value_of("--api-key", ["--api-key"]) == ""
    assert value_of("--api-key", ["--a", "b", "--api-keys", "c", "api-key"]) is None


def test_our_packages_do_not_leak_into_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert environment({"A": "1"}).items() >= {("A", "1")}
    assert "PYTHONPATH" not in environment({}) and "PATH" in environment({})


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_SIMULATE_ACC_LEN",
        "SGLANG_USE_CPU_ENGINE",
        "SGLANG_RAGGED_VERIFY_MODE",
        "SGLANG_DSPARK_STS_COLLECT_PATH",
    ],
)
def test_what_changes_a_round_comes_from_the_launch_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    assert name not in environment({}) and environment({})["SGLANG_LOG_MS"] == "1"
    assert environment({name: "2"})[name] == "2"
