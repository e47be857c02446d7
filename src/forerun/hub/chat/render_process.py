"""The child process that renders chat templates. It reads one request from stdin and writes one answer to stdout.

Both are JSON. `template.py` starts this file as a script, which imports only small modules of this folder. jinja2 is
configured as in transformers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[3]))

from forerun.hub.chat.answer_spans import Budget, TooLongError, Turns
from forerun.hub.chat.lost_fields import checked_text, has_thoughts, with_arguments
from forerun.hub.chat.message_marks import UnclearError, unused

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
