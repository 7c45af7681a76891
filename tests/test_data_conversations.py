"""Conversations to ids and loss mask, on templates that behave as the published ones do."""

import json
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec.data.conversations import (
    TOO_LONG,
    Conversation,
    Encoded,
    encode,
    prepare,
    read_conversations,
)
from spec.data.jsonl import Rejected
from spec.data.manifest import Manifest
from spec.data.messages import ROLES, parse_messages, parse_tools
from spec.data.rows import Row, read_rows

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' and default_system is defined %}"
    "<|im_start|>system\n{{ default_system }}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% set default_system = 'Be kind.' %}" + CHATML
# Reasoning stays only after the last question; the last answer always has a block, if empty.
REASONING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last"
    " and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_TOOLS = TOOLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
THREE_TURNS = [
    message
    for n in range(3)
    for message in (
        {"role": "user", "content": f"question {n}"},
        {"role": "assistant", "content": f"answer {n}"},
    )
]


def make_tokenizer(template: str, *, eos: str = "<|im_end|>", **options: Any) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ", "er"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("e", "r")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>"])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **options)
    tokenizer.chat_template = template
    return tokenizer


def run(
    messages: list[dict[str, Any]],
    template: str | Any,
    *,
    tools: Any = None,
    max_length: int = 4096,
    **options: Any,
) -> Encoded:
    entry = {"messages": messages, "tools": tools}
    conversation = Conversation("c1", parse_messages(entry), parse_tools(entry), ("chat",))
    tokenizer = make_tokenizer(template) if isinstance(template, str) else template
    return encode(conversation, tokenizer, max_length, **options)


def spans(row: Row, tokenizer: Any = None) -> list[str]:
    """The texts of the supervised runs; nothing of a row is lost in them."""
    tokenizer = tokenizer or make_tokenizer(CHATML)
    pairs = zip(row.input_ids, row.loss_mask, strict=True)
    groups = [(key, [i for i, _ in group]) for key, group in groupby(pairs, key=lambda p: p[1])]
    return [tokenizer.decode(ids) for supervised, ids in groups if supervised]


def template_ids(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
def test_every_answer_and_its_end_token_is_supervised_and_nothing_else(template: str) -> None:
    (row,) = run(THREE_TURNS, template).rows
    assert spans(row) == [f"answer {n}<|im_end|>" for n in range(3)]
    assert row.input_ids == template_ids(make_tokenizer(template), THREE_TURNS)
    assert row.tags == ("chat",)


def test_a_system_message_comes_only_from_the_template_or_the_row() -> None:
    tokenizer = make_tokenizer(CHATML)
    (row,) = run([USER, ANSWER], tokenizer).rows
    assert tokenizer.decode(row.input_ids).startswith("<|im_start|>user\nHi")
    (row,) = run([USER, ANSWER], DEFAULT_SYSTEM).rows
    assert tokenizer.decode(row.input_ids).startswith("<|im_start|>system\nBe kind.")
    (row,) = run([{"role": "system", "content": "Mine"}, USER, ANSWER], DEFAULT_SYSTEM).rows
    assert "Be kind." not in tokenizer.decode(row.input_ids)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>assistant\n",
        "say <|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\nplease",
        "<think></think>",
    ],
)
@pytest.mark.parametrize("role", ["user", "system"])
def test_a_literal_header_in_other_text_opens_no_span(text: str, role: str) -> None:
    (row,) = run([{"role": role, "content": text}, USER, ANSWER], CHATML).rows
    assert spans(row) == ["Hello<|im_end|>"]


def test_an_answer_ends_at_its_first_stop_token() -> None:
    content = "one<|im_end|>\n<|im_start|>user\ntwo"
    (row,) = run([USER, {"role": "assistant", "content": content}], CHATML).rows
    assert spans(row) == ["one<|im_end|>"]


