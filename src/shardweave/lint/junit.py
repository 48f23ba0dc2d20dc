"""Test results from JUnit XML, which may come from anywhere.

The file is read as a stream by expat: there is no tree. A document type is refused before anything in it is
looked at, so that there are no entities to expand and nothing outside to fetch.
"""

from __future__ import annotations

from pathlib import Path
from xml.parsers import expat

from shardweave.errors import FormatError, TruncatedError
from shardweave.lint.results import Observation, Outcome, Part, message_in, outcome_of, signature_of

__all__ = ["MOST_BYTES", "read_junit"]

MOST_BYTES = 256 << 20
_MOST_TESTS = 2_000_000
_MOST_DEPTH = 32
_MOST_TEXT = 64 << 10
"""Characters that are kept of one message: its head is given as an attribute, its end tells the error."""
_CHUNK = 1 << 16

_CUT_SHORT = {
    expat.errors.codes[text]
    for text in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
}
_BAD = {"failure": Outcome.FAILED, "error": Outcome.ERROR}
_NO_RESULT = frozenset(
    {
        *("properties", "system-out", "system-err"),
        # Of tries that did not count: Maven writes them beside the result.
        *("flakyFailure", "flakyError", "rerunFailure", "rerunError"),
    }
)
_NOT_RUN = frozenset({"notrun", "disabled", "skipped", "suppressed"})
"""What some write in an attribute of a test that did not run, instead of an element in it."""
_SAYS_NOTHING = ("collection failure", "failed on setup with", "failed on teardown with", "internal error")


def read_junit(path: Path, *, rank: int | None = None) -> Part:
    """The results in a JUnit XML file, as pytest and many others write it.

    Raises:
        TruncatedError: The file ends before its XML does.
        FormatError: It is no JUnit XML, has a document type, or is larger than anything of that kind.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise _error(path, f"size({size}) > {MOST_BYTES}", rule="a report has a bounded size")
    reader = _Reader(path)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            reader.feed(chunk)
        reader.feed(b"", last=True)
    return Part(
        path=str(path), observations=tuple(reader.found), rank=rank, uncollected=tuple(reader.uncollected)
    )


def _error(path: Path, equation: str, *, rule: str = "a report is JUnit XML") -> FormatError:
    return FormatError(
        rule, where=str(path), equation=equation, hint="write it anew, with pytest --junitxml=FILE"
    )


class _Reader:
    """What expat tells of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Observation] = []
        self.uncollected: list[str] = []
        self._stack: list[str] = []
        self._test: tuple[str, str] | None = None  # classname, name
        self._worst: tuple[Outcome, str] = (Outcome.PASSED, "")
        self._result: tuple[Outcome, str] | None = None  # of the element that is open, and its message
        self._text: list[str] = []
        self._held = 0
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartDoctypeDeclHandler = self._refuse
        self._parser.EntityDeclHandler = self._refuse
        self._parser.ExternalEntityRefHandler = self._refuse
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters

    def feed(self, chunk: bytes, *, last: bool = False) -> None:
        """Read on."""
        try:
            self._parser.Parse(chunk, last)
        except expat.ExpatError as error:
            place = f"line {error.lineno}, column {error.offset + 1}"
            if error.code in _CUT_SHORT:
                raise TruncatedError(
                    "a report ends where its XML does",
                    where=str(self.path),
                    equation=f"{expat.ErrorString(error.code)} at {place}",
                    hint="the run that wrote it was killed: run it again, or name the report of a whole run",
                ) from None
            raise _error(self.path, f"{expat.ErrorString(error.code)} at {place}") from None
        except (LookupError, UnicodeError, ValueError) as error:
            if isinstance(error, FormatError):
                raise
            raise _error(self.path, f"encoding is unknown: {error}") from None

    def _refuse(self, *_: object) -> int:
        raise _error(
            self.path, "<!DOCTYPE> is there", rule="a report declares no document type and no entity"
        )

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._stack and tag not in ("testsuites", "testsuite"):
            raise _error(self.path, f"root is <{tag[:40]}>, not <testsuites> or <testsuite>")
        if len(self._stack) >= _MOST_DEPTH:
            raise _error(self.path, f"depth > {_MOST_DEPTH}", rule="a report has a bounded depth")
        self._stack.append(tag)
        if tag == "testcase":
            if self._test is not None:
                raise _error(self.path, "<testcase> inside <testcase>")
            if "name" not in attributes:
                raise _error(self.path, "<testcase> has no name")
            self._test = attributes.get("classname", ""), attributes["name"]
            said = {attributes.get(name, "").lower() for name in ("status", "result")}
            self._worst = (Outcome.SKIPPED if said & _NOT_RUN else Outcome.PASSED), ""
        elif self._test is not None and len(self._stack) >= 2 and self._stack[-2] == "testcase":
            if tag in _BAD:
                self._result = _BAD[tag], attributes.get("message", "")
            elif tag == "skipped":
                expected = attributes.get("type", "") == "pytest.xfail"
                self._result = (Outcome.XFAILED if expected else Outcome.SKIPPED), ""
            elif tag not in _NO_RESULT:
                raise _error(self.path, f"<testcase> holds <{tag[:40]}>, which is no known result")
            self._text, self._held = [], 0

    def _characters(self, text: str) -> None:
        if self._result is not None:
            self._text.append(text)
            self._held += len(text)
            if self._held > 2 * _MOST_TEXT:
                kept = "".join(self._text)[-_MOST_TEXT:]
                self._text, self._held = [kept], len(kept)

    def _end(self, tag: str) -> None:
        self._stack.pop()
        if self._result is not None and self._stack and self._stack[-1] == "testcase":
            outcome, message = self._result
            self._result = None
            if outcome in _BAD.values():
                whole = "".join(self._text)
                if not message or message.startswith(_SAYS_NOTHING):
                    message = message_in(whole) or message
                outcome = outcome_of(outcome, message)
                message = signature_of(message)
            if outcome > self._worst[0]:
                self._worst = outcome, message
        elif tag == "testcase" and self._test is not None:
            self._close(*self._test)
            self._test = None

    def _close(self, classname: str, name: str) -> None:
        if len(self.found) >= _MOST_TESTS:
            raise _error(self.path, f"tests > {_MOST_TESTS}", rule="a report has a bounded number of tests")
        made = Observation(f"{classname}::{name}" if classname else name, *self._worst)
        if made.outcome is Outcome.ERROR and not classname:
            # pytest writes a module or folder that it could not collect as a test without a class.
            self.uncollected.append(made.key)
        self.found.append(made if made.id else Observation("<session>", *self._worst))
