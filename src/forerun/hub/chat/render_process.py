"""The child process that renders chat templates. It reads one request from stdin and writes one answer to stdout.

Both are JSON. `template.py` starts this file as a script, which imports only small modules of this folder. jinja2 is
configured as in transformers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from forerun.hub.chat.answer_spans import (
    THOUGHTS,
    Budget,
    MarkedTurns,
    TooLongError,
    Turns,
    UnclearError,
    role_of,
    unused,
)

# ---- Fields of messages: the form that a template needs, and those that it does not write ----


def with_arguments(messages: list[Any], *, parse: bool) -> list[Any]:
    """Return the messages with the arguments of calls as objects (`parse`), or as JSON texts.

    Most templates need objects, and datasets contain either. A text that is not JSON of an object stays as it is.
    """

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        held = function.get("arguments")
        value = _parsed(held) if parse else json.dumps(held, ensure_ascii=False) if isinstance(held, dict) else held
        return call if value == held else {**call, "function": {**function, "arguments": value}}

    found = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        found.append({**message, "tool_calls": [*map(changed, calls)]} if isinstance(calls, list) else message)
    return found


def _parsed(arguments: Any) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def checked_text(turns: Turns, text: str) -> tuple[str, dict[str, Any] | None]:
    """Return the text of a conversation, and the first part that the template does not write, or None.

    If thoughts have a name that the template does not read, they get another one. The messages of `turns` are then
    those with the other name.
    """
    lost, before = lost_field(turns, text), turns.messages
    if lost is None or lost["field"] not in THOUGHTS:
        return text, lost
    for name in THOUGHTS:
        if name != lost["field"]:
            turns.messages = [_renamed(message, lost["field"], name) for message in before]
            other = _writes(turns, turns.messages)
            if other not in (None, text) and lost_field(turns, other or "") is None:
                return other or "", None
    turns.messages = before
    return text, lost


def _renamed(message: Any, old: str, new: str) -> Any:
    if not isinstance(message, dict) or old not in message or new in message:
        return message
    return {new if key == old else key: value for key, value in message.items()}


def lost_field(turns: Turns, text: str) -> dict[str, Any] | None:
    """Return the first part of a conversation that the template does not write, or None.

    The result has the keys message (a number, or None for the tools) and field, which is "inline" for thoughts in the
    content. A part is lost if its marks are not
    in the text and the text is the same without it. Thoughts of earlier turns do not count: templates remove them to
    save space.
    """
    try:
        found = MarkedTurns(turns, text)
        seen = {found.owners[mark][:2] for mark in found.places}
    except UnclearError:  # assume that contents are written: to compare the text without each would take too long
        seen = {(number, "content") for number in range(len(turns.messages))}
    last_user = max((n for n, message in enumerate(turns.messages) if role_of(message) == "user"), default=-1)
    for number, message in enumerate(turns.messages):
        if not isinstance(message, dict):
            continue
        for field in ("content", "inline", "thoughts", "tool_calls"):
            if field in ("thoughts", "inline") and number < last_user:
                continue
            for without in _without(message, field, number, seen):
                changed = [*turns.messages[:number], without, *turns.messages[number + 1 :]]
                if _writes(turns, changed) == text:
                    names = [name for name in THOUGHTS if message.get(name)]
                    return {"message": number, "field": names[0] if field == "thoughts" else field}
    if turns.tools and _writes(turns, turns.messages, tools=False) == text:
        return {"message": None, "field": "tools"}
    return None


def _without(message: dict[str, Any], field: str, number: int, seen: set[tuple[int, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the message without each part of a field whose marks are not in the text."""
    if field == "content":
        held = message.get("content")
        if held and not (isinstance(held, str) and held.isspace()) and (number, "content") not in seen:
            yield {**message, "content": "" if isinstance(held, str) else []}
    elif field == "inline":
        if role_of(message) == "assistant" and _thought(message.get("content")):
            yield {**message, "content": message["content"].rpartition("</think>")[2]}
    elif field == "thoughts":
        names = [name for name in THOUGHTS if message.get(name)]
        if names and not any((number, name) in seen for name in names):
            yield {key: value for key, value in message.items() if key not in names}
    else:
        held = message.get("tool_calls")
        calls = held if isinstance(held, list) else []
        for at in range(len(calls)):
            if (number, at) not in seen:
                others = [*calls[:at], *calls[at + 1 :]]
                kept = {key: value for key, value in message.items() if key != "tool_calls"}
                yield {**kept, "tool_calls": others} if others else kept