def test_a_special_token_closes_the_turn_where_eos_is_another() -> None:
    tokenizer = make_tokenizer(CHATML, eos="<|endoftext|>")
    (row,) = run(THREE_TURNS, tokenizer).rows
    assert spans(row) == [f"answer {n}<|im_end|>" for n in range(3)]


def test_the_next_header_closes_a_turn_where_it_is_the_stop_token() -> None:
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|im_start|>' }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = make_tokenizer(template, eos="<|endoftext|>")
    stop = tokenizer.convert_tokens_to_ids("<|user|>")
    (row,) = run([USER, ANSWER, USER, ANSWER], tokenizer, stop_token_ids=[stop]).rows
    assert spans(row) == ["Hello<|user|>", "Hello"]
    assert row.input_ids == template_ids(tokenizer, [USER, ANSWER, USER, ANSWER])


# No end token: the next header is what the target stopped at. Reasoning stays after the last
# question only; earlier turns show an empty block.
HEADER_ENDS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|im_start|>\n{{ m.content }}"
    "{% else %}<|assistant|>\n<think>"
    "{% if loop.index0 > ns.last and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
    "</think>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_the_next_header_closes_a_turn_whose_reasoning_is_stripped_later() -> None:
    tokenizer = make_tokenizer(HEADER_ENDS, eos="<|endoftext|>")
    stop = tokenizer.convert_tokens_to_ids(["<|user|>", "<|im_start|>"])
    messages = [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "reasoning_content": "look", "tool_calls": [CALL_2]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Go out.", "reasoning_content": "nice"},
        USER,
        {**ANSWER, "reasoning_content": "polite"},
    ]
    rows = run(messages, tokenizer, stop_token_ids=stop).rows
    assert [spans(row, tokenizer) for row in rows] == [
        ["<think>look</think><tool_call>g{}</tool_call><|im_start|>"],
        ["<think>nice</think>Go out.<|user|>"],
        ["<think>polite</think>Hello"],
    ]
    for row, place, extra in zip(rows, (1, 3, 5), ([stop[1]], [stop[0]], []), strict=True):
        seen = template_ids(tokenizer, parse_messages({"messages": messages})[: place + 1])
        assert row.input_ids == seen + extra


def test_a_header_that_is_no_stop_token_closes_nothing() -> None:
    tokenizer = make_tokenizer(HEADER_ENDS, eos="<|endoftext|>")
    talk = [USER, {**ANSWER, "reasoning_content": "hm"}, USER, ANSWER]
    rows = run(talk, tokenizer).rows
    assert [spans(row, tokenizer) for row in rows] == [["<think>hm</think>Hello"], ["Hello"]]


def test_a_turn_closed_by_its_own_token_does_not_take_the_next_header() -> None:
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|im_start|>' }}"
        "{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = make_tokenizer(template, eos="<|endoftext|>")
    stop = tokenizer.convert_tokens_to_ids("<|user|>")
    (row,) = run([USER, ANSWER, USER, ANSWER], tokenizer, stop_token_ids=[stop]).rows
    assert spans(row) == ["Hello<|im_end|>"] * 2


def test_a_template_without_special_tokens_supervises_the_text_alone() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (row,) = run([USER, ANSWER, USER, ANSWER], template).rows
    assert spans(row) == ["Hello", "Hello"]


def test_a_header_is_not_supervised_where_the_template_has_no_generation_prompt() -> None:
    template = CHATML.split("{% if add_generation_prompt")[0]
    (row,) = run(THREE_TURNS, template).rows
    assert spans(row) == [f"answer {n}<|im_end|>" for n in range(3)]


