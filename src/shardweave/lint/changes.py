"""Changes of a file that were decided, carried out with its formatting kept. Needs libcst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers as m

__all__ = ["Change"]


@dataclass(slots=True)
class Change(cst.CSTTransformer):
    """Calls to replace, parameters to add, statements to put into functions."""

    calls: dict[cst.Call, str] = field(default_factory=dict)
    parameters: dict[cst.FunctionDef, dict[str, str]] = field(default_factory=dict)
    fields: dict[cst.FunctionDef, dict[str, str]] = field(default_factory=dict)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Put an expression in the place of a call; parentheses around it stay."""
        if original_node not in self.calls:
            return updated_node
        made = cst.parse_expression(self.calls[original_node])
        return made.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Add statements and parameters."""
        if original_node in self.fields:
            updated_node = _with_fields(original_node, updated_node, self.fields[original_node])
        if original_node in self.parameters:
            updated_node = _with_parameters(updated_node, self.parameters[original_node])
        return updated_node


def _with_parameters(function: cst.FunctionDef, added: Mapping[str, str]) -> cst.FunctionDef:
    """A function with further keyword-only parameters, in the layout of those that it has."""
    params = function.params
    new = [
        cst.Param(
            cst.Name(name),
            annotation=cst.Annotation(cst.parse_expression(kind)) if kind else None,
            # A parameter that is whole says nothing of its comma.
            comma=cst.MaybeSentinel.DEFAULT,
        )
        for name, kind in added.items()
    ]
    star = params.star_arg
    if not isinstance(star, cst.Param) and not params.kwonly_params:
        star = cst.ParamStar()
    kwonly, positional = list(params.kwonly_params), list(params.params)
    last = kwonly or positional
    if last and isinstance(last[-1].comma, cst.Comma) and params.star_kwarg is None:
        # One parameter a line, with a comma behind the last: the new ones go on so.
        comma = last[-1].comma
        between = last[-2].comma if len(last) > 1 and isinstance(last[-2].comma, cst.Comma) else comma
        last[-1] = last[-1].with_changes(comma=between)
        if isinstance(star, cst.ParamStar) and not params.kwonly_params:
            star = cst.ParamStar(comma=between)
        new = [param.with_changes(comma=between) for param in new[:-1]] + [new[-1].with_changes(comma=comma)]
    elif params.star_kwarg is None:
        # Whatever stands before the closing parenthesis goes on standing there.
        nothing = cst.SimpleWhitespace("")
        if not kwonly and isinstance(star, cst.Param):
            end, star = star.whitespace_after_param, star.with_changes(whitespace_after_param=nothing)
            new[-1] = new[-1].with_changes(whitespace_after_param=end)
        elif last:
            new[-1] = new[-1].with_changes(whitespace_after_param=last[-1].whitespace_after_param)
            last[-1] = last[-1].with_changes(whitespace_after_param=nothing)
    return function.with_changes(
        params=params.with_changes(params=positional, star_arg=star, kwonly_params=[*kwonly, *new])
    )


_SUPER_INIT = m.SimpleStatementLine(
    body=[m.Expr(m.Call(func=m.Attribute(value=m.Call(func=m.Name("super")), attr=m.Name("__init__"))))]
)


def _with_fields(
    original: cst.FunctionDef, function: cst.FunctionDef, added: Mapping[str, str]
) -> cst.FunctionDef:
    """An ``__init__`` that first sets fields, behind its docstring or the call of the base's."""
    body = list(function.body.body)
    at = 1 if original.get_docstring() is not None else 0
    for index, statement in enumerate(body):
        if m.matches(statement, _SUPER_INIT):
            at = index + 1
            break
    body[at:at] = [cst.parse_statement(f"{target} = {value}") for target, value in added.items()]
    return function.with_changes(body=function.body.with_changes(body=body))
