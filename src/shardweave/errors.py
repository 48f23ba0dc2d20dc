"""Every exception of shardweave, one class for each rule that can be broken.

A message has four parts, in this order, so that it can be read in the log of a thousand ranks:
the rule that broke, where it broke, what was expected and what was found as an equation with
names, and a hint that says what to do. Each class also inherits the builtin that a caller would
catch without knowing shardweave.
"""

from __future__ import annotations


class ShardweaveError(Exception):
    """The root of all errors of this package.

    Args:
        rule: The rule that broke, as what should hold ("the files that an index lists are there").
        where: Tensor, dim, axis, rank, or file and byte offset. May be empty.
        equation: Expected and got, with names and numbers. May be empty.
        hint: What the reader can do now.
    """

    def __init__(self, rule: str, *, where: str = "", equation: str = "", hint: str) -> None:
        self.rule, self.where, self.equation, self.hint = map(_one_line, (rule, where, equation, hint))
        head = ": ".join(part for part in (self.rule, self.where, self.equation) if part)
        super().__init__(f"{head}. hint: {self.hint}")

    @property
    def page(self) -> str:
        """The page of the documentation that explains the error: its usual causes and what to do."""
        return f"docs/errors/{type(self).__name__}.md"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders; the default would call __init__ with the joined text.
        return _rebuild, (type(self), self.rule, self.where, self.equation, self.hint)


def _one_line(text: str) -> str:
    """The text with line breaks, escape sequences and lone surrogates spelled out.

    Parts quote file names, keys and other messages; none of them may forge or break a line of a log.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _rebuild(cls: type[ShardweaveError], rule: str, where: str, equation: str, hint: str) -> ShardweaveError:
    return cls(rule, where=where, equation=equation, hint=hint)


# --- layout -------------------------------------------------------------------------------------


class NotationError(ShardweaveError, ValueError):
    """A text is not the notation of a dim, a box, a mesh or a layout."""


class CutError(ShardweaveError, ValueError):
    """A dim cannot be cut in the asked way: sizes that do not add up, counts that do not divide."""


class MeshError(ShardweaveError, ValueError):
    """Axes, sizes or a rank do not form a mesh, or two factorisations of the ranks disagree."""


class BufferRuleError(ShardweaveError, ValueError):
    """A buffer contradicts itself: its dims, its parts or its storage order do not fit together."""


class GapError(ShardweaveError, ValueError):
    """Some element of a tensor is held by nobody, or needed and never written."""


class OverlapError(ShardweaveError, ValueError):
    """Some element is held or written twice by parties that are not declared replicas."""


class OutsideError(ShardweaveError, IndexError):
    """A piece reaches outside its tensor or its buffer."""


class HolderError(ShardweaveError, ValueError):
    """A plan reads an element from a rank that does not hold it."""


class ReplicaError(ShardweaveError, ValueError):
    """Two holders that are declared replicas hold different bytes."""


class DtypeError(ShardweaveError, TypeError):
    """A dtype is unknown, or a conversion would lose values and was not allowed."""


class TransformError(ShardweaveError, ValueError):
    """Stored values are not the logical ones and the needed transform is not declared."""


# --- models and dialects ------------------------------------------------------------------------


class ModelError(ShardweaveError, ValueError):
    """A model description is incomplete, contradictory, or changes the maths in an unknown way."""


class GeometryError(ShardweaveError, ValueError):
    """A parallel geometry is half given, impossible for the model, or impossible in the dialect."""


class UnknownNameError(ShardweaveError, KeyError):
    """A stored name belongs to no tensor of the model, or a tensor of the model has no stored name."""

    __str__ = Exception.__str__  # KeyError would quote the message


class ProbeError(ShardweaveError, ValueError):
    """A probed partition function does something that no layout describes, or not what was declared."""


class MissingPackageError(ShardweaveError, ImportError):
    """An optional package is needed and not installed."""


# --- plan ---------------------------------------------------------------------------------------


class PlanError(ShardweaveError, ValueError):
    """Two layouts cannot be planned against each other: other tensors, shapes or worlds."""


# --- train --------------------------------------------------------------------------------------


class ConfigError(ShardweaveError, ValueError):
    """A setting of a run is unknown, of another type, or does not fit the others or the model."""


class NonFiniteError(ShardweaveError, ArithmeticError):
    """The loss of a step, or the gradients of many, are infinite or no number."""


# --- move ---------------------------------------------------------------------------------------


class TransportError(ShardweaveError, RuntimeError):
    """A peer of a move is gone, refuses, or reported a failure."""


class TransportTimeoutError(TransportError, TimeoutError):
    """A peer of a move did not do its part within the stated time."""

    __str__ = Exception.__str__


# --- files --------------------------------------------------------------------------------------


class FormatError(ShardweaveError, ValueError):
    """A file or folder is not of a known format, or breaks the format's own rules."""


class TruncatedError(FormatError):
    """A file ends before the bytes that its header or index promises."""


class IndexMismatchError(FormatError, KeyError):
    """An index and the files that it lists contradict each other."""

    __str__ = Exception.__str__


class MissingFileError(ShardweaveError, FileNotFoundError):
    """A file that an index or a format needs is not there."""

    __str__ = Exception.__str__


class PathError(ShardweaveError, PermissionError):
    """A path would leave the folder that it must stay in."""

    __str__ = Exception.__str__


class PickleError(ShardweaveError, ValueError):
    """A pickle wants something outside the allow-list; nothing of it was executed."""


class DigestError(ShardweaveError, ValueError):
    """Bytes do not have the digest that was recorded for them."""


class ExistsError(ShardweaveError, FileExistsError):
    """The destination exists and overwriting it was not asked for."""

    __str__ = Exception.__str__


class JournalError(ShardweaveError, ValueError):
    """A journal belongs to another conversion, or does not match the bytes beside it."""


class AccountingError(ShardweaveError, ValueError):
    """Some byte of the source was neither used, nor a replica, nor padding, nor left out by name."""


class WriteError(ShardweaveError, OSError):
    """The operating system refuses a write: the disk is full, a quota is reached, rights are missing."""

    __str__ = Exception.__str__


class RemoteError(ShardweaveError, OSError):
    """A place at a URL cannot be listed or read: it is out of reach, or does not permit it."""

    __str__ = Exception.__str__
