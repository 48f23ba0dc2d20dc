"""One file rewritten: which group is at hand at a read, and the change. Needs libcst."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m
from libcst.metadata import (
    Assignment,
    GlobalScope,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from shardweave.lint.accessors import Accessor, accessor_of
from shardweave.lint.changes import Change
from shardweave.lint.finding import Finding

__all__ = ["Rewritten", "rewrite"]

_UNKNOWN = "what it gives is not known"
_COLLECTIONS = ("pg_collection", "_pg_collection")
_GROUP = re.compile(r"(?:\w+\.)*ProcessGroup", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A file before and after."""

    before: bytes
    after: bytes
    encoding: str
    done: tuple[Finding, ...]
    left: tuple[tuple[Finding, str], ...]
    remarks: tuple[str, ...] = ()


def rewrite(text: bytes, findings: Sequence[Finding], *, review: bool = False) -> Rewritten:
    """Replace the reads of one file that can be replaced; see `shardweave.lint.fix`.

    The result is parsed again before it is given.
    """
    hopeless = {finding: why for finding in findings if (why := _hopeless(finding))}
    if len(hopeless) == len(findings):  # what libcst knows of a file takes it a second
        return Rewritten(text, text, "utf-8", (), tuple((finding, hopeless[finding]) for finding in findings))
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, UnicodeDecodeError, RecursionError) as error:
        why = f"the file is not understood: {str(error).splitlines()[0]}"
        return Rewritten(text, text, "utf-8", (), tuple((finding, why) for finding in findings))
    file = _File(module, findings)
    change = Change()
    done: list[Finding] = []
    left: list[tuple[Finding, str]] = []
    for finding in findings:
        why = hopeless.get(finding) or file.replace(finding, change, review=review)
        if why:
            left.append((finding, why))
        else:
            done.append(finding)
    after = file.module.visit(change).bytes if done else text
    compile(after, "<rewritten>", "exec", dont_inherit=True)
    return Rewritten(text, after, module.encoding, tuple(done), tuple(left), tuple(sorted(file.remarks)))


def _hopeless(finding: Finding) -> str:
    """Why a read stays, whatever is around it; empty where it may go."""
    if finding.kind == "fallback":
        return "a fallback: callers may do without the group"
    return "" if accessor_of(finding, {}) is not None else _UNKNOWN


class _Unsure(Exception):  # noqa: N818 - an answer, and no error
    """Why a group that is there is not taken."""


