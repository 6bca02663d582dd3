"""Tasks by name: environments of reasoning-gym, JSON lines, prompts, answers and verifiers."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused_grpo import cli
from fused_grpo.trainer import gym_task, jsonl_task, judges, models, verifiers
from fused_grpo.trainer.prompts import ANSWERS, PromptStyle
from fused_grpo.trainer.task_options import TaskOptions, parse_options
from fused_grpo.trainer.tasks import Task, make_task
from fused_grpo.trainer.verifiers import VerifierReward, make_verifier

# ---- prompts and answers ------------------------------------------------------------------------


def test_prompts_as_text_and_as_conversations() -> None:
    examples = [("2 + 2 =", "4")]
    assert PromptStyle(chat=False)("1 + 1 =", examples) == (
        "Question: 2 + 2 =\nAnswer: 4\n\nQuestion: 1 + 1 =\nAnswer:"
    )
    assert PromptStyle(False, "Add.")("1 + 1 =") == "Add.\n\nQuestion: 1 + 1 =\nAnswer:"
    assert PromptStyle(True, "Add.")("1 + 1 =", examples) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2 + 2 ="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "1 + 1 ="},
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 7 \n8", ("7", "8", None, "8", "7 \n8")),
        ("\n7", (None, "7", None, "7", "7")),
        ("a\n<answer> 1 </answer> <answer>\n2\n</answer>\n", ("a", None, "2", "2", None)),
        ("<answer>1<answer>2</answer>", (None, None, "2", "2", None)),
        ("<answer></answer>\n7", (None, "7", None, None, None)),
        ("<answer>7", (None, "<answer>7", None, "<answer>7", None)),
        (" \n ", (None, None, None, None, None)),
    ],
)
def test_answers_in_completions(text: str, expected: tuple[str | None, ...]) -> None:
    names = ("first-line", "last-line", "tag", "tag-or-last-line", "whole")
    assert set(names) == set(ANSWERS)
    for name, answer in zip(names, expected, strict=True):
        if answer is not None or text.strip() == "" or name.startswith("tag"):
            assert ANSWERS[name](text) == answer, name


# ---- verifiers ----------------------------------------------------------------------------------


def test_exact_and_regex() -> None:
    assert judges.exact(" 7 ", 7) == 1
    assert judges.exact("7.0", 7) == 0
    assert judges.regex(r"answer is (\d+)", "the answer is 12.", "12") == 1
    assert judges.regex(r"answer is (\d+)", "the answer is 13.", "12") == 0
    assert judges.regex(r"(x)?y", "y", "x") == 0
    assert judges.regex(r"^\d+$", "12") == 1
    assert judges.regex(r"^\d+$", "12a") == 0


def test_mathematics() -> None:
    pytest.importorskip("math_verify")
    from fused_grpo.trainer import judges_math

    assert judges_math.mathematics("It is $\\frac{2}{4}$.", "0.5") == 1
    assert judges_math.mathematics("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$") == 1
    assert judges_math.mathematics("so the answer is 12", 12) == 1
    assert judges_math.mathematics("so the answer is 13", 12) == 0
    assert judges_math.mathematics("I do not know", 12) == 0
    with pytest.raises(ValueError, match="no mathematics"):
        judges_math.mathematics("12", "")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("regex:(", "does not compile"),
        ("perfect", "is unknown; it is one of math, exact, regex:PATTERN or module:function"),
        ("no.such.module:f", "no function 'f' in an installed module 'no.such.module'"),
        ("math:pi", "is not a function"),
        ("json:no_such", "no function 'no_such'"),
    ],
)
def test_unknown_verifiers(form: str, message: str) -> None:
    with pytest.raises(ValueError, match="verifier=") as raised:
        make_verifier(form)
    assert message in str(raised.value)


def test_what_hangs_costs_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that backtracks for years, in the middle of a batch."""
    monkeypatch.setattr(verifiers, "TIMEOUT", 3.0)
    name, verifier = make_verifier(r"regex:^(?:a+)+$")
    reward = VerifierReward(name, verifier, ANSWERS["first-line"])
    completions = ["aaa", "a" * 60 + "!", "b", "", "aa"]
    assert reward(completions=completions, answer=[None] * 5) == [1, None, 0, 0, 1]
    assert reward.failures == {"timeout": 1}
    assert reward(completions=["b"], answer=[None]) == [0]
    assert not reward.failures


