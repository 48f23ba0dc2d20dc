"""Findings that the code itself allows: ``# shardweave: allow[CODE] reason``.

The comment stands on a line of the finding, or alone above it. It has a reason, for the reader who
meets it in a year; one that allows nothing any more is a finding of its own.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from shardweave.lint.finding import Finding

__all__ = ["MALFORMED", "UNUSED", "Suppression", "suppressed", "suppressions_in"]

MALFORMED = "SW002"
UNUSED = "SW003"

_HINT = "write # shardweave: allow[CODE] reason"
_WORD = b"shardweave:"
_COMMENT = re.compile(r"#\s*shardweave:\s*(?P<rest>.*)", re.DOTALL)
_FORM = re.compile(r"allow\s*\[(?P<codes>[^\]]*)\]\s*(?P<reason>.*)", re.DOTALL)
_CODE = re.compile(r"SW\d{3}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Suppression:
    """One comment."""

    line: int
    column: int
    end_column: int
    first: int
    last: int
    """The lines that it speaks of: its own; all of a statement where it stands above or at the end of it."""
    codes: tuple[str, ...]
    reason: str
    problem: str = ""
    """Why it allows nothing; empty where it does."""


def suppressions_in(text: bytes) -> list[Suppression]:
    r"""The comments of a file; none where it is no Python.

    >>> suppressions_in(b"f()  # shardweave: allow[SW101] the launcher owns the groups\n")[0].reason
    'the launcher owns the groups'
    >>> suppressions_in(b"f()  # shardweave: allow[SW101]\n")[0].problem
    'a suppression has no reason'
    """
    if _WORD not in text:
        return []
    found: list[Suppression] = []
    waiting: list[tuple[tokenize.TokenInfo, str]] = []  # above a statement, or behind what may be its end
    start = 0  # the line on which the statement began; 0 between statements
    try:
        for token in tokenize.tokenize(io.BytesIO(text).readline):
            if token.type == tokenize.COMMENT:
                if match := _COMMENT.match(token.string):
                    waiting.append((token, match["rest"]))
            elif token.type == tokenize.NEWLINE:
                found += [
                    _made(comment, rest, start or comment.start[0], token.start[0])
                    for comment, rest in waiting
                ]
                waiting, start = [], 0
            elif token.type not in _BLANK:
                begun = start
                start = start or token.start[0]
                if begun:  # the statement goes on, and so the comments in it are of their lines only
                    inside = [pair for pair in waiting if pair[0].start[0] >= start]
                    found += [
                        _made(comment, rest, comment.start[0], comment.start[0]) for comment, rest in inside
                    ]
                    waiting = [pair for pair in waiting if pair[0].start[0] < start]
    except (tokenize.TokenError, SyntaxError, ValueError):
        return []
    found += [_made(comment, rest, comment.start[0], comment.start[0]) for comment, rest in waiting]
    return sorted(found, key=lambda made: (made.line, made.column))


_BLANK = frozenset(
    {
        *(tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


def _made(token: tokenize.TokenInfo, rest: str, first: int, last: int) -> Suppression:
    form = _FORM.fullmatch(rest.rstrip())
    codes = tuple(code.strip() for code in form["codes"].split(",")) if form else ()
    reason = form["reason"].strip(" \t:-") if form else ""
    wrong = [code for code in codes if not _CODE.fullmatch(code)]
    if form is None:
        problem = "a comment for shardweave is not understood"
    elif wrong:
        problem = f"a suppression names no code: {wrong[0]!r}"
    elif not reason:
        problem = "a suppression has no reason"
    else:
        problem = ""
    line, column = token.start
    return Suppression(line, column + 1, token.end[1] + 1, first, last, codes, reason, problem)


def suppressed(
    findings: Iterable[Finding],
    texts: Iterable[tuple[str, bytes]],
    *,
    judged: Callable[[str], bool] = lambda code: True,
) -> tuple[tuple[Finding, ...], int]:
    """What is left of findings after the comments of the code, and how many those allow.

    Args:
        findings: What a check found.
        texts: The path and the content of every file that it looked at.
        judged: Whether this run looks for a code at all; of one that it does not, no comment is unused.

    Returns:
        The findings, sorted, with one for each comment that is malformed or unused; and the number of
        findings that comments allow.
    """
    left = list(findings)
    by_file: dict[str, list[Finding]] = {}
    for finding in left:
        by_file.setdefault(finding.path, []).append(finding)
    allowed: set[Finding] = set()
    told: list[Finding] = []
    for path, text in texts:
        used: set[tuple[Suppression, str]] = set()
        comments = suppressions_in(text)
        valid = [comment for comment in comments if not comment.problem]
        for finding in by_file.get(path, ()) if valid else ():
            for comment in valid:
                if finding.code in comment.codes and _meet(finding, comment):
                    allowed.add(finding)
                    used.add((comment, finding.code))
        told += _told(path, text, comments, used, judged)
    kept = [finding for finding in left if finding not in allowed]
    return tuple(sorted([*kept, *told])), len(left) - len(kept)


def _meet(finding: Finding, comment: Suppression) -> bool:
    return finding.line <= comment.last and comment.first <= finding.end_line


def _told(
    path: str,
    text: bytes,
    comments: Sequence[Suppression],
    used: Set[tuple[Suppression, str]],
    judged: Callable[[str], bool],
) -> Iterator[Finding]:
    """A finding for each comment that is malformed, and for each code that one allows in vain."""
    for comment in comments:
        place = (path, comment.line, comment.column, comment.line, comment.end_column)
        if comment.problem:
            where = _around(text, comment.first)
            yield Finding(*place, MALFORMED, comment.problem, where, "allow", hint=_HINT)
            continue
        for code in comment.codes:
            if (comment, code) not in used and judged(code):
                message = f"nothing on line {comment.first} needs allow[{code}]"
                yield Finding(
                    *place, UNUSED, message, _around(text, comment.first), code, hint="take the comment out"
                )


def _around(text: bytes, line: int) -> str:
    """The function or class around a line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            inside: ast.AST = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "<module>"
    names: list[str] = []
    found = True
    while found:
        found = False
        for node in _within(inside):
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.append(node.name)
                inside, found = node, True
                break
    return ".".join(names) or "<module>"


def _within(node: ast.AST) -> Iterator[ast.stmt | ast.excepthandler]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):
            yield child
        elif isinstance(child, ast.match_case):
            yield from _within(child)