class _File:
    """A file, and what is in scope where."""

    def __init__(self, module: cst.Module, findings: Sequence[Finding]) -> None:
        wrapper = MetadataWrapper(module)
        self.module = wrapper.module
        self.scopes = wrapper.resolve(ScopeProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.positions = wrapper.resolve(PositionProvider)
        self.remarks: set[str] = set()
        wanted = {(f.line, f.column, f.end_line, f.end_column): f for f in findings}
        self.calls: dict[Finding, cst.Call] = {}
        self.reads: dict[cst.Call, Finding] = {}
        for call in self._calls(self.module):
            found = wanted.get(self._place(call.func))
            if found is not None:
                self.calls[found], self.reads[call] = call, found

    def _place(self, node: cst.CSTNode) -> tuple[int, int, int, int]:
        at = self.positions[node]
        return at.start.line, at.start.column + 1, at.end.line, at.end.column + 1

    @staticmethod
    def _calls(node: cst.CSTNode) -> Iterator[cst.Call]:
        for found in m.findall(node, m.Call()):
            assert isinstance(found, cst.Call)
            yield found

    def code(self, node: cst.CSTNode) -> str:
        """A node as text."""
        return self.module.code_for_node(node).strip()

    def accessor(self, call: cst.Call) -> Accessor | None:
        """What a read gives."""
        arguments: dict[str, str] = {}
        for number, argument in enumerate(call.args):
            if argument.star:
                return None
            key = argument.keyword.value if argument.keyword is not None else str(number)
            arguments[key] = self.code(argument.value)
        return accessor_of(self.reads[call], arguments)

    # --- one read -------------------------------------------------------------------------------

    def replace(self, finding: Finding, change: Change, *, review: bool) -> str:
        """Note the change of one read; why there is none, else nothing."""
        call = self.calls.get(finding)
        if call is None:
            return "it is not called here"
        accessor = self.accessor(call)
        if accessor is None:
            return _UNKNOWN
        distributed = self.distributed(call)
        if accessor.part == "src_rank" and not distributed:
            return "torch.distributed is not imported by the module"
        try:
            group = self.at_hand(call, accessor)
        except _Unsure as unsure:
            if not review:
                return str(unsure)
            group = self.added(call, accessor, change)
            if not group:
                return str(unsure)
        change.calls[call] = accessor.of(group, distributed=distributed)
        return ""

    def at_hand(self, call: cst.Call, accessor: Accessor) -> str:
        """The group as an expression at a read.

        Raises:
            _Unsure: There is none, or it may be unset.
        """
        doubts: list[str] = []
        for function, body_child in self.around(call):
            for param in _params(function):
                name = param.name.value
                if name not in accessor.names or not self.is_param(call, name, param):
                    continue
                if self.is_set(function, param, before=body_child):
                    return name
                doubts.append(f"argument {name} of {function.name.value} may be None")
            owner, own = self.method_of(function)
            if owner is not None and own is not None and self.is_param(call, own.name.value, own):
                try:
                    return f"{own.name.value}.{self.held(owner, function, body_child, accessor)}"
                except _Unsure as unsure:
                    doubts.append(str(unsure))
        raise _Unsure(next(filter(None, doubts), "no group is at hand"))

    def around(self, node: cst.CSTNode) -> Iterator[tuple[cst.FunctionDef, cst.CSTNode]]:
        """The functions in whose bodies a node is, inner ones first, each with its statement of it."""
        below: cst.CSTNode = node
        child: cst.CSTNode = node
        while (parent := self.parents.get(child)) is not None:
            if isinstance(parent, cst.FunctionDef) and parent.body is child:
                yield parent, below
            below, child = child, parent

    def is_param(self, at: cst.CSTNode, name: str, param: cst.Param) -> bool:
        """Whether a name is that parameter there, and nothing else ever."""
        found = self.lookup(at, name)
        return len(found) == 1 and isinstance(found[0], Assignment) and found[0].node is param

    def lookup(self, at: cst.CSTNode, name: str) -> list[object]:
        """What a name is bound to at a node."""
        scope: Scope | None = self.scopes.get(at)
        return list(scope[name]) if scope is not None else []

    def distributed(self, at: cst.CSTNode) -> str:
        """How the module says ``torch.distributed`` there; empty where it does not."""
        for statement in self.module.body:
            if not isinstance(statement, cst.SimpleStatementLine):
                continue
            for part in statement.body:
                for root, text in _imports(part):
                    bound = self.lookup(at, root)
                    if bound and all(
                        isinstance(one, ImportAssignment) and isinstance(one.scope, GlobalScope)
                        for one in bound
                    ):
                        return text
        return ""

    # --- arguments and fields -------------------------------------------------------------------

    def is_set(self, function: cst.FunctionDef, param: cst.Param, *, before: cst.CSTNode) -> bool:
        """Whether an argument is a group by its type, or is tested before a statement."""
        if param.annotation is not None and param.default is None:
            kind = self.code(param.annotation.annotation).strip("\"'")
            if _GROUP.fullmatch(kind):
                return True
        for statement in function.body.body:
            if statement is before:
                return False
            if self.tests(statement, param.name.value):
                return True
        return False

    def tests(self, statement: cst.CSTNode, text: str) -> bool:
        """Whether a statement stops where an expression is None."""
        if isinstance(statement, cst.SimpleStatementLine):
            return any(
                isinstance(part, cst.Assert) and self.code(part.test).strip("()") == f"{text} is not None"
                for part in statement.body
            )
        if isinstance(statement, cst.If) and self.code(statement.test).strip("()") == f"{text} is None":
            last = statement.body.body[-1] if statement.body.body else None
            return m.matches(last, m.SimpleStatementLine(body=[m.ZeroOrMore(), m.Raise()])) if last else False
        return False

    def method_of(self, function: cst.FunctionDef) -> tuple[cst.ClassDef | None, cst.Param | None]:
        """The class of a method, and its ``self``."""
        block = self.parents.get(function)
        owner = self.parents.get(block) if block is not None else None
        if not isinstance(owner, cst.ClassDef) or owner.body is not block:
            return None, None
        decorators = {self.code(decorator.decorator) for decorator in function.decorators}
        first = (*function.params.posonly_params, *function.params.params)
        if decorators & {"staticmethod", "classmethod"} or not first or function.name.value == "__new__":
            return None, None
        return owner, first[0]

    def init_of(self, owner: cst.ClassDef) -> cst.FunctionDef | None:
        """The one ``__init__`` that a class defines."""
        found = [
            statement
            for statement in owner.body.body
            if isinstance(statement, cst.FunctionDef) and statement.name.value == "__init__"
        ]
        return found[0] if len(found) == 1 and isinstance(found[0].body, cst.IndentedBlock) else None

    def held(self, owner: cst.ClassDef, method: cst.FunctionDef, at: cst.CSTNode, accessor: Accessor) -> str:
        """The field of a class that holds the group whenever a method runs.

        Raises:
            _Unsure: There is none, or it may be unset.
        """
        init = self.init_of(owner)
        _, own = self.method_of(init) if init is not None else (None, None)
        if init is None or own is None:
            raise _Unsure("")
        me = own.name.value
        statements = list(init.body.body)
        for index, statement in enumerate(statements):
            name, value = _assigned(statement, me)
            if value is None or name not in accessor.names:
                continue
            where = f"{me}.{name}"
            if self.times_set(owner, name) != 1:
                raise _Unsure(f"{where} is set in several places")
            if any(m.findall(earlier, m.Return()) for earlier in statements[:index]):
                raise _Unsure(f"{where} is not set on every path of __init__")
            if method is init and at not in statements[index + 1 :]:
                raise _Unsure("" if at is statement else f"{where} is not set yet")
            own_call = m.Call(func=m.Attribute(value=m.Name(me)))
            if method is not init and any(m.findall(earlier, own_call) for earlier in statements[:index]):
                raise _Unsure(f"{where} is set after __init__ calls methods")
            checked = any(self.tests(later, where) for later in statements[index + 1 :])
            if not (checked and _last_name(value) in accessor.names) and not self.is_group(
                init, statement, value, accessor
            ):
                raise _Unsure(f"{where} may be None")
            return name
        raise _Unsure("")

    def is_group(
        self, init: cst.FunctionDef, statement: cst.CSTNode, value: cst.BaseExpression, accessor: Accessor
    ) -> bool:
        """Whether what a field is set to is that group for certain."""
        if isinstance(value, cst.Name) and value.value in accessor.names:
            return any(
                param.name.value == value.value
                and self.is_param(value, value.value, param)
                and self.is_set(init, param, before=statement)
                for param in _params(init)
            )
        if isinstance(value, cst.Call) and value in self.reads:
            read = self.accessor(value)
            return read is not None and read.part == "group" and read.names == accessor.names
        if isinstance(value, cst.Attribute) and value.attr.value in accessor.names:
            text = self.code(value)
            for earlier in init.body.body:
                if earlier is statement:
                    break
                if self.tests(earlier, text):
                    return True
        return False

    def times_set(self, owner: cst.ClassDef, name: str) -> int:
        """How often a class binds a field of that name, of whatever object."""
        stored = sum(self.is_stored(found) for found in m.findall(owner, m.Attribute(attr=m.Name(name))))
        return stored + len(m.findall(owner, m.Call(func=m.Name("setattr"))))

    def is_stored(self, node: cst.CSTNode) -> bool:
        """Whether an attribute is bound or deleted, and not read."""
        parent = self.parents.get(node)
        while isinstance(parent, cst.Element | cst.StarredElement | cst.Tuple | cst.List):
            node, parent = parent, self.parents.get(parent)
        if isinstance(parent, cst.AssignTarget | cst.Del | cst.AsName):
            return True
        targets = cst.AnnAssign | cst.AugAssign | cst.For | cst.CompFor
        return isinstance(parent, targets) and parent.target is node

    # --- changes to look through ----------------------------------------------------------------

    def added(self, call: cst.Call, accessor: Accessor, change: Change) -> str:
        """The group as an expression, with whatever has to be added for it; empty where it cannot be."""
        function = next((found for found, _ in self.around(call)), None)
        if function is None or not isinstance(function.body, cst.IndentedBlock):
            return ""
        for param in _params(function):
            if self.is_collection(param) and self.is_param(call, param.name.value, param):
                return self.remarked(f"{param.name.value}.{accessor.field}", called=function.name.value)
        owner, own = self.method_of(function)
        if owner is not None and own is not None and function.name.value != "__init__":
            init = self.init_of(owner)
            for name in _COLLECTIONS if self.is_param(call, own.name.value, own) else ():
                for holder in (owner, *self.bases(owner)):
                    if self.times_set(holder, name) == 1:
                        where = f"{own.name.value}.{name}.{accessor.field}"
                        return self.remarked(where, called=owner.name.value)
            _, its_own = self.method_of(init) if init is not None else (None, None)
            if init is None or its_own is None or not self.is_param(call, own.name.value, own):
                return ""
            known = [name for name in sorted(accessor.names) if self.times_set(owner, name)]
            name = known[0] if known else accessor.name
            if known:
                self.remarked(f"{own.name.value}.{name}", called=owner.name.value)
            else:
                taken = self.parameter(init, accessor, change, called=owner.name.value)
                change.fields.setdefault(init, {})[f"{its_own.name.value}.{name}"] = taken
            return f"{own.name.value}.{name}"
        if _is_bound(function):
            return ""
        called = owner.name.value if owner is not None else function.name.value
        return self.parameter(function, accessor, change, called=called)

    def bases(self, owner: cst.ClassDef) -> list[cst.ClassDef]:
        """The classes of this file that a class inherits from, near ones first."""
        found: list[cst.ClassDef] = []
        waiting = [owner]
        while waiting:
            for base in waiting.pop(0).bases:
                bound = self.lookup(owner, base.value.value) if isinstance(base.value, cst.Name) else []
                node = bound[0].node if len(bound) == 1 and isinstance(bound[0], Assignment) else None
                if isinstance(node, cst.ClassDef) and node is not owner and node not in found:
                    found.append(node)
                    waiting.append(node)
        return found

    def is_collection(self, param: cst.Param) -> bool:
        """Whether an argument is a collection of groups."""
        kind = "" if param.annotation is None else self.code(param.annotation.annotation)
        return param.name.value in _COLLECTIONS or "ProcessGroupCollection" in kind

    def remarked(self, group: str, *, called: str) -> str:
        """A group that is there, with the remark that it has to be one."""
        self.remarks.add(f"{group} in {called} has to be a group, and never None")
        return group

    def parameter(self, function: cst.FunctionDef, accessor: Accessor, change: Change, *, called: str) -> str:
        """The name of a parameter for a group: one that is there, or a new one, to be given by name."""
        for param in _params(function):
            if param.name.value in accessor.names:
                self.remarks.add(f"callers of {called} have to give {param.name.value}, and never None")
                return param.name.value
        distributed = self.distributed(function)
        kind = f"{distributed}.ProcessGroup" if distributed else ""
        change.parameters.setdefault(function, {})[accessor.name] = kind
        self.remarks.add(f"callers of {called} have to give {accessor.name}")
        return accessor.name


def _params(function: cst.FunctionDef) -> list[cst.Param]:
    params = function.params
    return [*params.posonly_params, *params.params, *params.kwonly_params]


def _last_name(value: cst.BaseExpression) -> str:
    if isinstance(value, cst.Attribute):
        return value.attr.value
    return value.value if isinstance(value, cst.Name) else ""


def _assigned(statement: cst.CSTNode, me: str) -> tuple[str, cst.BaseExpression | None]:
    """The field and the value of ``self.field = value``."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return "", None
    part = statement.body[0]
    if isinstance(part, cst.Assign) and len(part.targets) == 1:
        target: cst.BaseExpression = part.targets[0].target
        value: cst.BaseExpression | None = part.value
    elif isinstance(part, cst.AnnAssign):
        target, value = part.target, part.value
    else:
        return "", None
    if isinstance(target, cst.Attribute) and m.matches(target.value, m.Name(me)):
        return target.attr.value, value
    return "", None


def _imports(part: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """Names that an import binds and what ``torch.distributed`` is by them."""
    if isinstance(part, cst.Import):
        for alias in part.names:
            dotted = alias.evaluated_name
            short = alias.evaluated_alias
            if dotted == "torch.distributed" and short is not None:
                yield short, short
            elif dotted in ("torch", "torch.distributed"):
                yield short or "torch", f"{short or 'torch'}.distributed"
    elif isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
        is_torch = not part.relative and part.module is not None and m.matches(part.module, m.Name("torch"))
        for alias in part.names if is_torch else ():
            if alias.evaluated_name == "distributed":
                short = alias.evaluated_alias or "distributed"
                yield short, short


def _is_bound(function: cst.FunctionDef) -> bool:
    """Whether somebody else decides what a function is given."""
    name = function.name.value
    first = [param.name.value for param in _params(function)][:1]
    return (name.startswith("__") and name != "__init__") or first == ["ctx"] or bool(function.decorators)
