"""Kimi K3's chat encoding: conversations to segments, each tokenised on its own.

Concatenating first would change the ids and let a user's text forge structure. The rules and the
fixed texts are protocol data of the checkpoint; docs/architecture.md says where they come from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from finback.errors import RequestError

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
IMAGE = "<|kimi_image_placeholder|>"
EFFORTS = ("low", "high", "max")

EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the"
    " response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE_TEXT = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
FORMAT_TEXT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without"
    " markdown code blocks (```json) or any additional formatting."
)
SCHEMA_TEXT = "\nThe JSON data must match the following schema:\n```json\n{}\n```"
TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
NEW_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)

Message = Mapping[str, object]


class Segment(NamedTuple):
    """A piece of a rendered conversation and whether special strings in it count."""

    text: str
    is_special: bool


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[object] = (),
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] = (),
) -> list[Segment]:
    """Render a conversation.

    Args:
        messages: In OpenAI's shape: `role`, `content`, and per role `name`, `tools`,
            `reasoning_content`, `tool_calls`, `tool_call_id`.
        image_prompts: One string per image, in order; the text model itself serves none.

    Raises:
        RequestError: Naming the message and the field that cannot be rendered.
    """
    images = iter(image_prompts)
    out: list[Segment] = []
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise RequestError("tools must be a list of objects")
    if tools:
        out += _internal("tool-declare", TOOLS_TEXT.format(_compact(tools)))
    if thinking and thinking_effort is not None:
        if thinking_effort not in EFFORTS:
            raise RequestError(
                f"thinking_effort is {thinking_effort!r}; choose one of {', '.join(EFFORTS)}"
            )
        out += _internal("thinking-effort", EFFORT_TEXT.format(thinking_effort))
    for message in _in_call_order(messages):
        out += _message(message, thinking, images)
    if isinstance(tool_choice, str) and tool_choice in TOOL_CHOICE_TEXT:
        out += _internal("tool-choice", TOOL_CHOICE_TEXT[tool_choice])
    elif tool_choice not in (None, "auto"):
        raise RequestError(f"tool_choice is {tool_choice!r}; choose auto, none or required")
    if response_format is not None:
        out += _response_format(response_format)
    if add_generation_prompt:
        out += _open("message", role="assistant")
        out += _open("think" if thinking else "response")
    return [segment for segment in out if segment.text]


# --- elements ------------------------------------------------------------------------------------


def _open(tag: str, **attributes: str) -> Iterator[Segment]:
    yield Segment(OPEN, True)
    yield Segment(tag, False)
    for key, value in attributes.items():
        yield Segment(f" {key}", False)
        yield Segment('="', False)
        yield Segment(value.replace("&", "&amp;").replace('"', "&quot;"), False)
        yield Segment('"', False)
    yield Segment(SEP, True)


def _close(tag: str) -> list[Segment]:
    return [Segment(CLOSE, True), Segment(tag, False), Segment(SEP, True)]


def _element(tag: str, content: Sequence[Segment], **attributes: str) -> list[Segment]:
    return [*_open(tag, **attributes), *content, *_close(tag)]


def _internal(kind: str, body: str) -> list[Segment]:
    content = [Segment(body, False)]
    return [*_element("message", content, role="system", type=kind), Segment(END, True)]


def _compact(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tools and schemas must be plain JSON ({error})") from error


def _response_format(value: Mapping[str, object]) -> list[Segment]:
    if not isinstance(value, Mapping):
        raise RequestError("response_format must be an object with a type")
    kind = value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return _internal("response-format", FORMAT_TEXT.format(kind))
    schema = value.get("json_schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise RequestError(
            "response_format needs type text, json_object, or json_schema with a json_schema"
        )
    body = FORMAT_TEXT.format(kind) + SCHEMA_TEXT.format(_compact(schema.get("schema", schema)))
    return _internal("response-format", body)


# --- messages ------------------------------------------------------------------------------------


def _message(message: Message, thinking: bool, images: Iterator[str]) -> list[Segment]:
    role = message.get("role")
    if role == "system" and message.get("tools"):
        if message.get("content"):
            raise RequestError(
                "a system message carries either tools or content; send two messages"
            )
        return _internal("tool-declare", NEW_TOOLS_TEXT.format(_compact(message["tools"])))
    attributes = {"role": str(role)}
    content = list(_content(message, images))
    if role == "tool":
        attributes |= {"tool": str(message["tool"]), "index": str(message["index"])}
    elif role in ("user", "system", "assistant"):
        if message.get("name"):
            attributes["name"] = str(message["name"])
    else:
        raise RequestError(f"unknown role {role!r}; use system, user, assistant or tool")
    if role == "assistant":
        content = [
            *_reasoning(message, thinking),
            *_element("response", content),
            *_tool_calls(message),
        ]
    return [*_element("message", content, **attributes), Segment(END, True)]


def _content(message: Message, images: Iterator[str]) -> Iterator[Segment]:
    content = message.get("content")
    if content is None:
        return
    for part in [content] if isinstance(content, str) else _list(content, "content"):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise RequestError("a text part needs a string in 'text'")
            yield from _text_with_images(text, images)
        elif kind in ("image", "image_url"):
            prompt = next(images, None)
            if prompt is None:
                raise RequestError("images are not supported: finback runs the text model only")
            yield Segment(prompt, True)
        else:
            raise RequestError(f"unsupported content part {kind!r}; only text parts can be sent")


def _text_with_images(text: str, images: Iterator[str]) -> Iterator[Segment]:
    """Put prepared images where their placeholder stands; without images it is ordinary text."""
    while IMAGE in text and (prompt := next(images, None)) is not None:
        before, text = text.split(IMAGE, 1)
        yield Segment(before, False)
        yield Segment(prompt, True)
    yield Segment(text, False)


def _reasoning(message: Message, thinking: bool) -> list[Segment]:
    if not thinking:
        return []
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise RequestError("the reasoning of an assistant message must be a string")
    return _element("think", [Segment(reasoning if reasoning.strip() else "", False)])


def _tool_calls(message: Message) -> list[Segment]:
    calls = _calls_of(message)
    if not calls:
        return []
    out: list[Segment] = []
    for index, call in enumerate(calls, 1):
        arguments = _arguments(call.get("arguments"))
        out += _element("call", arguments, tool=_call_name(call), index=str(index))
    return _element("tools", out)


def _call_name(call: Mapping[str, object]) -> str:
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("a tool call needs the name of its function")
    return name


def _arguments(arguments: object) -> list[Segment]:
    """Render a call's arguments, one element per key; what is no JSON object stays as it came."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return []
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            return _element("json", [Segment(arguments, False)], type="object")
        arguments = parsed
    if not isinstance(arguments, Mapping):
        raise RequestError("tool call arguments must be a JSON object or a string holding one")
    out: list[Segment] = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        out += _element("argument", [Segment(text, False)], key=str(key), type=_json_type(value))
    return out


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array"


