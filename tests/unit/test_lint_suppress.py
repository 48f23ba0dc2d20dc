"""Findings that the code allows by a comment: reasons are needed, and unused comments are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardweave.lint.finding import Finding
from shardweave.lint.groups import Options, check
from shardweave.lint.suppress import suppressed, suppressions_in

HEAD = "from megatron.core import parallel_state as ps\n\n"
READ = "ps.get_tensor_model_parallel_group()"


def found(tmp_path: Path, body: str, *, options: Options | None = None) -> list[tuple[str, int, str]]:
    (tmp_path / "a.py").write_text(HEAD + body)
    report = check([tmp_path], root=tmp_path, options=options)
    return [(finding.code, finding.line, finding.qualname) for finding in report.findings]


@pytest.mark.parametrize(
    "body",
    [
        f"{READ}  # shardweave: allow[SW101] owns them\n",
        f"# shardweave: allow[SW101] owns them\n{READ}\n",
        f"# shardweave: allow[SW101] owns them\n# and more words\n\n{READ}\n",
        f"x = f(\n    1,\n    {READ},  # shardweave: allow[SW101] owns them\n)\n",
        f"# shardweave: allow[SW101] owns them\nx = f(\n    1,\n    {READ},\n)\n",
        f"x = f(\n    1,\n    {READ},\n)  # shardweave: allow[SW101] owns them\n",
        f"def f():\n    # shardweave: allow[SW101] owns them\n    return {READ}\n",
        f"{READ}  # shardweave: allow[SW101, SW101] - owns them\n",
        f"{READ}  # noqa: E501  # shardweave: allow[SW101] owns them\n".replace("# noqa: E501  ", ""),
    ],
)
def test_a_comment_allows_a_finding(body: str, tmp_path: Path) -> None:
    assert found(tmp_path, body) == []
    assert found(tmp_path, body.replace("shardweave:", "other:")) != []


@pytest.mark.parametrize(
    ("body", "codes"),
    [
        (f"{READ}  # shardweave: allow[SW101]\n", ["SW002", "SW101"]),
        (f"{READ}  # shardweave: allow[SW101] --\n", ["SW002", "SW101"]),
        (f"{READ}  # shardweave: allow SW101 why\n", ["SW002", "SW101"]),
        (f"{READ}  # shardweave: allow[all] why\n", ["SW002", "SW101"]),
        (f"{READ}  # shardweave: allow[] why\n", ["SW002", "SW101"]),
        (f"{READ}  # shardweave: ignore\n", ["SW002", "SW101"]),
        (f"{READ}  # shardweave: allow[SW102] why\n", ["SW003", "SW101"]),
        (f"{READ}  # shardweave: allow[SW101, SW201] why\n", ["SW003"]),
        ("x = 1  # shardweave: allow[SW101] why\n", ["SW003"]),
        (f"x = 1  # shardweave: allow[SW101] why\n{READ}\n", ["SW003", "SW101"]),
        (f"{READ}\n# shardweave: allow[SW101] why\n", ["SW003", "SW101"]),
        (f"x = f(\n    1,  # shardweave: allow[SW101] why\n    {READ},\n)\n", ["SW003", "SW101"]),
        (f's = "# shardweave: allow[SW101] why"; {READ}\n', ["SW101"]),
        ("x = 1  # shardweave: allow[SW301] of another check\n", []),
    ],
)
def test_a_comment_that_allows_nothing_is_told(body: str, codes: list[str], tmp_path: Path) -> None:
    assert sorted(code for code, _, _ in found(tmp_path, body)) == codes


def test_the_place_of_an_unused_comment(tmp_path: Path) -> None:
    body = "class A:\n    def f(self):\n        if 1:\n            x = 1  # shardweave: allow[SW101] why\n"
    assert found(tmp_path, body) == [("SW003", 6, "A.f")]


def test_codes_that_a_run_does_not_look_for_are_not_unused(tmp_path: Path) -> None:
    body = "x = 1  # shardweave: allow[SW203] the banner of rank 0\n"
    assert found(tmp_path, body) == [], "SW203 is off by default"
    assert [code for code, _, _ in found(tmp_path, body, options=Options(ignore=()))] == ["SW003"]


def test_how_many_are_allowed_is_counted_and_kept(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"{HEAD}{READ}  # shardweave: allow[SW101] owns them\n")
    for _ in range(2):
        report = check([tmp_path / "a.py"], root=tmp_path, cache=tmp_path / "cache")
        assert report.findings == ()
        assert report.stats["allowed_by_comments"] == 1


def test_what_is_no_python_has_no_comments() -> None:
    for text in (
        b"# shardweave: allow[SW101] x\n(",
        b"\xff# shardweave: allow[SW101] x",
        b"# shardweave: \0",
        b"'''",
    ):
        assert len(suppressions_in(text)) <= 1
    finding = Finding("a.py", 1, 1, 1, 2, "SW001", "no Python", "<module>", "")
    left, allowed = suppressed([finding], [("a.py", b"# shardweave: allow[SW001] x\n(")])
    assert (left, allowed) == ((finding,), 0)
