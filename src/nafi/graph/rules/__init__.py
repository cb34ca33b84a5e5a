"""How axes flow through each operation: one small rule per kind of operation.

Hides: the meaning of ATen arguments. Promises: a rule only states what is true of its operation
(these axes are the same, this one is told apart); an operation without a rule, or one that its rule
does not understand, pins everything it touches: a gap costs coverage and never correctness.
"""

from __future__ import annotations

from nafi.graph.atoms import size_of
from nafi.graph.rules import convolutions, layers, lookups, pointwise, products, shapes, spectra
from nafi.graph.rules.calls import (
    KEEPS_STACKS,
    RULES,
    Call,
    Findings,
    Rule,
    UnsupportedError,
    Value,
    rule,
    unknown,
)

__all__ = [
    "KEEPS_STACKS",
    "RULES",
    "Call",
    "Findings",
    "Rule",
    "Value",
    "apply",
    "convolutions",
    "layers",
    "lookups",
    "pointwise",
    "products",
    "rule",
    "shapes",
    "spectra",
]


def apply(call: Call) -> list[Value]:
    """The values that an operation returns, in the order of its results."""
    function = RULES.get(call.op.name)
    if function is None:
        function = pointwise.elementwise if call.op.pointwise else unknown
    try:
        result = function(call)
    except UnsupportedError:
        return unknown(call)
    except Exception as error:  # of whoever wrote the rule; what it has said so far does no harm
        return unknown(call, call.gap(f"the rule for {call.op} fails with {error!r}"))
    values = result if isinstance(result, list) else [result]
    if not all(isinstance(value, Value) for value in values):
        return unknown(call, call.gap(f"the rule for {call.op} returns no Value"))
    shapes = [[size_of(axis) for axis in value.axes] for value in values]
    if shapes != [list(shape) for shape in call.op.shapes]:
        return unknown(call, call.gap(f"the rule for {call.op} returns axes of {shapes}"))
    return values
