"""What rows, completions and checkpoints say is text: never run, resolved or rendered."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import config, crash, trainer

from fused_grpo.checks import imported_function
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.isolation import isolated
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.sample import encode_prompts
from fused_grpo.trainer.task_options import TaskOptions
from fused_grpo.trainer.tasks import make_task

MODULE = "evil_module"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that code would leave; and a module that leaves it when it is imported."""
    path = tmp_path / "marker"
    (tmp_path / f"{MODULE}.py").write_text(
        f"open({str(path)!r}, 'w')\ndef function(*a, **k):\n    return [1.0] * 8\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield path
    assert not path.exists(), "text was run"
    assert MODULE not in sys.modules


def test_the_module_works(tmp_path):
    """Or no test here could fail."""
    (tmp_path / "m.py").write_text("open('marker', 'w')\ndef f(): ...\n")
    code = "from fused_grpo.checks import imported_function as f; f('x', 'm:f')"
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}", "PATH": ""}
    subprocess.run(command, cwd=tmp_path, check=True, env=env, timeout=200)
    assert (tmp_path / "marker").exists()


def texts(marker: Path) -> list[str]:
    python = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    return [
        python,
        f"```python\n{python}\n```",
        f"{MODULE}:function",
        f"$(touch {marker})",
        f"`touch {marker}`; touch {marker} | touch {marker}",
        "{{ 7 * 7 }}{% for x in [1, 2] %}x{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        f"{{{{ cycler.__init__.__globals__.os.popen('touch {marker}').read() }}}}",
        "../../etc/passwd",
        f"file://{marker}",
        "{prompt} {0.__class__} %s %(x)s ${HOME} ~ \\N{DIGIT ONE}",
        f"!!python/object/apply:os.system ['touch {marker}']",
        "cos\nsystem\n(S'touch marker'\ntR.",
    ]


def columns(text: str) -> dict[str, Any]:
    """Names that something here reads where a user gives them."""
    names = (
        *("verifier", "loss_type", "reward_funcs", "reward", "model", "chat_template", "tools"),
        *("documents", "task", "func", "pattern", "environment", "options", "judge", "module"),
        *("__class__", "__reduce__", "template", "output_dir", "path", "trust_remote_code"),
    )
    return dict.fromkeys(names, text)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["exact", "regex:^never$", "math"])
def test_rows_of_a_task_are_texts(tmp_path, marker, verifier):
    """Prompts, answers and columns arrive as they stand, and no verifier runs any of them."""
    if verifier == "math":
        pytest.importorskip("math_verify")
    rows = [{"prompt": f"{i} {t}", "answer": t, **columns(t)} for i, t in enumerate(texts(marker))]
    options = TaskOptions(verifier=verifier, answer_from="whole", held_out_share=0.3)
    task = make_task(str(write(tmp_path / "rows.jsonl", rows)), options)
    known = {row["prompt"]: row for row in rows}
    assert len(task.train) + len(task.held_out) == len(rows)
    for row in [*task.train, *task.held_out]:
        assert row == known[row["prompt"]]
    batch = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    found = task.reward(completions=texts(marker), prompts=list(known), **batch)
    if verifier == "exact":
        assert found == [1.0] * len(rows)
    if verifier.startswith("regex"):
        assert found == [0.0] * len(rows)  # whatever the column "pattern" says
    assert not marker.exists()


