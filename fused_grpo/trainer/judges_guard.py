"""No programs where libraries of verifiers evaluate what a model or a data set wrote.

sympy's `parse_expr` hands its text to Python's `eval` with all builtins in reach, and environments
of reasoning-gym do so with an answer as it stands. After `guard()` the first evaluates mathematics
only, and the second numbers and containers only.
"""

from __future__ import annotations

import ast
import importlib
import sys
from typing import Any

CALCULATION: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Load),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
MATHEMATICS = (*CALCULATION, ast.Name, ast.Call, ast.keyword, ast.IfExp, ast.Subscript, ast.Slice)
# functions beside sympy's classes; what they do with a text ends in parse_expr again
BUILTINS = {f.__name__: f for f in (abs, bool, divmod, float, int, len, max, min, pow, round, sum)}
FUNCTIONS = (
    *("sqrt", "cbrt", "root", "real_root", "expand", "factor", "simplify", "cancel", "together"),
    *("apart", "diff", "integrate", "limit", "solve", "summation", "product", "gcd", "lcm"),
    *("Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Matrix"),
)


class RefusedExpressionError(ValueError):
    """A text is a program, not an expression."""


def calculate(source: str) -> Any:
    """`eval` for numbers, texts, containers and operators.

    Raises:
        RefusedExpressionError: it holds a name, a call, an attribute or the like.
        SyntaxError: it is no expression.
    """
    tree = _tree(source, CALCULATION)
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def check_mathematics(source: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> None:
    """RefusedExpressionError unless all of a text is sympy's mathematics; SyntaxError."""
    for node in ast.walk(_tree(source, MATHEMATICS)):
        if isinstance(node, ast.Name):
            name = node.id
            found = local_dict.get(name, global_dict.get(name, BUILTINS.get(name)))
            if not _is_mathematics(name, found):
                raise RefusedExpressionError(f"the name {name!r} in an expression")


def guard() -> None:
    """Have libraries in this process evaluate expressions only. May be called any number of times.

    Call it before each judgement: modules of environments are imported when they are first needed.
    """
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    original = parser.stringify_expr
    if not hasattr(original, "guarded"):

        def stringify_expr(s: str, local_dict: Any, global_dict: Any, *rest: Any) -> str:
            """sympy's, which makes the Python that is evaluated next."""
            source: str = original(s, local_dict, global_dict, *rest)
            check_mathematics(source, local_dict, global_dict)
            return source

        vars(stringify_expr)["guarded"] = True
        parser.stringify_expr = stringify_expr
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            vars(module)["eval"] = calculate  # before the builtin one in every function there


def _tree(source: str, nodes: tuple[type[ast.AST], ...]) -> ast.Expression:
    tree = ast.parse(source.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, nodes):
            raise RefusedExpressionError(f"{type(node).__name__} in {source[:80]!r}")
    return tree


def _is_mathematics(name: str, found: Any) -> bool:
    sympy: Any = importlib.import_module("sympy")
    if found is None or name.startswith("_"):
        return False
    if found is BUILTINS.get(name) or (name in FUNCTIONS and found is getattr(sympy, name)):
        return True
    return isinstance(found, sympy.Basic) or (
        isinstance(found, type) and issubclass(found, sympy.Basic)
    )