def test_pad_equal_to_eos_keeps_the_end_token() -> None:
    tokenizer = make_tokenizer(CHATML, pad_token="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    (row,) = run([USER, ANSWER], tokenizer).rows
    assert spans(row) == ["Hello<|im_end|>"]


def test_stripped_reasoning_gives_one_row_a_turn_as_the_target_saw_it() -> None:
    tokenizer = make_tokenizer(REASONING)
    messages = [
        {**message, "reasoning_content": f"hmm {n}"} if message["role"] == "assistant" else message
        for n, message in enumerate(THREE_TURNS)
    ]
    rows = run(messages, tokenizer).rows
    assert [row.id for row in rows] == ["c1#1", "c1#2", "c1#3"]
    for n, row in enumerate(rows):
        thought = f"<think>\nhmm {2 * n + 1}\n</think>\n\n"
        assert spans(row) == [f"{thought}answer {n}<|im_end|>"]
        assert row.input_ids == template_ids(tokenizer, messages[: 2 * n + 2])
        assert tokenizer.decode(row.input_ids).count("<think>") == 1


def test_an_empty_think_block_belongs_to_the_prompt() -> None:
    tokenizer = make_tokenizer(REASONING)
    rows = run(THREE_TURNS, tokenizer).rows
    assert [spans(row) for row in rows] == [[f"answer {n}<|im_end|>"] for n in range(3)]
    (row,) = run([USER, ANSWER], tokenizer).rows
    assert row.input_ids == template_ids(tokenizer, [USER, ANSWER])
    assert row.id == "c1"
    # Also where the template has no switch for it, and where the prompt itself opens the block.
    bare = REASONING.replace("enable_thinking is defined and not enable_thinking", "false")
    opened = bare.replace(
        "<|im_start|>assistant\n{% if false", "<|im_start|>assistant\n<think>\n{% if false"
    )
    assert opened != bare != REASONING
    for template in (bare, opened):
        assert spans(run([USER, ANSWER], template).rows[0]) == ["Hello<|im_end|>"]


def test_a_block_with_reasoning_is_supervised_from_where_the_prompt_ends() -> None:
    answer = {**ANSWER, "reasoning_content": "hm"}
    (row,) = run([USER, answer], REASONING).rows
    assert spans(row) == ["<think>\nhm\n</think>\n\nHello<|im_end|>"]


def test_a_turn_that_does_not_begin_with_its_prompt_rejects_the_conversation() -> None:
    template = CHATML.replace(
        "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
    )
    (bad,) = run([USER, ANSWER], template).rejected
    assert bad.id == "c1" and bad.reason == "a turn does not begin with its prompt"
    assert "message 1" in bad.detail


CALL_1 = {"type": "function", "id": "a", "function": {"name": "f", "arguments": {"x": "é", "n": 1}}}
CALL_2 = {"type": "function", "id": "b", "function": {"name": "g", "arguments": {}}}
TOOL_TALK = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL_1, CALL_2]},
    {"role": "tool", "content": "sunny", "tool_call_id": "a"},
    {"role": "tool", "content": "late", "tool_call_id": "b"},
    {"role": "assistant", "content": "Go out."},
]
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"x": "é", "n": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>'
)


def test_parallel_tool_calls_and_their_two_outputs() -> None:
    tokenizer = make_tokenizer(JSON_TOOLS)
    (row,) = run(TOOL_TALK, tokenizer).rows
    assert spans(row) == [CALLS, "Go out.<|im_end|>"]
    assert row.input_ids == template_ids(tokenizer, parse_messages({"messages": TOOL_TALK}))
    assert "None" not in tokenizer.decode(row.input_ids)


def variants() -> list[list[dict[str, Any]]]:
    """The tool talk written in the ways found in data sets."""
    call, rest = TOOL_TALK[1], TOOL_TALK[2:]
    as_text = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
        for c in (CALL_1, CALL_2)
    ]
    calls = [
        [CALL_1, CALL_2],
        as_text,
        json.dumps([CALL_1, CALL_2]),
        json.dumps(as_text),
        [CALL_1["function"], CALL_2["function"]],
        [CALL_1, {**CALL_2, "function": {"name": "g", "arguments": ""}}],
        [CALL_1, {**CALL_2, "function": {"name": "g", "arguments": None}}],
        [CALL_1, {**CALL_2, "function": {"name": "g"}}],
    ]
    found = [[USER, {**call, "tool_calls": value}, *rest] for value in calls]
    absent = {key: value for key, value in call.items() if key != "content"}
    for message in (absent, {**call, "content": ""}, {**call, "content": []}):
        found.append([USER, message, *rest])
    found.append([USER, {**call, "reasoning_content": None, "function_call": None}, *rest])
    found.append([USER, call, {**rest[0], "tool_calls": None}, *rest[1:]])
    return found


