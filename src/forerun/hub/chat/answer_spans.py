"""The spans of a rendered conversation that the assistant says, found without generation marks.

Two methods find the answers:

- Prefixes. The text up to an answer is the text of the earlier messages with the generation prompt.
- Marks. Some templates write a message differently if others follow, for example without its thoughts. Then no prefix
  fits, so each text of a message gets an unused character. Its place is a fixed point in both renderings: only the text
  after it, up to the answer, must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

# ---- Marks in the texts of messages: unused characters that show where each message is in a rendered text ----


THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message with the thoughts of the assistant
_FIELDS = ("content", *THOUGHTS, "tool_calls")  # fields of a message whose texts get marks
_NOT_MARKED = ("id", "type", "tool_call_id")  # keys inside these fields that templates compare
_MARKS = range(0x100000, 0x10FFFE)  # private-use characters
Owner = tuple[int, Any, bool]


class UnclearError(Exception):
    """The assistant's part of the text cannot be determined."""


def unused(text: str) -> Iterator[str]:
    """Yield private-use characters that do not occur in the text."""
    taken = set(text)
    return (chr(code) for code in _MARKS if chr(code) not in taken)


def marked_messages(
    messages: list[Any], free: Iterator[str], *, names: bool = True
) -> tuple[list[Any], dict[str, Owner]]:
    """Return the messages with a mark in each text, and the owner of each mark.

    An owner is the number of the message, its field, and whether the text is a name. The field of a call of a tool is
    its number in the list of calls.
    """
    owners: dict[str, Owner] = {}

    def mark(value: Any, owner: Owner) -> Any:
        if isinstance(value, str):
            place = _place_of_mark(value)
            if place is None:
                return value
            character = next(free, None)
            if character is None:
                raise UnclearError("it has too many texts")
            owners[character] = owner
            return value[:place] + character + value[place:]
        if isinstance(value, list):
            return [mark(inner, owner) for inner in value]
        if isinstance(value, dict):
            skipped = _NOT_MARKED if names else (*_NOT_MARKED, "name")
            return {
                key: inner if key in skipped else mark(inner, (*owner[:2], owner[2] or key == "name"))
                for key, inner in value.items()
            }
        return value

    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UnclearError(f"message {number + 1} is not an object")
        changed = dict(message)
        for field in _FIELDS:
            value = changed.get(field)
            if field == "tool_calls" and isinstance(value, list):
                changed[field] = [mark(call, (number, at, False)) for at, call in enumerate(value)]
            elif value is not None:
                changed[field] = mark(value, (number, field, False))
        found.append(changed)
    return found, owners


def without_marks(rendered: str, owners: Iterable[str]) -> tuple[str, dict[str, list[int]]]:
    """Return the text without marks, and the places of each mark in it."""
    known, places, pieces = set(owners), dict[str, list[int]](), list[str]()
    length = start = 0
    for at, character in enumerate(rendered):
        if character in known:
            pieces.append(rendered[start:at])
            length, start = length + at - start, at + 1
            places.setdefault(character, []).append(length)
    return "".join([*pieces, rendered[start:]]), places


def role_of(message: Any) -> Any:
    """Return the role of a message, or None."""
    return message.get("role") if isinstance(message, dict) else None


def _place_of_mark(text: str) -> int | None:
    """Return where a text gets its mark: before its last character, or before a tag at its end. None: nowhere.

    Templates remove spaces at both ends of a text, and compare its start and its end with tags.
    """
    end = len(text.rstrip())
    if not end:
        return None
    place = text.rfind("<", 0, end) if text[end - 1] == ">" else -1
    if place < 0:
        return end - 1
    return place if text[:place].strip() else None


Span = tuple[int, int, int]  # begin, end, and the number of the message


# ---- Turns ----


class TooLongError(Exception):
    """A template wrote more text than allowed."""


class Budget:
    """The number of characters that templates may still write."""

    def __init__(self, characters: int) -> None:
        self.characters = self.left = characters

    def text(self, template: Any, messages: Any, variables: dict[str, Any], tools: Any = None) -> str:
        """Return the rendered messages, or raise TooLongError."""
        pieces = []
        for piece in template.generate(messages=messages, tools=tools or None, documents=None, **variables):
            self.left -= len(piece)
            if self.left < 0:
                raise TooLongError(f"it wrote more than {self.characters} characters")
            pieces.append(piece)
        return "".join(pieces)