def test_conversations_and_columns_reach_the_verifier() -> None:
    messages = [[{"role": "assistant", "content": f"so\n{n}"}] for n in (7, 8)]
    reward = VerifierReward("exact", judges.exact, ANSWERS["last-line"])
    assert reward(completions=messages, answer=[7, 7], other=[1, 2]) == [1, 0]
    name, imported = make_verifier("os.path:commonprefix")
    assert (name, imported(["ab", "ac"])) == ("commonprefix", "a")


# ---- reasoning-gym ------------------------------------------------------------------------------


def gym(name: str, **options: Any) -> Task:
    pytest.importorskip("reasoning_gym")
    return make_task(f"reasoning-gym:{name}", TaskOptions(**options))


SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["entry"]["question"] for row in rows]


def test_parts_of_an_environment_share_no_question() -> None:
    task = gym("chain_sum", options=SMALL, held_out=60, train_rows=2048)
    train, held_out = questions(task.train), questions(task.held_out)
    assert len(set(held_out)) == 60
    assert len(set(train)) == len(train)
    assert not set(train) & set(held_out)
    # 10 x 10 sums and differences there are, 64 of which are examples
    assert len(train) + 60 + 64 <= 200
    assert task.dropped > 1000
    shown = {q for row in task.train + task.held_out for q in row["prompt"].split("\n\n")[:-1]}
    assert not any(question in line for line in shown for question in held_out)
    assert all(row["prompt"].count("Answer:") == 3 for row in task.train)
    again = gym("chain_sum", options=SMALL, held_out=60, train_rows=2048)
    assert (again.train, again.held_out) == (task.train, task.held_out)
    other = gym("chain_sum", options=SMALL, held_out=60, task_seed=1)
    assert questions(other.held_out) != held_out


def test_parts_are_drawn_from_seeds_that_do_not_meet() -> None:
    """With seeds 0, 1, 2, as one might think, question i of one part is i - 1 of the next."""
    task = gym("chain_sum", held_out=50, train_rows=100)
    assert task.dropped < 5


def test_an_environment_that_is_too_small_says_so() -> None:
    with pytest.raises(ValueError, match=r"only some \d+ different questions, and 512 are wanted"):
        gym("chain_sum", options=SMALL)


def test_the_environment_scores() -> None:
    task = gym("chain_sum", options=SMALL, held_out=5, train_rows=5)
    answer = task.held_out[0]["answer"]
    columns = {name: [task.held_out[0][name]] * 5 for name in ("answer", "entry", "prompt")}
    completions = [f" {answer}\nmore", f"{answer}.0", f"= {answer}", "no", ""]
    rewards = task.reward(completions=completions, **columns)
    assert rewards[:2] == [1, 1]
    assert 0 < rewards[2] < 1  # the environment's own part marks: not a right answer
    assert rewards[3:] == [0, 0]
    assert task.correct == 1
    assert [task.answer_of(c) for c in completions[:2]] == [answer, f"{answer}.0"]
    assert (task.stop, task.max_completion_length) == ("\n", None)


def test_what_an_environment_cannot_read_is_wrong() -> None:
    """prime_factorization's own judgement raises on a text without numbers."""
    task = gym("prime_factorization", held_out=2, train_rows=2)
    columns = {name: [task.train[0][name]] * 2 for name in ("answer", "entry")}
    assert task.reward(completions=[task.train[0]["answer"], "no idea"], **columns) == [1, 0]


