"""What one revision of git has and another has not.

Both are read out of git's own store into a folder that is gone afterwards: the working tree is neither read
nor touched, and nothing is checked out.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from shardweave.errors import ConfigError, MissingFileError, MissingPackageError, PathError
from shardweave.lint import baseline
from shardweave.lint.files import covers
from shardweave.lint.finding import Report
from shardweave.lint.groups import Options, check

__all__ = ["compare"]

_SECONDS = 120
"""How long git may take for one answer."""
_FILES = (b"100644", b"100755")


def compare(
    revisions: str,
    paths: Iterable[Path],
    *,
    root: Path = Path(),
    options: Options | None = None,
    cache: Path | None = None,
) -> Report:
    """Check two revisions, and tell what one has from what both have.

    Findings are the same where a baseline would count them as the same: lines may move within a function,
    and files may get new names.

    Args:
        revisions: ``BASE..HEAD``, or ``BASE...HEAD`` to compare with where they parted. A side that is left
            out is ``HEAD``.
        paths: Files and folders below `root`, as they are called in either revision.
        root: A folder of the repository.
        options: What to look for, in both.
        cache: As for `check`.

    Returns:
        The findings of the head; those of the base too are known, and what only the base has is absent.

    Raises:
        ConfigError: The revisions are not two, git does not know one, there is no repository, or a path lies
            outside `root`.
        MissingFileError: A path is in neither revision.
        MissingPackageError: Git is not installed.
        PathError: A revision has a path that leaves the repository.
    """
    named = _two(revisions)
    top, prefix = os.fsdecode(_git(root, "rev-parse", "--show-toplevel", "--show-prefix")).split("\n")[:2]
    base, head = (_commit(root, name) for name in named)
    against = named[0]
    if "..." in revisions:
        base = _git(root, "merge-base", base, head, why="the two have no common ancestor").decode().strip()
        against = base[:12]  # the branch itself may have gone on
    below = [_below(path, root) for path in paths]
    trees = [_Tree.read(Path(top), commit) for commit in (base, head)]
    for path in below:
        if not any(tree.has(prefix + path) for tree in trees):
            raise MissingFileError(
                "the code that is checked is there",
                where=path,
                equation=f"found nothing of that name in {' or '.join(named)}",
                hint="name a file or a folder of one of the two",
            )
    reports = []
    with TemporaryDirectory(prefix="shardweave-") as folder:
        for number, tree in enumerate(trees):
            # A package may begin at the top, whose name then is the package's.
            place = Path(folder, str(number), Path(top).name)
            tree.write(place, [prefix + path for path in below])
            there = [place / prefix / path for path in below if (place / prefix / path).exists()]
            reports.append(check(there, root=place / prefix, options=options, cache=cache))
    before, after = reports
    judged = baseline.judge(
        after.findings,
        Counter(finding.key for finding in before.findings),
        is_there=lambda path: trees[1].has(prefix + path),
        never=(),
    )
    return replace(after, known=judged.known, absent=judged.absent, revision=against)


def _two(revisions: str) -> tuple[str, str]:
    base, dots, head = revisions.partition("...")
    if not dots:
        base, dots, head = revisions.partition("..")
    if not dots or ".." in head or head.startswith(".") or not (base or head):
        raise ConfigError(
            "two revisions are compared",
            equation=f"got {revisions!r}, which is not BASE..HEAD",
            hint="write main..HEAD, or main...HEAD to compare with where the branch began",
        )
    return base or "HEAD", head or "HEAD"


def _commit(root: Path, name: str) -> str:
    asked = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return _git(root, *asked, why=f"git knows no revision {name!r}").decode().strip()


def _below(path: Path, root: Path) -> str:
    relative = os.path.relpath(path if path.is_absolute() else root / path, root)
    if relative.startswith(os.pardir):
        raise ConfigError(
            "what is compared lies below the folder of the run",
            where=str(path),
            equation=f"it is {relative} from there",
            hint="run from the top of the repository",
        )
    return "" if relative == "." else relative.replace(os.sep, "/")


def _git(folder: Path, *arguments: str, given: bytes = b"", why: str = "") -> bytes:
    """What git answers; where it fails an error that says why, in its own words by default."""
    environment = os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            input=given,
            capture_output=True,
            timeout=_SECONDS,
        )
    except FileNotFoundError:
        raise MissingPackageError(
            "comparing revisions needs git",
            equation="found no program git",
            hint="install it, or compare with a baseline",
        ) from None
    except subprocess.TimeoutExpired:
        why = f"git {arguments[0]} gave no answer in {_SECONDS} s"
    else:
        if done.returncode == 0:
            return done.stdout
        why = why or done.stderr.decode(errors="replace").strip()
    raise ConfigError(
        "the revisions are in a repository of git",
        where=str(folder.absolute()),
        equation=why,
        hint="run in the repository; a shallow clone lacks old revisions, and git fetch brings them",
    )


@dataclass(frozen=True, slots=True)
class _Tree:
    """The files of a revision, by their paths, and what they are called in git's store."""

    top: Path
    files: Mapping[str, bytes]

    @classmethod
    def read(cls, top: Path, commit: str) -> _Tree:
        files = {}
        for entry in _git(top, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0"):
            if entry:
                about, _, path = entry.partition(b"\t")
                mode, _, name = about.split()
                if mode in _FILES:  # no links, and no repositories inside this one
                    files[os.fsdecode(path)] = name
        return cls(top, files)

    def has(self, path: str) -> bool:
        """Whether there is a file of that path, or one below it."""
        folder = f"{path.rstrip('/')}/" if path else ""
        return path in self.files or any(file.startswith(folder) for file in self.files)

    def write(self, folder: Path, paths: Sequence[str]) -> None:
        """Write the Python files below some paths, and the packages around them."""
        wanted = covers([folder / path for path in paths], root=folder)
        chosen = {
            path: name
            for path, name in self.files.items()
            if path in paths
            or path.rpartition("/")[2] == "__init__.py"
            or (path.endswith(".py") and wanted(path))
        }
        answer = _git(self.top, "cat-file", "--batch", given=b"\n".join([*chosen.values(), b""]))
        folder.mkdir(parents=True)
        at = 0
        for path in chosen:
            parts = PurePosixPath(path).parts
            if ".." in parts or PurePosixPath(path).is_absolute():
                raise PathError(
                    "files of a revision lie in the repository",
                    where=path,
                    equation="it leads out of it",
                    hint="no sound repository has such a file; nothing was read of it",
                )
            end = answer.index(b"\n", at)
            about = answer[at:end].split()
            if about[1:2] != [b"blob"]:
                raise ConfigError(
                    "git has the files of the revisions",
                    where=path,
                    equation=os.fsdecode(answer[at:end]),
                    hint="git fetch brings what a partial clone lacks",
                )
            size = int(about[2])
            place = folder.joinpath(*parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(answer[end + 1 : end + 1 + size])
            at = end + 1 + size + 1