class Turns:
    """The turns of one conversation."""

    def __init__(
        self, budget: Budget, template: Any, messages: list[Any], variables: Any, ends: list[str], tools: Any = None
    ) -> None:
        self.budget, self.template, self.messages, self.ends = budget, template, messages, tuple(ends)
        self.variables, self.tools = variables, tools

    def text(self, messages: list[Any] | None = None, *, prompt: bool = False, tools: bool = True) -> str:
        """Return the text of the messages, by default of all. `prompt` adds the generation prompt."""
        return self.budget.text(
            self.template,
            self.messages if messages is None else messages,
            self.variables | {"add_generation_prompt": prompt},
            self.tools if tools else None,
        )

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of `text` that the assistant says.

        A span includes the end of the turn. White space after an end-of-turn token is not included. If a turn has no
        end, as in GLM-4, the special token that starts the next message ends it: the model must learn to stop.
        """
        try:
            return self._trimmed(text, self._found_by_prefixes(text))
        except UnclearError as first:
            try:
                return self._trimmed(text, MarkedTurns(self, text).spans())
            except UnclearError:
                raise first from None

    def _trimmed(self, text: str, found: list[Span]) -> list[tuple[int, int]]:
        spans = []
        for begin, end, number in found:
            said = text[begin:end]
            following = self.messages[number + 1 : number + 2]
            if self.ends and said.rstrip().endswith(self.ends):
                end -= len(said) - len(said.rstrip())
            elif self.ends and following and role_of(following[0]) != "assistant" and text.startswith(self.ends, end):
                end += len(_first(text[end:], self.ends)[1])
            spans.append((begin, end))
        return spans

    def _found_by_prefixes(self, text: str) -> list[Span]:
        saying = self.answers()
        begins = [self._begin(text, number) for number in saying]
        limits = [*begins[1:], len(text)][: len(begins)]
        spans = []
        for number, begin, limit in zip(saying, begins, limits, strict=True):
            end = self._end(text, number, begin)
            if end > limit:
                raise UnclearError(f"the end of message {number + 1} is found only after the next answer")
            spans.append((begin, end, number))
        return spans

    def answers(self) -> list[int]:
        """Return the numbers of the assistant's messages."""
        return [number for number, message in enumerate(self.messages) if role_of(message) == "assistant"]

    def _begin(self, text: str, number: int) -> int:
        """Return the position in `text` where the answer `number` begins: after the generation prompt."""
        try:
            before = self.text(self.messages[:number], prompt=True)
        except TooLongError:
            raise
        except Exception as error:
            raise UnclearError(f"it cannot write the {number} messages before message {number + 1}: {error}") from error
        if not text.startswith(before):
            raise UnclearError(f"the text before message {number + 1} changes when more messages follow")
        return len(before)

    def _end(self, text: str, number: int, begin: int) -> int:
        """Return the position in `text` where the answer `number` ends."""
        upto = self.text(self.messages[: number + 1])
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


