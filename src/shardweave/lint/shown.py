"""Texts from elsewhere as they may stand in a terminal, in Markdown and in the commands of a CI."""

from __future__ import annotations

from shardweave.lint.finding import Report

__all__ = ["allows", "code_span", "one_line"]


def one_line(text: str) -> str:
    r"""A text with line breaks and escape sequences spelled out.

    >>> one_line("a\x1b[31m\nb")
    'a\\x1b[31m\\nb'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def code_span(text: str) -> str:
    """A text as code in Markdown, whatever it holds; it stays in the cell of a table.

    >>> code_span("a|b"), code_span("`x`")
    ('<code>a&#124;b</code>', '`` `x` ``')
    """
    text = one_line(text)
    fence = "`"
    while fence in text:
        fence += "`"
    if "|" in text:
        # A pipe ends a cell even in code, so that it has to be a reference, and those need <code>.
        return _html(text)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def allows(report: Report) -> str:
    """What there may be as much of as there was.

    >>> allows(Report("groups", ())), allows(Report("groups", (), revision="main"))
    ('the baseline allows', 'in main')
    """
    return f"in {one_line(report.revision)}" if report.revision else "the baseline allows"


def _html(text: str) -> str:
    for plain, reference in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(plain, reference)
    return f"<code>{text}</code>"