# --- tool results --------------------------------------------------------------------------------


def _list(value: object, name: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a string or a list")
    return value


def _calls_of(message: Message) -> list[Mapping[str, object]]:
    """Flatten `tool_calls` to mappings with `id`, `name`, `arguments`."""
    calls: list[Mapping[str, object]] = []
    for call in _list(message.get("tool_calls") or [], "tool_calls"):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise RequestError("each entry of tool_calls must be an object with a 'function'")
        calls.append({**function, "id": call.get("id")})
    return calls


def _in_call_order(messages: Sequence[Message]) -> Iterator[Message]:
    """Give tool messages their `tool` name and `index`, and sort them into the calls' order."""
    calls: list[Mapping[str, object]] = []
    run: list[Message] = []
    index = 0
    for message in [*messages, None]:
        if message is not None and not isinstance(message, Mapping):
            raise RequestError("each message must be an object with a role")
        if message is not None and message.get("role") == "tool":
            run.append(message)
            continue
        for result in _named_results(run, calls, index):
            index += 1
            yield {**result, "index": index}
        run = []
        if message is not None:
            if message.get("role") == "assistant":
                calls, index = _calls_of(message), 0
            yield message


def _named_results(
    run: Sequence[Message], calls: Sequence[Mapping[str, object]], start: int
) -> Iterator[Message]:
    order = {call["id"]: n for n, call in enumerate(calls) if isinstance(call["id"], str)}
    keys = [message.get("tool_call_id", message.get("id")) for message in run]
    places = [order.get(key) if isinstance(key, str) else None for key in keys]
    if run and None not in places:
        for place, message in sorted(zip(places, run, strict=True), key=lambda pair: pair[0] or 0):
            yield {**message, "tool": _call_name(calls[place or 0])}
        return
    for position, message in enumerate(run, start):
        name = message.get("tool") or message.get("name")
        if not name and position < len(calls):
            name = _call_name(calls[position])
        if not name:
            raise RequestError(
                "a tool message needs tool_call_id, tool or name: no call precedes it"
            )
        yield {**message, "tool": name}