def test_rows_train_a_run_as_texts(tmp_path, marker):
    seen: list[str] = []

    def reward(prompts, completions, **given):
        seen.extend(prompts)
        assert all(given["verifier"][i] in prompts[i] for i in range(len(prompts)))
        return [float(len(c)) for c in completions]

    rows = [{"prompt": text, **columns(text)} for text in texts(marker)]
    run = trainer(tmp_path / "run", reward, prompts=rows, max_steps=len(rows) // 2 + 1)
    run.train()
    assert set(seen) <= set(texts(marker))
    assert len(set(seen)) > 6


def test_conversations_are_not_rendered_twice(tmp_path, marker):
    """Jinja in a message is text; the template is the tokenizer's alone."""
    _, tokenizer = tiny(torch.float32)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for text in texts(marker):
        message = {"role": "user", "content": text, "chat_template": "{{ 1 }}", "tools": [text]}
        (ids,) = encode_prompts([[message]], tokenizer, None)
        assert ids == tokenizer(text)["input_ids"]


def test_a_template_of_a_model_is_rendered_in_a_sandbox(marker):
    _, tokenizer = tiny(torch.float32)
    reach = f"{{{{ cycler.__init__.__globals__.os.popen('touch {marker}').read() }}}}"
    for template in (reach, "{{ messages.__class__.__mro__[1].__subclasses__() }}"):
        tokenizer.chat_template = template
        with pytest.raises(Exception, match=r"unsafe|undefined"):
            encode_prompts([[{"role": "user", "content": "x"}]], tokenizer, None)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "[" * 100_000, "1" * 5000])
def test_a_line_of_absurd_depth_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: "):
        make_task(str(path), TaskOptions(verifier="exact"))


def completion_is(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_a_column_named_like_what_was_sampled_is_not_taken_for_it():
    """Data sets with a column "completion" are common: its rewards were those of the data set."""
    judge = isolated(completion_is, timeout=20.0)
    sampled, answers = ["right", "wrong"], ["right", "right"]
    for batch in (
        {"completions": sampled, "completion": answers, "answer": answers},
        {"completion": answers, "prompt": answers, "answer": answers, "completions": sampled},
    ):
        assert judge(**batch) == [1.0, 0.0]


# ---- names of functions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *(f"./{MODULE}.py:function", f"../{MODULE}:function", f".{MODULE}:function", ":function"),
        *(
            "..:f",
            "os",
            "os:",
            "no_such_module:f",
            "os:no_such_function",
            "os:path",
            "os:path.join",
        ),
        *(f"file:///{MODULE}.py:function", "http://host/x.py:f", "os:system()", "os;sys:exit"),
    ],
)
def test_only_functions_of_modules_are_found(name, marker):
    with pytest.raises(ValueError, match="verifier="):
        imported_function("verifier", name)


def test_a_name_that_the_user_gives_is_imported():
    assert imported_function("verifier", "json:dumps") is json.dumps


def test_a_checkpoint_names_no_function(tmp_path, marker):
    """Its stored configuration is compared and shown; this run's own is what counts."""
    run_dir = tmp_path / "run"
    crash(run_dir, 1)
    folder = run_dir / "checkpoint-1"
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    for key in ("loss_type", "rollout", "reward_funcs", "optim", "model_init_kwargs", "verifier"):
        body["run"]["config"][key] = f"{MODULE}:function"
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))
    (run_dir / "run.json").write_text(json.dumps(body["run"]))
    run = trainer(run_dir, max_steps=2)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2
    assert run.args.loss_type == config(tmp_path).loss_type


def test_a_callback_that_a_checkpoint_names_is_not_made(tmp_path, marker):
    """Of those a run has, only callbacks that export a state take it from a checkpoint."""
    outside = tmp_path / "outside"
    run = trainer(tmp_path / "run", restore_callback_states_from_checkpoint=True)
    run.state.stateful_callbacks = {
        "MetricsFile": {"args": {"output_dir": outside}, "attributes": {}},
        f"{MODULE}.Callback": {"args": {}, "attributes": {}},
        "TrainerControl": {"args": {"should_log": True}, "attributes": {}},
    }
    before = list(run.callback_handler.callbacks)
    run._load_callback_state()
    assert run.callback_handler.callbacks == before
    assert run.control.should_log
    assert not outside.exists()


def test_a_model_of_that_name_is_a_path_and_nothing_else(marker):
    for name in (f"{MODULE}:function", f"{MODULE}.function"):
        with pytest.raises((OSError, ValueError)):
            GRPOTrainer(name, len, train_dataset=[{"prompt": "a"}])
