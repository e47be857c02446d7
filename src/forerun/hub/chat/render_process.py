"""The child process that renders chat templates. It reads one request from stdin and writes one answer to stdout.

Both are JSON. `template.py` starts this file as a script, so it imports nothing of forerun. jinja2 is configured as in
transformers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import datetime
from typing import Any


class TooLongError(Exception):
    """A template wrote more text than allowed."""


class UnclearError(Exception):
    """The assistant's part of the text cannot be determined."""


class Budget:
    """The number of characters that templates may still write."""

    def __init__(self, characters: int) -> None:
        self.characters = self.left = characters

    def text(self, template: Any, messages: Any, variables: dict[str, Any]) -> str:
        """Return the rendered messages, or raise TooLongError."""
        pieces = []
        for piece in template.generate(messages=messages, tools=None, documents=None, **variables):
            self.left -= len(piece)
            if self.left < 0:
                raise TooLongError(f"it wrote more than {self.characters} characters")
            pieces.append(piece)
        return "".join(pieces)


def rendered(request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"texts": [...]}`, or a fault with the keys fault (template, refused, limit), why and conversation."""
    budget = Budget(request["output_characters"])
    texts: list[str] = []
    try:
        template = _environment().from_string(request["template"])
        for messages in request["conversations"]:
            texts.append(budget.text(template, messages, request["variables"]))
    except Exception as error:  # an untrusted template can raise anything
        return _fault(error) | {"conversation": len(texts)}
    return {"texts": texts}


def spoken(request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"spoken": [...]}`: for each conversation its text and the spans that the assistant says.

    A conversation that fails has the keys fault (template, refused, unclear) and why instead. A fault of all
    conversations (syntax, limits) is returned in place of the list.
    """
    budget = Budget(request["output_characters"])
    found: list[dict[str, Any]] = []
    try:
        environment = _environment(datetime.fromisoformat(request["date"]))
        template = environment.from_string(request["template"])
    except Exception as error:
        return _fault(error)
    for messages in request["conversations"]:
        turns = Turns(budget, template, messages, request["variables"], request["ends"])
        try:
            text = turns.text(len(messages))
            if not request["answers"]:
                spans = []
            elif environment.marked:
                # Render again with unused characters around the marked parts, and read their positions.
                environment.marks = unused(request["template"] + json.dumps(messages, ensure_ascii=False))
                spans = marked_spans(turns.text(len(messages)), text, environment.marks)
                environment.marks = ("", "")
            else:
                spans = turns.spans(text)
            found.append({"text": text, "spans": spans})
        except UnclearError as error:
            environment.marks = ("", "")
            found.append({"fault": "unclear", "why": str(error)})
        except Exception as error:
            environment.marks = ("", "")
            fault = _fault(error)
            if fault["fault"] == "limit":
                return fault | {"conversation": len(found)}
            found.append(fault)
    return {"spoken": found}


def unused(text: str) -> tuple[str, str]:
    """Return two private-use characters that do not occur in the text."""
    free = (chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in text)
    return next(free), next(free)


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


class Turns:
    """The turns of one conversation, found by rendering its prefixes. Used for templates without generation marks."""

    def __init__(self, budget: Budget, template: Any, messages: list[Any], variables: Any, ends: list[str]) -> None:
        self.budget, self.template, self.messages, self.ends = budget, template, messages, tuple(ends)
        self.variables = variables

    def text(self, count: int, *, prompt: bool = False) -> str:
        """Return the text of the first `count` messages. `prompt` adds the generation prompt."""
        return self.budget.text(
            self.template, self.messages[:count], self.variables | {"add_generation_prompt": prompt}
        )

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of `text` that the assistant says.

        A span includes the end of the turn. White space after an end-of-turn token is not included.
        """
        saying = [n for n, message in enumerate(self.messages) if _role(message) == "assistant"]
        begins = [self._begin(text, number) for number in saying]
        limits = [*begins[1:], len(text)][: len(begins)]
        spans = []
        for number, begin, limit in zip(saying, begins, limits, strict=True):
            end = self._end(text, number, begin)
            if end > limit:
                raise UnclearError(f"the end of message {number + 1} is found only after the next answer")
            said = text[begin:end]
            if self.ends and said.rstrip().endswith(self.ends):
                end -= len(said) - len(said.rstrip())
            spans.append((begin, end))
        return spans

    def _begin(self, text: str, number: int) -> int:
        """Return the position in `text` where the answer `number` begins: after the generation prompt."""
        try:
            before = self.text(number, prompt=True)
        except TooLongError:
            raise
        except Exception as error:
            raise UnclearError(f"it cannot write the {number} messages before message {number + 1}: {error}") from error
        if not text.startswith(before):
            raise UnclearError(f"the text before message {number + 1} changes when more messages follow")
        return len(before)

    def _end(self, text: str, number: int, begin: int) -> int:
        """Return the position in `text` where the answer `number` ends."""
        upto = self.text(number + 1)
        if text.startswith(upto):
            return len(upto)
        # The template writes the last answer differently (for example with its thoughts). Find the content of the
        # answer and the text after it in this shorter rendering, and search for both together in the complete text.
        for content in _contents(self.messages[number]):
            place = upto.rfind(content)
            if place < 0:
                continue
            tail = upto[place + len(content) :]
            start = text.find(content + tail, begin)
            if start < 0 or not tail.strip() or tail in text[begin:start]:
                continue
            return start + len(content) + len(tail)
        raise UnclearError(f"the end of message {number + 1} in its text cannot be determined")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _contents(message: dict[str, Any]) -> list[str]:
    """Return the forms in which a template may write the content: unchanged, stripped, or without its thoughts."""
    content = message.get("content")
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if isinstance(part, dict) and "text" in part), None)
    if not isinstance(content, str):
        return []
    forms = (content, content.strip(), content.rpartition("</think>")[2].strip())
    return [form for form in dict.fromkeys(forms) if form.strip()]


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
    rendered(request | {"template": "{{ [] | first | tojson }}{{ strftime_now('%c') }}", "conversations": [[]]})
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