@pytest.mark.parametrize("messages", variants())
@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments }}",  # Python's notation, unless it gets text
        "{{ '' + c.function.arguments }}",  # fails, unless it gets text
        "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
    ],
)
def test_the_same_calls_written_differently_give_the_same_row(
    messages: list[dict[str, Any]], arguments: str
) -> None:
    (row,) = run(messages, TOOLS.replace("ARGUMENTS", arguments)).rows
    (reference,) = run(TOOL_TALK, JSON_TOOLS).rows
    assert (row.input_ids, row.loss_mask) == (reference.input_ids, reference.loss_mask)


def test_calls_that_show_only_where_content_is_absent_are_found() -> None:
    calls = "m.tool_calls or []"
    template = JSON_TOOLS.replace(calls, f"({calls} if 'content' not in m)")
    assert template != JSON_TOOLS
    (row,) = run(TOOL_TALK, template).rows
    assert row == run(TOOL_TALK, JSON_TOOLS).rows[0]


def test_a_template_without_tool_calls_rejects_them() -> None:
    (bad,) = run(TOOL_TALK, CHATML).rejected
    assert (bad.id, bad.reason) == ("c1", "the chat template leaves out tool calls")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "tool_calls": "[{"}, "malformed JSON in a message"),
        ({"role": "assistant", "tool_calls": 3}, "tool_calls is not a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool call without a function name"),
        ({"role": "assistant", "tool_calls": [7]}, "tool call without a function name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{'a': 1}"}]},
            "malformed JSON in a message",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "tool call arguments are not an object",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL_1]},
            "tool_calls outside an assistant message",
        ),
        ({"role": "assistant", "content": None}, "message without content"),
        ({"role": "user"}, "message without content"),
        ({"role": "user", "content": {"a": 1}}, "content is not text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content part is not text"),
        (
            {"role": "assistant", "content": "x", "reasoning_content": 1},
            "reasoning_content is not text",
        ),
        ({"role": "critic", "content": "x"}, "unknown role"),
        ({"role": None, "content": "x"}, "unknown role"),
        ({"content": "x"}, "unknown role"),
        ("text", "message is not an object"),
    ],
)
def test_a_bad_message_rejects_its_row_alone(tmp_path: Path, message: Any, reason: str) -> None:
    path = tmp_path / "talks.jsonl"
    lines = [{"id": "bad", "messages": [USER, message]}, {"messages": [USER, ANSWER]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bad, good = read_conversations(path)
    assert isinstance(bad, Rejected) and (bad.id, bad.reason) == ("bad", reason)
    assert isinstance(good, Conversation) and good.id == "talks:2"


@pytest.mark.parametrize(
    "entry", [{}, {"messages": []}, {"messages": None}, {"messages": "x"}, {"conversations": {}}]
)
def test_a_row_without_messages_is_rejected(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps(entry))
    assert [type(item) for item in read_conversations(path)] == [Rejected]


def test_sharegpt_roles_go_through_the_table() -> None:
    entry = {
        "system": "S",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps(CALL_1["function"])},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "Go out."},
        ],
    }
    messages = parse_messages(entry)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"][0]["function"] == CALL_1["function"]
    assert {role for name, role in ROLES.items() if name not in ("function_call",)} == {
        "system",
        "user",
        "assistant",
        "tool",
    }