class MarkedTurns:
    """The turns of a conversation, found by a mark in each text of its messages."""

    def __init__(self, turns: Turns, text: str) -> None:
        """Render the marked messages. Raise UnclearError if the template writes another text for them."""
        self._turns, self._plain = turns, text
        for names in (True, False):  # some templates compare the names of functions
            free = unused(json.dumps([turns.messages, turns.tools], ensure_ascii=False) + text)
            self._messages, self.owners = marked_messages(turns.messages, free, names=names)
            self._spare = next(free, "")
            plain, self.places = without_marks(self._render(self._messages), self.owners)
            if plain == text:
                # Templates also write the name of a function where its result is.
                self.places = {
                    mark: found[: 1 if self.owners[mark][2] else None] for mark, found in self.places.items()
                }
                return
        raise UnclearError("it writes another text if a message has one more character")

    def spans(self) -> list[Span]:
        """Return the spans of the answers, or raise UnclearError."""
        found: list[Span] = []
        earliest = 0
        for number in self._turns.answers():
            begin = self._begin(number, earliest)
            earliest = self._end(number, begin)
            found += [(start, stop, number) for start, stop in self._without_others(number, begin, earliest)]
        return found

    def _render(self, messages: list[Any], *, prompt: bool = False) -> str:
        try:
            return self._turns.text(messages, prompt=prompt)
        except TooLongError:
            raise
        except Exception as error:
            raise UnclearError(f"it cannot write {len(messages)} marked messages: {error}") from error

    def _begin(self, number: int, earliest: int) -> int:
        """Return where the answer `number` begins: after the generation prompt, or the part of it that is written."""
        mark, prompt = self._after_mark(self._render(self._messages[:number], prompt=True))
        places = self._places(mark)
        cues = [prompt]
        found = self._after(places, cues, earliest)
        if found is not None:
            return found
        # The template writes a shorter start for this answer, for example without a block of thoughts. Take the start
        # that it writes for an answer in an earlier turn.
        probe = [{"role": "assistant", "content": self._spare}, {"role": "user", "content": "?"}]
        before, seen, _ = self._render([*self._messages[:number], *probe]).partition(self._spare)
        other, start = self._after_mark(before)
        if seen and other == mark:
            cues = [start, _common(prompt, start)]
        found = self._after(places, [cue for cue in cues if cue], earliest)
        if found is None:
            raise UnclearError(f"the text before message {number + 1} changes when more messages follow")
        return found

    def _end(self, number: int, begin: int) -> int:
        """Return where the answer `number` ends: after the text that follows its last mark if it is the last one."""
        mark, tail = self._after_mark(self._render(self._messages[: number + 1]))
        places = [place for place in self._places(mark) if mark and (self.owners[mark][0] != number or place >= begin)]
        for place in places:
            if self._plain.startswith(tail, place) and place + len(tail) > begin:
                return place + len(tail)
        # The end of the last turn is another special token, as <|return|> instead of <|end|> in Harmony. Or the next
        # answer continues the turn without any end, as in Gemma 4.
        inside, special = _first(tail, self._turns.ends)
        for place in places if special and mark and self.owners[mark][0] == number else ():
            stop = place + len(inside)
            if not self._plain.startswith(inside, place):
                continue
            if self._plain.startswith(self._turns.ends, stop):
                return stop + len(_first(self._plain[stop:], self._turns.ends)[1])
            following = [answer for answer in self._turns.answers() if answer > number]
            if following and self._begin(following[0], stop) == stop:
                return stop
        raise UnclearError(f"the end of message {number + 1} in its text cannot be determined")

    def _without_others(self, number: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a span that are between the texts of other messages.

        Gemma 4 writes the results of tools after the calls of an answer and before its content. A part ends as the
        answer would without content, and the next one begins after the last special token before its first mark.
        """
        inside = sorted(
            (place, self.owners[mark][0] == number)
            for mark, places in self.places.items()
            for place in places
            if begin <= place < end
        )
        groups = [(own, [place for place, _ in group]) for own, group in groupby(inside, key=lambda one: one[1])]
        if not groups or not groups[-1][0]:
            if any(not own for own, _ in groups):
                raise UnclearError(f"the text of message {number + 1} contains another message")
            yield begin, end
            return
        start = begin
        for at, (own, places) in enumerate(groups):
            if not own:
                gap = self._plain[places[-1] : groups[at + 1][1][0]]
                start = places[-1] + len(_up_to_last(gap, self._turns.ends, number))
            elif at + 1 < len(groups):
                calls = {key: held for key, held in self._messages[number].items() if key != "content"}
                _, tail = self._after_mark(self._render([*self._messages[:number], calls]))
                if not self._plain.startswith(tail, places[-1]):
                    raise UnclearError(f"the text of message {number + 1} contains another message")
                yield start, places[-1] + len(tail)
        yield start, end

    def _after_mark(self, rendered: str) -> tuple[str, str]:
        """Return the last mark of a rendered text ("" if it has none) and the text after it."""
        place = max((rendered.rfind(mark) for mark in set(rendered) & self.owners.keys()), default=-1)
        return (rendered[place], rendered[place + 1 :]) if place >= 0 else ("", rendered)

    def _places(self, mark: str) -> list[int]:
        return self.places.get(mark, []) if mark else [0]

    def _after(self, places: Iterable[int], cues: Iterable[str], earliest: int) -> int | None:
        """Return the first position after one of `cues` at one of `places`, or None."""
        found = (place + len(cue) for cue in cues for place in places if self._plain.startswith(cue, place))
        return next((position for position in found if position >= earliest), None)


def _first(text: str, specials: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the first special token, and this token; two empty texts if there is none."""
    found = [(place, -len(one)) for one in specials if (place := text.find(one)) >= 0]
    if not found:
        return "", ""
    place, length = min(found)
    return text[:place], text[place : place - length]


def _up_to_last(text: str, specials: tuple[str, ...], number: int) -> str:
    """Return the text up to the end of its last special token, or raise UnclearError."""
    stop = max((place + len(one) for one in specials if (place := text.rfind(one)) >= 0), default=None)
    if stop is None:
        raise UnclearError(f"the text of message {number + 1} contains another message")
    return text[:stop]


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    different = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(different, min(len(one), len(other)))]


def _contents(message: dict[str, Any]) -> list[str]:
    """Return the forms in which a template may write the content: unchanged, stripped, or without its thoughts."""
    content = message.get("content")
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if isinstance(part, dict) and "text" in part), None)
    if not isinstance(content, str):
        return []
    forms = (content, content.strip(), content.rpartition("</think>")[2].strip())
    return [form for form in dict.fromkeys(forms) if form.strip()]
