"""The child process that renders chat templates. Reads one request on stdin, writes one answer to stdout, both JSON.

Started by `chat.py` as a file, so it imports nothing of forerun. jinja2 is set up as transformers does it.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from typing import Any


class TooLongError(Exception):
    """More text than allowed."""


def rendered(request: dict[str, Any]) -> dict[str, Any]:
    """`{"texts": [...]}`, or what is wrong: fault (template, refused, limit), why, and in which conversation."""
    import jinja2

    left = request["output_characters"]
    texts: list[str] = []
    try:
        template = _environment().from_string(request["template"])
        for messages in request["conversations"]:
            pieces = []
            for piece in template.generate(messages=messages, tools=None, documents=None, **request["variables"]):
                left -= len(piece)
                if left < 0:
                    raise TooLongError
                pieces.append(piece)
            texts.append("".join(pieces))
    except TooLongError:
        return _fault("limit", f"it wrote more than {request['output_characters']} characters", len(texts))
    except (MemoryError, RecursionError, OverflowError) as error:
        return _fault("limit", f"it needs too much: {type(error).__name__} {error}".rstrip(), len(texts))
    except jinja2.TemplateSyntaxError as error:
        return _fault("template", f"line {error.lineno}: {error.message}", len(texts))
    except _refusal() as error:
        return _fault("refused", str(error), len(texts))
    except Exception as error:  # whatever a stranger's program runs into
        return _fault("template", f"{type(error).__name__}: {error}", len(texts))
    return {"texts": texts}


def _fault(kind: str, why: str, conversation: int) -> dict[str, Any]:
    return {"fault": kind, "why": why, "conversation": conversation}


def _refusal() -> type[Exception]:
    """What `raise_exception` of a template raises; a subclass of jinja2's error, made once jinja2 can be imported."""
    import jinja2

    if not _made:
        _made.append(type("RefusedError", (jinja2.TemplateError,), {}))
    return _made[0]


_made: list[type[Exception]] = []


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says; in the text it leaves no trace."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> Any:
            return caller()

    class Plain:
        """`dict` without its attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        """No name that begins with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            jinja2.utils.Namespace.__init__(*args, **kwargs)
            for name in dict(*args[1:], **kwargs):
                _no_underscore(name)

        def __setitem__(self, name: str, value: Any) -> None:
            _no_underscore(name)
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise _refusal()(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format: datetime.now().strftime(format),
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
    import resource

    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    # What jinja2 imports only when it needs it, an error included, is here before files are taken away.
    rendered(request | {"template": "{{ [] | first | tojson }}{{ strftime_now('%c') }}", "conversations": [[]]})
    time.tzset()
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    json.dump(rendered(request), sys.stdout)


if __name__ == "__main__":
    main()
