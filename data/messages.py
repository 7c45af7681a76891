"""Messages of a conversation in one shape, and their rendering by the target's chat template.

Read shapes: OpenAI `messages` (`role`/`content`, with `tool_calls`, `reasoning_content`, top-level
`tools`) and ShareGPT `conversations` (`from`/`value`). Roles go through `ROLES`; one that is not
listed rejects the row. What means the same becomes the same: content null, empty or absent beside
tool calls; arguments as an object or as JSON text; `tool_calls` and `tools` as a list or as JSON
text.
"""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # its value is one call, or a list of calls, as JSON
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}


TEXT_PARTS = ("text", "input_text", "output_text")

# What a chat template may leave out without a word, and how a message to people names it.
IGNORABLE = {
    "reasoning": "reasoning_content",
    "system_messages": "system messages",
    "user_messages": "user messages",
    "tool_messages": "tool messages",
    "tool_schemas": "tool schemas",
}
MARK = "text-of-message-{}-in-the-conversation"


class BadMessages(ValueError):
    """A conversation that cannot be read or rendered: a reason to count, and what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def parse_messages(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's messages, normalized; raises BadMessages."""
    found = entry.get("messages")
    found = entry.get("conversations") if found is None else found
    found = _from_json(found, "messages") if isinstance(found, str) else found
    if not isinstance(found, list) or not found:
        raise BadMessages("no messages", f"the row has {', '.join(sorted(entry)) or 'nothing'}")
    messages = [_message(message, place) for place, message in enumerate(found)]
    system = _text(entry.get("system"), 0)
    if system:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif messages[0]["content"] != system:
            raise BadMessages("two system messages", "one in the row, another among its messages")
    return messages


def parse_tools(entry: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The row's tool schemas exactly as given (keys, order, nulls); None where there are none."""
    tools, wrap = entry.get("tools"), False
    if tools is None and entry.get("functions"):
        tools, wrap = entry["functions"], True  # OpenAI's older name, without the outer object
    if isinstance(tools, str):
        tools = _from_json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadMessages("tools is not a list of objects", f"found {str(tools)[:60]!r}")
    return [{"type": "function", "function": tool} for tool in tools] if wrap else tools


def _message(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadMessages("message is not an object", f"message {place}")
    found = message.get("role", message.get("from"))
    name = found.strip().lower() if isinstance(found, str) else ""
    if name not in ROLES:
        raise BadMessages("unknown role", f"message {place}: {found!r}; known: {', '.join(ROLES)}")
    role = ROLES[name]
    content = _first(message, "content", "value")
    if name == "function_call":
        calls, content = _tool_calls(content, place), None
    else:
        calls = _tool_calls(message.get("tool_calls"), place)
    if message.get("function_call") is not None:
        calls += _tool_calls([message["function_call"]], place)
    if calls and role != "assistant":
        raise BadMessages("tool_calls outside an assistant message", f"message {place}: {role}")
    reasoning = _first(message, "reasoning_content", "reasoning")
    if not isinstance(reasoning, (str, type(None))):
        raise BadMessages("reasoning_content is not text", f"message {place}")
    result: dict[str, Any] = {"role": role, "content": _text(content, place)}
    if content is None and role != "tool" and not calls and not reasoning:
        raise BadMessages("message without content", f"message {place}: {role}")
    if reasoning and role == "assistant":
        result["reasoning_content"] = reasoning
    if calls:
        result["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    return result


def _first(message: dict[str, Any], *names: str) -> Any:
    """The first of the alternative keys that is there and not null."""
    return next((message[name] for name in names if message.get(name) is not None), None)


def _text(content: Any, place: int) -> str:
    """Text, or the joined text parts of OpenAI's list form; null is the empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadMessages("content is not text", f"message {place}: {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        known = not isinstance(part, dict) or part.get("type", "text") in TEXT_PARTS
        if not isinstance(text, str) or not known:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadMessages("content part is not text", f"message {place}: {kind}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, place: int) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _from_json(calls, f"message {place}: tool_calls") if calls.strip() else None
    if calls is None:
        return []
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise BadMessages("tool_calls is not a list", f"message {place}: {type(calls).__name__}")
    return [_tool_call(call, place) for call in calls]


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    call = _from_json(call, f"message {place}: tool call") if isinstance(call, str) else call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadMessages("tool call without a function name", f"message {place}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        where = f"message {place}: arguments of {function['name']}"
        arguments = _from_json(arguments, where) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadMessages(
            "tool call arguments are not an object", f"message {place}: {str(arguments)[:60]!r}"
        )
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessages("malformed JSON in a message", f"{what}: {error}") from None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    generation: bool = False,
    **options: Any,
) -> str:
    """The chat template's text; raises BadMessages where the template fails.

    Messages with tool calls go through `adapt` first.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            add_generation_prompt=generation,
            tokenize=False,
            **options,
        )
    except Exception as error:  # a template raises whatever its author chose
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadMessages("the chat template refuses the messages", reason) from error
    assert isinstance(text, str)
    return text


def adapt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The messages in the form in which this chat template renders their tool calls.

    Most templates want arguments as objects, which they turn into JSON; some want JSON text, and
    print an object in Python's notation or fail; some look for calls only where content is absent.
    Raises BadMessages where no form shows the calls: such a turn would be an empty answer.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    error = BadMessages("the chat template leaves out tool calls")
    without = [{k: v for k, v in message.items() if k != "tool_calls"} for message in messages]
    for keep_content in (True, False):
        for as_text in (False, True):
            form = [_form(message, keep_content, as_text) for message in messages]
            try:
                text = render(tokenizer, form, tools)
            except BadMessages as failure:
                error = failure
                continue
            if not _shows_python(text, form) and text != render(tokenizer, without, tools):
                return form
    raise error


def _form(message: dict[str, Any], keep_content: bool, as_text: bool) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
    if as_text:
        for call in calls:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    form = {**message, "tool_calls": calls}
    if not keep_content and not form["content"]:
        del form["content"]
    return form


def _shows_python(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a template wrote arguments the way Python does."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if arguments and isinstance(arguments, dict) and str(arguments) in text:
                return True
    return False


def ignored_parts(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> tuple[str, ...]:
    """Which of IGNORABLE the conversation has and the chat template does not show.

    Messages that are not the assistant's are looked for by a text of their own: even one that is
    left out counts.
    """
    marked = [
        message if message["role"] == "assistant" else {**message, "content": MARK.format(place)}
        for place, message in enumerate(messages)
    ]
    found: set[str] = set()
    try:
        text = render(tokenizer, marked, tools)
    except BadMessages:  # a template that checks its messages' texts does not leave them out
        text = None
    for place, message in enumerate(messages):
        if text is not None and message["role"] != "assistant" and MARK.format(place) not in text:
            found.add(f"{message['role']}_messages")
    if tools and render(tokenizer, messages, tools) == render(tokenizer, messages):
        found.add("tool_schemas")
    if _ignores_reasoning(tokenizer, messages, tools):
        found.add("reasoning")
    return tuple(part for part in IGNORABLE if part in found)


def _ignores_reasoning(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> bool:
    """Whether the first turn with reasoning renders the same without it."""
    for j, message in enumerate(messages):
        if message.get("reasoning_content"):
            plain = {key: value for key, value in message.items() if key != "reasoning_content"}
            kept = render(tokenizer, messages[: j + 1], tools)
            return kept == render(tokenizer, [*messages[:j], plain], tools)
    return False