@pytest.mark.parametrize("as_text", [False, True])
def test_tool_schemas_keep_their_bytes(tmp_path: Path, as_text: bool) -> None:
    schemas = [
        [{"type": "function", "function": {"name": "b", "z": None, "a": {"é": [1.0, 1]}}}],
        [{"function": {"other": True, "name": "f"}, "type": "function", "strict": False}],
    ]
    path = tmp_path / "talks.jsonl"
    rows = [
        {"messages": [USER, ANSWER], "tools": json.dumps(tools) if as_text else tools}
        for tools in [*schemas, [], None]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(JSON_TOOLS)
    for conversation, tools in zip(read_conversations(path), [*schemas, None, None], strict=True):
        assert isinstance(conversation, Conversation) and conversation.tools == tools
        text = tokenizer.decode(encode(conversation, tokenizer, 4096).rows[0].input_ids)
        assert text.count("<|im_start|>system") == (tools is not None)
        for tool in tools or []:
            assert json.dumps(tool, ensure_ascii=False) in text


def test_many_null_reasonings_before_the_first_text(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    rows = [{"messages": [USER, {**ANSWER, "reasoning_content": None}]}] * 20_000
    rows += [{"messages": [USER, {**ANSWER, "reasoning_content": "hm"}]}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [item for item in read_conversations(path) if isinstance(item, Conversation)]
    assert len(found) == 20_003
    assert [("reasoning_content" in c.messages[1]) for c in found[-4:]] == [False] + [True] * 3


def test_a_template_that_ignores_reasoning_warns() -> None:
    messages = [USER, {**ANSWER, "reasoning_content": "hm"}]
    with pytest.warns(UserWarning, match="ignores reasoning_content"):
        assert run(messages, CHATML).ignored == ("reasoning",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run(messages, REASONING).ignored
        run([USER, ANSWER], CHATML)


def without(role: str) -> str:
    """A template that leaves out the messages of a role."""
    return CHATML.replace("{{ m.role }}\n{{ m.content }}", "{{ m.role }}\n{{ shown }}").replace(
        "{% for m in messages %}",
        f"{{% for m in messages %}}{{% set shown = '' if m.role == '{role}' else m.content %}}",
    )


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_template_that_ignores_a_role_warns(role: str) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        USER,
        ANSWER,
        {"role": "tool", "content": "sunny"},
        ANSWER,
    ]
    with pytest.warns(UserWarning, match=f"ignores {role} messages"):
        assert run(messages, without(role)).ignored == (f"{role}_messages",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run(messages, CHATML).ignored


def test_a_single_message_or_the_tools_left_out_are_noticed() -> None:
    first_only = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages if m.role != 'system' or m == messages[0] %}",
    )
    twice = [{"role": "system", "content": f"rule {n}"} for n in range(2)]
    with pytest.warns(UserWarning, match="ignores system messages"):
        assert run([*twice, USER, ANSWER], first_only).ignored == ("system_messages",)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.warns(UserWarning, match="ignores tool schemas"):
        assert run([USER, ANSWER], CHATML, tools=tools).ignored == ("tool_schemas",)
    assert not run([USER, ANSWER], JSON_TOOLS, tools=tools).ignored


def test_max_length_cuts_answers_and_drops_what_has_none() -> None:
    (row,) = run(THREE_TURNS, CHATML).rows
    first = row.loss_mask.index(1)
    cut = run(THREE_TURNS, CHATML, max_length=first + 1)
    assert cut.num_cut == 1 and cut.rows[0].loss_mask == [0] * first + [1]
    assert cut.rows[0].input_ids == row.input_ids[: first + 1]
    dropped = run(THREE_TURNS, CHATML, max_length=first)
    assert not dropped.rows and [bad.reason for bad in dropped.rejected] == [TOO_LONG]


def test_no_assistant_no_template_and_an_assistant_that_speaks_first() -> None:
    assert [bad.reason for bad in run([USER], CHATML).rejected] == ["no assistant message"]
    template = "{{ messages[0].role }}" + CHATML
    (bad,) = run([ANSWER, USER, ANSWER], template).rejected
    assert bad.id == "c1"
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        run([USER, ANSWER], tokenizer)


def test_what_follows_the_last_answer_stays_in_the_row_unsupervised() -> None:
    tokenizer = make_tokenizer(CHATML)
    (row,) = run([USER, ANSWER, USER], tokenizer).rows
    assert row.input_ids == template_ids(tokenizer, [USER, ANSWER, USER])
    assert spans(row) == ["Hello<|im_end|>"]


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_tokenizer(CHATML).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [259, 260]}))
    return folder


