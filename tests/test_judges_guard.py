"""Verifiers' libraries evaluate expressions, and never a program that a model or a row wrote."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("math_verify")

import reasoning_gym
import sympy

from fused_grpo.trainer import judges_math
from fused_grpo.trainer.judges_guard import (
    RefusedExpressionError,
    calculate,
    guard,
)
from fused_grpo.trainer.judges_gym import environment_score
from fused_grpo.trainer.task_options import TaskOptions
from fused_grpo.trainer.tasks import make_task

# environments that evaluate an answer as Python, or by sympy
EVALUATING = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
    *("puzzle24", "countdown", "bitwise_arithmetic"),
)


def payloads(marker):
    run = f"__import__('os').system('touch {marker}')"
    return [
        run,
        f"[{run}]",
        f"x + {run}",
        f"open('{marker}', 'w')",
        f"exec(\"open('{marker}', 'w')\")",
        f'lambdify([], "{run}")()',
        f'sin("{run}")',
        f'sympify("{run}")',
        f"(lambda: open('{marker}', 'w'))()",
        f"[open('{marker}', 'w') for _ in '1']",
        f"Symbol.__class__.__base__.__subclasses__() or {run}",
        f"getattr(Symbol, 'mro')() and {run}",
    ]


@pytest.fixture
def marker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "marker"


@pytest.mark.parametrize("environment", EVALUATING)
def test_no_answer_to_an_environment_is_run(environment, marker):
    entry = reasoning_gym.create_dataset(environment, seed=1, size=1)[0]
    for payload in payloads(marker):
        assert environment_score(environment, "{}", payload, entry) < 0.1, payload
        assert not marker.exists(), payload
    assert not list(marker.parent.iterdir())


@pytest.mark.parametrize("environment", EVALUATING)
def test_right_answers_are_still_right(environment):
    data = reasoning_gym.create_dataset(environment, seed=3, size=5)
    for i in range(5):
        entry = data[i]
        assert environment_score(environment, "{}", entry["answer"], entry) == 1.0


def test_what_the_judges_evaluated_still_counts():
    """n_queens gives half the reward for a board as a list, an integral in any form is right."""
    entry = reasoning_gym.create_dataset("n_queens", seed=1, size=1)[0]
    board = [row.split() for row in entry["metadata"]["valid_answers"][0].splitlines()]
    assert environment_score("n_queens", "{}", repr(board), entry) == 0.5
    entry = reasoning_gym.create_dataset("simple_integration", seed=1, size=1)[0]
    x = sympy.Symbol(entry["metadata"]["variable"])
    other = sympy.integrate(sympy.sympify(entry["metadata"]["integrand"]), x)
    assert (
        environment_score("simple_integration", "{}", f"{sympy.expand(other)} + C + 0", entry) == 1
    )


@pytest.mark.parametrize(
    "form", ["{}", "${}$", r"\boxed{{{}}}", "The answer is {}", r"$\text{{{}}}$"]
)
def test_no_answer_in_mathematics_is_run(form, marker):
    for payload in payloads(marker):
        assert judges_math.mathematics(form.format(payload), "7") == 0.0
        with contextlib.suppress(ValueError):  # no mathematics
            judges_math.mathematics("7", form.format(payload))
        assert not marker.exists(), payload
    assert not list(marker.parent.iterdir())


@pytest.mark.parametrize("evaluate", [True, False])
def test_the_parser_itself_runs_nothing(evaluate, marker):
    guard()
    for payload in payloads(marker):
        with pytest.raises((RefusedExpressionError, SyntaxError, sympy.SympifyError)):
            sympy.parse_expr(payload, evaluate=evaluate)
        assert not marker.exists(), payload


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1/3 + 2*x", sympy.Rational(1, 3) + 2 * sympy.Symbol("x")),
        ("sqrt(2)*exp(-x)/2", sympy.sqrt(2) * sympy.exp(-sympy.Symbol("x")) / 2),
        ("sin(pi/2) + max(1, 2)", sympy.Integer(3)),
        ("f(x)", sympy.Function("f")(sympy.Symbol("x"))),
        ("integrate(x, x)", sympy.Symbol("x") ** 2 / 2),
        ("abs(-1.5)", sympy.Float(1.5)),
    ],
)
def test_the_parser_still_reads_mathematics(text, expected):
    guard()
    guard()  # the second time, nothing is wrapped once more
    assert sympy.parse_expr(text) == expected
    assert sympy.simplify(sympy.parse_expr(text, evaluate=False) - expected) == 0


def test_calculations():
    assert calculate(" [[1, 0], [-1, 2]] ") == [[1, 0], [-1, 2]]
    assert calculate("0x1f & ~3 << 2") == 0x1F & ~3 << 2
    assert calculate("('a', {'b': 1.5}, None)") == ("a", {"b": 1.5}, None)
    for text in ("a", "f()", "[].append", "[x for x in ()]", "lambda: 0", "f'{1}'", "(a := 1)"):
        with pytest.raises(RefusedExpressionError):
            calculate(text)


def test_the_judge_of_a_task_runs_nothing_in_its_own_process(marker):
    """The whole way, as a run takes it: task, worker, environment."""
    task = make_task(
        "reasoning-gym:n_queens", TaskOptions(train_rows=1, held_out=1, answer_from="whole")
    )
    row = task.train[0]
    text = payloads(marker)[0]
    columns = {k: [v] for k, v in row.items() if k != "prompt"}
    assert task.reward(completions=[text], prompts=[row["prompt"]], **columns) == [0.0]
    assert not marker.exists()
    assert not list(marker.parent.iterdir())
