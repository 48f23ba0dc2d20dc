"""A test run from its reports: one file, or a folder with one file for each rank."""

from __future__ import annotations

import re
from pathlib import Path

from shardweave.errors import FormatError, MissingFileError, TruncatedError
from shardweave.lint.junit import read_junit
from shardweave.lint.reportlog import read_report_log
from shardweave.lint.results import Part, Run, joined

__all__ = ["rank_of", "read_run"]

_SUFFIXES = (".xml", ".jsonl", ".json", ".log")
_RANK = re.compile(r"rank[-_.=]?(\d+)", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)


def read_run(path: Path, *, name: str = "", killed: bool = False) -> Run:
    """The results of a run.

    Args:
        path: A JUnit XML file or a report log; or a folder of them, one a rank, with the rank as the number
            behind ``rank`` in the file's name, or else as the last number in it.
        name: What the run is called where it is shown; its path by default.
        killed: Whether reports of runs that were killed count for what they say.

    Raises:
        MissingFileError: There is no report.
        TruncatedError: A report breaks off, or a rank between others has none.
        FormatError: A report is of no known format, or two are of one rank.
    """
    if not path.exists():
        raise _missing(path)
    if not path.is_dir():
        return joined(name or str(path), [_read(path, rank=None, killed=killed)])
    files = sorted(
        file for file in path.iterdir() if file.is_file() and file.suffix in _SUFFIXES and file.name[0] != "."
    )
    if not files:
        raise _missing(path)
    ranks = _ranks(files)
    if not killed and len(ranks) > 1:
        _no_gap(path, ranks)
    parts = [_read(file, rank=rank, killed=killed) for file, rank in zip(files, ranks, strict=True)]
    return joined(name or str(path), parts)


def rank_of(stem: str) -> int | None:
    """The rank in the name of a file.

    >>> rank_of("junit-rank12-of-16"), rank_of("base.3"), rank_of("report")
    (12, 3, None)
    """
    if said := _RANK.search(stem):
        return int(said[1])
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def _ranks(files: list[Path]) -> list[int]:
    """The rank of each file; a single file without a number is rank 0."""
    ranks: list[int] = []
    for file in files:
        rank = rank_of(file.stem)
        if rank is None and len(files) == 1:
            rank = 0
        if rank is None or rank in ranks:
            other = "" if rank is None else f" and of {files[ranks.index(rank)].name}"
            raise FormatError(
                "a folder of reports has one file for each rank, with the rank in its name",
                where=str(file),
                equation=f"rank of {file.name}{other} is {'none' if rank is None else rank}",
                hint="name them rank0.xml, rank1.xml, ... and keep nothing else there",
            )
        ranks.append(rank)
    return ranks


def _no_gap(path: Path, ranks: list[int]) -> None:
    """Ranks may be counted from 0 or from 1, but none between is left out."""
    first = min(1, min(ranks))
    absent = [rank for rank in range(first, min(max(ranks), first + 4 * len(ranks)) + 1) if rank not in ranks]
    if absent:
        raise TruncatedError(
            "every rank of a run has a report",
            where=str(path),
            equation=f"ranks({len(ranks)} files, the last of rank {max(ranks)}) without "
            f"{', '.join(map(str, absent[:8]))}",
            hint="the rank was killed: run it again, or give --killed to go by the ranks that are there",
        )


def _missing(path: Path) -> MissingFileError:
    return MissingFileError(
        "a run has a report",
        where=str(path),
        equation=f"files that end in {', '.join(_SUFFIXES)}: 0" if path.is_dir() else "path does not exist",
        hint="write one with pytest --junitxml=FILE, one a rank in a folder of its own",
    )


def _read(path: Path, *, rank: int | None, killed: bool) -> Part:
    """One report, of the format that its first character shows."""
    with path.open("rb") as file:
        head = file.read(4096)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        if killed:
            return Part(path=str(path), observations=(), rank=rank)
        raise TruncatedError(
            "a report is not empty",
            where=str(path),
            equation=f"size({path.stat().st_size})",
            hint="the run that wrote it was killed: run it again, or name the report of a whole run",
        )
    if start.startswith(b"{"):
        return read_report_log(path, rank=rank, killed=killed)
    if start.startswith((b"<", b"\xfe\xff", b"\xff\xfe")):
        return read_junit(path, rank=rank)
    raise FormatError(
        "a report is JUnit XML or a report log of pytest",
        where=str(path),
        equation=f"first bytes are {start[:8]!r}",
        hint="write one with pytest --junitxml=FILE, or with --report-log=FILE of pytest-reportlog",
    )