def test_prepare_writes_rows_and_a_manifest(tmp_path: Path, model_directory: Path) -> None:
    talks, out = tmp_path / "talks.jsonl", tmp_path / "rows.jsonl.zst"
    good = [{"id": f"g{n}", "messages": THREE_TURNS} for n in range(18)]
    lines = [json.dumps(entry) for entry in good]
    lines += ["{", json.dumps({"messages": [{"role": "critic", "content": "x"}]})]
    lines += [json.dumps({"messages": [{"role": "user", "content": "long " * 99}, ANSWER]})] * 30
    talks.write_text("\n".join(lines))
    manifest = prepare(model_directory, [talks], out, max_length=200)
    assert manifest == Manifest.load(tmp_path / "rows.manifest.json")
    assert manifest.rejected == {TOO_LONG: 30, "not JSON": 1, "unknown role": 1}
    assert [row.id for row in read_rows(out).rows] == [f"g{n}" for n in range(18)]
    assert manifest.num_supervised == 18 * 3 * 8  # seven tokens of text and the end
    assert str(tmp_path) not in manifest.to_json()
    again = prepare(model_directory, [talks], tmp_path / "other.jsonl", max_length=200)
    assert again.digest == manifest.digest


def test_prepare_refuses_a_file_with_too_many_bad_rows(
    tmp_path: Path, model_directory: Path
) -> None:
    talks = tmp_path / "talks.jsonl"
    good = json.dumps({"messages": THREE_TURNS})
    talks.write_text("\n".join([good] * 8 + ["{", "[]"]))
    with pytest.raises(
        ValueError, match=r"2 of 10 rows rejected \(not JSON: 1, not an object: 1\)"
    ):
        prepare(model_directory, [talks], tmp_path / "rows.jsonl", max_length=200)
    assert not (tmp_path / "rows.jsonl").exists()


def test_prepare_counts_what_the_template_leaves_out_and_warns_once(
    tmp_path: Path, model_directory: Path
) -> None:
    make_tokenizer(without("system")).save_pretrained(model_directory)
    talks = tmp_path / "talks.jsonl"
    told = [{"role": "system", "content": "Be kind."}, USER, {**ANSWER, "reasoning_content": "hm"}]
    lines = [json.dumps({"messages": m}) for m in (told, told, [USER, ANSWER])]
    talks.write_text("\n".join(lines))
    with pytest.warns(UserWarning) as caught:
        manifest = prepare(model_directory, [talks], tmp_path / "rows.jsonl", max_length=200)
    (message,) = [str(warning.message) for warning in caught]
    assert "3 conversations (reasoning_content in 2, system messages in 2)" in message
    assert manifest.counts["system_messages_ignored"] == manifest.counts["reasoning_ignored"] == 2
    assert manifest.counts["tool_messages_ignored"] == 0


def test_prepare_runs_a_tokenizers_own_code_only_where_allowed(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    path = model_directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(config))
    (model_directory / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    talks, out = tmp_path / "talks.jsonl", tmp_path / "rows.jsonl"
    talks.write_text(json.dumps({"messages": THREE_TURNS}))
    with pytest.raises(ValueError, match="custom code"):
        prepare(model_directory, [talks], out, max_length=200)
    assert prepare(model_directory, [talks], out, max_length=200, trust_remote_code=True).num_kept