def _writes(turns: Turns, messages: list[Any], *, tools: bool = True) -> str | None:
    """Return the text of other messages, or None if the template cannot write it."""
    try:
        return turns.text(messages, tools=tools)
    except TooLongError:
        raise
    except Exception:
        return None


def has_thoughts(messages: list[Any]) -> bool:
    """Return whether an answer after the last question has thoughts, in a field or in its content."""
    last_user = max((n for n, message in enumerate(messages) if role_of(message) == "user"), default=-1)
    answers = [message for message in messages[last_user + 1 :] if role_of(message) == "assistant"]
    return any(any(one.get(name) for name in THOUGHTS) or _thought(one.get("content")) for one in answers)


def _thought(content: Any) -> bool:
    before, closed, _ = content.partition("</think>") if isinstance(content, str) else ("", "", "")
    return bool(closed and before.replace("<think>", "").strip())


SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn thinking on or off


def rendered(request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"texts": [...]}`, or a fault with the keys fault (template, refused, limit), why and conversation."""
    budget = Budget(request["output_characters"])
    texts: list[str] = []
    try:
        template = _environment().from_string(request["template"])
        for messages, tools in zip(request["conversations"], request["tools"], strict=True):
            texts.append(budget.text(template, messages, request["variables"], tools))
    except Exception as error:  # an untrusted template can raise anything
        return _fault(error) | {"conversation": len(texts)}
    return {"texts": texts}


def spoken(request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"spoken": [...]}`: for each conversation its text and the spans that the assistant says.

    A conversation that fails has the keys fault (template, refused, unclear, lost, thoughts) and why instead. A fault
    of all conversations (syntax, limits) is returned in place of the list.
    """
    budget = Budget(request["output_characters"])
    found: list[dict[str, Any]] = []
    try:
        environment = _environment(datetime.fromisoformat(request["date"]))
        template = environment.from_string(request["template"])
    except Exception as error:
        return _fault(error)
    thinks = _thinks(request, template, budget) if request["checks"] else True
    for messages, tools in zip(request["conversations"], request["tools"], strict=True):
        try:
            found.append(_spoken(request, environment, template, budget, messages, tools, thinks=thinks))
        except UnclearError as error:
            found.append({"fault": "unclear", "why": str(error)})
        except Exception as error:
            fault = _fault(error)
            if fault["fault"] == "limit":
                return fault | {"conversation": len(found)}
            found.append(fault)
        environment.marks = ("", "")
    return {"spoken": found}


def _spoken(
    request: dict[str, Any], environment: Any, template: Any, budget: Budget, messages: Any, tools: Any, *, thinks: bool
) -> dict[str, Any]:
    """Return the text and the spans of one conversation, or a fault."""
    turns = Turns(budget, template, with_arguments(messages, parse=True), request["variables"], request["ends"], tools)
    try:
        text = turns.text()
    except TooLongError:
        raise
    except Exception:
        # A few templates, such as DeepSeek V3, need arguments that are texts.
        parsed, turns.messages = turns.messages, with_arguments(messages, parse=False)
        if turns.messages == parsed:
            raise
        text = turns.text()
    if request["checks"]:
        if not thinks and has_thoughts(turns.messages):
            return {"fault": "thoughts", "why": ""}
        if tools or any(map(_needs_check, messages)):
            text, lost = checked_text(turns, text)
            if lost:
                return {"fault": "lost", "why": "", **lost}
    if not request["answers"]:
        spans: list[tuple[int, int]] = []
    elif environment.marked:
        # Render again with unused characters around the marked parts, and read their positions.
        free = unused(request["template"] + json.dumps([turns.messages, tools], ensure_ascii=False))
        environment.marks = (next(free), next(free))
        spans = marked_spans(turns.text(), text, environment.marks)
    else:
        spans = turns.spans(text)
    return {"text": text, "spans": spans}


def _needs_check(message: Any) -> bool:
    """Return whether a message is more than a text of the user or of the assistant, so that a template may omit it."""
    if not isinstance(message, dict) or len(message) > 2 or message.get("role") not in ("user", "assistant"):
        return True
    return message["role"] == "assistant" and "</think>" in str(message.get("content"))


def _thinks(request: dict[str, Any], template: Any, budget: Budget) -> bool:
    """Return whether the generation prompt lets the model think. It does if the template has no switch for it."""
    question = [{"role": "user", "content": "?"}]
    variables = request["variables"] | {"add_generation_prompt": True}
    try:
        given = budget.text(template, question, variables)
        for name in SWITCHES:
            on, off = (budget.text(template, question, variables | {name: value}) for value in (True, False))
            if on != off:
                return given == on
    except Exception:  # the conversations report it
        return True
    return True


def marked_spans(marked: str, text: str, marks: tuple[str, str]) -> list[tuple[int, int]]:
    """Return the spans between opening and closing marks, as positions in the text without marks.

    Raise UnclearError if `marked` without its marks is not `text`.
    """
    opening, closing = marks
    if marked.replace(opening, "").replace(closing, "") != text:
        raise UnclearError("its text depends on its generation marks, for example by a filter over what they enclose")
    spans: list[tuple[int, int]] = []
    depth, start = 0, 0
    for seen, found in enumerate(re.finditer(f"[{opening}{closing}]", marked)):
        place = found.start() - seen  # each mark before it is one character
        if found.group() == opening:
            start = start if depth else place
            depth += 1
            continue
        depth -= 1
        if depth == 0 and place > start:
            spans.append((start, place))
    return spans


def _fault(error: Exception) -> dict[str, Any]:
    """Return the keys fault and why for an exception of a template."""
    import jinja2

    if isinstance(error, TooLongError):
        return {"fault": "limit", "why": str(error)}
    if isinstance(error, (MemoryError, RecursionError, OverflowError)):
        return {"fault": "limit", "why": f"it needs too much: {type(error).__name__} {error}".rstrip()}
    if isinstance(error, jinja2.TemplateSyntaxError):
        return {"fault": "template", "why": f"line {error.lineno}: {error.message}"}
    if isinstance(error, _refusal()):
        return {"fault": "refused", "why": str(error)}
    return {"fault": "template", "why": f"{_line(error)}{type(error).__name__}: {error}"}


def _line(error: Exception) -> str:
    """Return the template's line that failed, as `line 3: `, or "" if jinja2 did not put it into the traceback."""
    found, frame = "", error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            found = f"line {frame.tb_lineno}: "
        frame = frame.tb_next
    return found