def test_an_environment_as_a_conversation() -> None:
    task = gym("chain_sum", prompt="chat", system_prompt="Think.", held_out=3, train_rows=4)
    first = task.train[0]["prompt"]
    assert [m["role"] for m in first] == ["system", "user"]
    assert task.stop is None
    answer = task.train[0]["answer"]
    completions = [[{"role": "assistant", "content": f"hm\n<answer>{answer}</answer> done"}]]
    columns = {name: [task.train[0][name]] for name in ("answer", "entry")}
    assert task.reward(completions=completions, **columns) == [1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such", {}, "is unknown; reasoning-gym has ab, acre"),
        ("chain_sum", {"options": {"terms": 3}}, "it has allow_negation, max_digits"),
        ("chain_sum", {"options": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ("chain_sum", {"options": {"seed": 3}}, "seed is set by --task-seed"),
        ("chain_sum", {"verifier": "exact"}, "verifier='exact' does not apply to reasoning-gym"),
        ("rush_hour", {"held_out": 3, "train_rows": 3}, "and 0 to show"),
    ],
)
def test_wrong_environments(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"reasoning-gym|task_options") as raised:
        gym(name, **options)
    assert message in str(raised.value)


def test_the_tasks_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    find = verifiers.importlib.util.find_spec
    gone = ("reasoning_gym", "math_verify")
    monkeypatch.setattr(
        verifiers.importlib.util, "find_spec", lambda name: None if name in gone else find(name)
    )
    for use in (lambda: make_task("reasoning-gym:gcd"), lambda: make_verifier("math")):
        with pytest.raises(models.MissingExtraError, match=r"fused-grpo\[tasks\]"):
            use()


# ---- JSON lines ---------------------------------------------------------------------------------


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_rows_are_split_by_a_hash_of_their_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, "level": n % 3} for n in range(400)]
    options = TaskOptions(verifier="exact", held_out_share=0.25)
    task = make_task(write(tmp_path / "sums.jsonl", [*rows, rows[0]]), options)
    assert task.name == "sums"
    assert task.dropped == 1
    assert task.train[0].keys() == {"prompt", "answer", "level"}
    held_out = {row["prompt"] for row in task.held_out}
    assert len(held_out) + len(task.train) == 400
    assert 70 < len(held_out) < 130
    # other rows and their order move nobody to the other side
    fewer = make_task(write(tmp_path / "less.jsonl", rows[300:100:-1]), options)
    present = {row["prompt"] for row in rows[101:301]}
    assert {row["prompt"] for row in fewer.held_out} == held_out & present
    # nor does how the question is asked
    for style in ({"prompt": "chat"}, {"system_prompt": "Add."}, {"prompt": "text"}):
        asked = TaskOptions(verifier="exact", held_out_share=0.25, **style)
        other = make_task(str(tmp_path / "sums.jsonl"), asked)
        assert [row["answer"] for row in other.held_out] == [r["answer"] for r in task.held_out]
    columns = {name: [row[name] for row in task.train[:2]] for name in ("answer", "level")}
    right = [f"well\n{answer}" for answer in columns["answer"]]
    assert task.reward(completions=right, **columns) == [1, 1]
    assert task.reward(completions=["0", "no"], **columns) == [0, 0]


def test_a_file_of_its_own_is_kept_out_of_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"q": str(n), "a": n} for n in range(20)])
    asked = write(tmp_path / "test.jsonl", [{"q": str(n), "a": n} for n in (3, 5, 99, 3)])
    options = TaskOptions(
        verifier="exact", held_out_file=asked, prompt_column="q", answer_column="a"
    )
    task = make_task(train, options)
    assert [row["prompt"] for row in task.held_out] == ["3", "5", "99"]
    assert len(task.train) == 18
    assert task.dropped == 3  # two prompts that are held out, one that is there twice