def _refusal() -> type[Exception]:
    """Return the exception class that `raise_exception` of a template raises.

    It is a subclass of an error of jinja2, so it is created only when jinja2 can be imported.
    """
    import jinja2

    if not _made:
        _made.append(type("RefusedError", (jinja2.TemplateError,), {}))
    return _made[0]


_made: list[type[Exception]] = []


def _environment(date: datetime | None = None) -> Any:
    """Return the sandboxed jinja2 environment. `date` is the result of `strftime_now` (default: the current time)."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which encloses what the assistant says. It writes only `environment.marks`."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            setattr(self.environment, "marked", True)  # noqa: B010
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> Any:
            opening, closing = getattr(self.environment, "marks")  # noqa: B009
            return f"{opening}{caller()}{closing}"

    class Plain:
        """The function `dict`, without access to the attributes of the class."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        """A jinja2 namespace that rejects names with a leading underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            jinja2.utils.Namespace.__init__(*args, **kwargs)
            for name in dict(*args[1:], **kwargs):
                _no_underscore(name)

        def __setitem__(self, name: str, value: Any) -> None:
            _no_underscore(name)
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise _refusal()(message)

    class Environment(ImmutableSandboxedEnvironment):
        marks = ("", "")  # written before and after the text inside `{% generation %}`
        marked = False  # whether the template has a `{% generation %}` tag

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format: (date or datetime.now()).strftime(format),
        "dict": Plain(),
        "namespace": Namespace,
    }
    return environment


def _no_underscore(name: object) -> None:
    import jinja2

    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} of a namespace is not allowed")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Answer one request, with limits on CPU time, memory and files."""
    import resource

    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    # jinja2 imports some modules lazily, for example to report an error. Render a template (which fails) now, because
    # no file can be opened after the limits are set.
    rendered(
        request
        | {"template": "{{ [] | first | tojson }}{{ strftime_now('%c') }}", "conversations": [[]], "tools": [None]}
    )
    time.tzset()
    limit = request["cpu_seconds"] + int(time.process_time())  # do not count the start of Python
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory if most == resource.RLIM_INFINITY else min(memory, most),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    json.dump(spoken(request) if "ends" in request else rendered(request), sys.stdout)


if __name__ == "__main__":
    main()