def test_texts_become_conversations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    path = write(tmp_path / "d.jsonl", [{"prompt": "hi"}, {"prompt": messages, "more": 1}])
    rows = jsonl_task.read_rows(Path(path), TaskOptions(verifier="regex:a", system_prompt="Sing."))
    system = {"role": "system", "content": "Sing."}
    assert [row["prompt"] for row in rows] == [
        [system, {"role": "user", "content": "hi"}],
        [system, *messages],
    ]
    assert [row["more"] for row in rows] == [None, 1]
    rows = jsonl_task.read_rows(Path(path), TaskOptions(verifier="regex:a", prompt="chat"))
    assert rows[0]["prompt"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "answer": 1', "line 3: not JSON"),
        (b"\xff\xfe", "line 3: not UTF-8"),
        (b"[1]", "line 3: a row must be a JSON object, not list"),
        (b'{"prompt": "a"}', "line 3: no 'answer'; its columns are 'prompt'"),
        (b'{"answer": 1}', "line 3: no 'prompt'"),
        (b'{"prompt": "", "answer": 1}', "line 3: the prompt is empty"),
        (b'{"prompt": 5, "answer": 1}', "line 3: a prompt must be text or a list of messages"),
        (b'{"prompt": [{"role": "x", "content": ""}], "answer": 1}', "line 3: a message must be"),
        (b'{"prompt": "a", "answer": 1, "completions": 2}', "line 3: columns ['completions']"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": 1}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3") as raised:
        make_task(str(path), TaskOptions(verifier="exact"))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say with --verifier"),
        ({"verifier": "exact", "shots": 2}, "shots=2 does not apply to a JSON-lines file"),
        ({"verifier": "exact", "held_out_share": 1e-9}, "0 held out"),
        ({"verifier": "exact", "held_out_share": 1.5}, "between 0 and 1"),
        ({"verifier": "exact", "held_out_share": 0.1, "held_out_file": "x"}, "not both"),
        ({"verifier": "exact", "answer_from": "middle"}, "answer_from='middle' is unknown"),
    ],
)
def test_wrong_options_of_a_file(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": str(n), "answer": 1} for n in range(5)])
    with pytest.raises(ValueError, match=r"verifier|apply|share|held out|answer_from") as raised:
        make_task(path, TaskOptions(**options))
    assert message in str(raised.value)


def test_options_of_environments_are_json_where_they_can_be() -> None:
    words = ["a=3", "b=true", 'c=["+", "-"]', "d=no_space", "e=x=y"]
    assert parse_options(words) == {"a": 3, "b": True, "c": ["+", "-"], "d": "no_space", "e": "x=y"}
    with pytest.raises(ValueError, match="'a' is not KEY=VALUE"):
        parse_options(["a"])


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "knitting"], "choose one of addition, copying, digits, reasoning-gym:"),
        (["--task", "digits", "--shots", "3"], "shots=3 does not apply to a built-in task"),
        (["--task", "/no/such.jsonl", "--verifier", "exact"], "/no/such.jsonl"),
    ],
)
def test_wrong_tasks_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--model", "tiny", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_tokenizer_without_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": str(n), "answer": 1} for n in range(50)])
    words = f"train --model tiny --steps 1 --verifier exact --prompt chat --task {path}".split()
    assert cli.main([*words, "--output-dir", str(tmp_path / "run")]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_training_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Digits are learnt by a pattern too, and the change of pass@1 is reported."""
    rows = [{"prompt": "".join(letters)} for letters in itertools.combinations("abcdefgh", 4)]
    path = write(tmp_path / "d.jsonl", rows)
    words = ["--task", path, "--verifier", "regex:^[0-9]", "--held-out-share", "0.2"]
    words += ["--steps", "15", "--max_completion_length", "4"]
    words += ["--output-dir", str(tmp_path / "run")]
    assert cli.main(["train", "--model", "tiny", *words]) == 0
    printed = capsys.readouterr().out
    pattern = r"pass@1 .*: (\S+) -> (\S+), difference (\S+), 95% interval \[(\S+), "
    change = re.search(pattern, printed)
    assert change is not None, printed
    before, after, difference, low = map(float, change.groups())
    assert difference == pytest.approx(after - before, abs=2e-3)
    assert 0 < low <= difference
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert len(found["rewards"]["before"]) == len(found["rewards"]["after"])
    assert found["pass@1"]["difference"]["low"] == pytest.approx(low, abs=6e-4)
    assert sum(found["rewards"]["after"]) / len(found["rewards"]["after"]) == pytest.approx(
        after, abs=6e-4
    )


def test_the_longest_answer_is_measured_in_tokens() -> None:
    from fused_grpo.trainer import demo

    task = gym("chain_sum", held_out=5, train_rows=50)
    longest = max(len(row["answer"]) for row in task.train + task.held_out)
    tokenizer = models.character_tokenizer()
    assert demo.completion_length(task, tokenizer) == longest + 2  # a blank and the end
    several = gym("chain_sum", held_out=5, train_rows=5, answer_from="whole")
    assert demo.completion_length(several, tokenizer) == gym_task.LONGEST


def test_a_verifiers_process_needs_no_transformers() -> None:
    code = "import sys, fused_grpo.trainer.judges\nassert 'transformers' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
