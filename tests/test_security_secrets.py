"""Servers are reached by HTTP alone and believed in nothing; a run tells nobody a secret."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import pickle
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from trainer_runs import config, trainer

from fused_grpo.trainer.completions import table
from fused_grpo.trainer.rollouts.http import Http, RefusedError
from fused_grpo.trainer.sample import RolloutError
from fused_grpo.trainer.secrecy import (
    check_url,
    command_without_secrets,
    is_secret,
    printable,
    without_secrets,
)

SECRET = "hunter2-hunter2"

# ---- servers -------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """Answers by the path."""

    elsewhere = ""

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(int(self.path[-3:]))
            self.send_header("Location", self.elsewhere)
            self.end_headers()
            return
        status, kind, body = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


ANSWERS = {
    "/small": (200, "application/json", b'{"a": 1}'),
    "/large": (200, "application/json", b'"' + b"x" * 5000 + b'"'),
    "/deep": (200, "application/json", b"[" * 200_000),
    "/python": (200, "application/json", b"__import__('os').getpid()"),
    "/pickle": (200, "application/json", pickle.dumps({"a": 1})),
    "/escape": (400, "text/plain", b"\x1b[2J\x1b]0;title\x07 no"),
}


@pytest.fixture
def server():
    found = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def http(url: str, **options: Any) -> Http:
    return Http(url, **{"timeout": 20.0, "retries": 1, "wait": 0.01, **options})


BAD_URLS = [
    *("file:///etc/passwd", "ftp://host/x", "data:application/json,{}", "gopher://host", "host:80"),
    *("http://", "http:///x", "//host", "", "http://host:port", "http://host/?token=x"),
    *("http://host/#x", "http://ho st", "http://host\r\nX-Injected: 1", "jar:http://host"),
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_only_urls_of_http(url, tmp_path):
    with pytest.raises(ValueError, match="base_url"):
        Http(url)
    for options in ({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url},):
        with pytest.raises(ValueError, match="vllm_server_base_url"):
            config(tmp_path, **options)
    with pytest.raises(ValueError, match="sglang_server_base_url"):
        config(tmp_path, sglang_server_base_url=url)


@pytest.mark.parametrize("url", ["http://host:8000", "https://host/path", "http://[::1]:80"])
def test_urls_that_fit(url):
    check_url("base_url", url)


def test_a_password_in_a_url_is_refused_and_not_shown(tmp_path):
    url = f"http://user:{SECRET}@host:8000"
    for make in (lambda: Http(url), lambda: config(tmp_path, sglang_server_base_url=url)):
        with pytest.raises(ValueError, match="user name or a password") as error:
            make()
        assert SECRET not in str(error.value)
        assert error.value.__cause__ is None


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("elsewhere", ["file:///etc/hostname", "ftp://127.0.0.1/x", "own"])
def test_no_server_sends_a_run_elsewhere(server, monkeypatch, status, elsewhere):
    monkeypatch.setattr(
        Answers, "elsewhere", f"{server}/small" if elsewhere == "own" else elsewhere
    )
    for ask in (http(server).get, http(server).post):
        with pytest.raises(RefusedError, match=f"status {status}"):
            ask(f"/to/{status}")


def test_an_answer_has_a_size(server):
    assert http(server).get("/large") == "x" * 5000
    with pytest.raises(RolloutError, match="more than 4,000 bytes"):
        http(server, max_bytes=4000).get("/large")
    assert http(server, max_bytes=8).get("/small") == {"a": 1}


@pytest.mark.parametrize("path", ["/deep", "/python", "/pickle"])
def test_an_answer_is_json_or_an_error(server, path):
    with pytest.raises(RolloutError, match="was tried 2 times"):
        http(server).get(path)


def test_an_answer_does_not_write_to_the_terminal(server):
    with pytest.raises(RefusedError) as error:
        http(server).get("/escape")
    assert "\\x1b[2J" in str(error.value)
    assert str(error.value).isprintable()


def test_a_completion_does_not_write_to_the_terminal():
    text = "\x1b[31mred\x1b[0m\x07\r \x9b2J\u202e\ttab\nline"
    assert printable(text) == "\\x1b[31mred\\x1b[0m\\x07\\r \\x9b2J\\u202e\ttab\nline"
    entry = {
        **{"step": 1, "prompt": text, "completion": text, "rewards": {"r": 1.0}},
        **{"advantage": 0.5, "length": 3, "ended": True},
    }
    shown = table([entry])
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown


# ---- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("hub_token", "--hub_token", "--hub-token", "token", "HF_TOKEN", "api_key", "api-key"),
        *("OPENAI_API_KEY", "apikey", "password", "db_password", "secret", "client_secret"),
        *("aws_secret_access_key", "push_to_hub_token", "use_auth_token", "Authorization"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("num_tokens", "max_tokens", "eos_token", "eos_token_id", "pad_token", "tokenizer", "key"),
        *("include_num_input_tokens_seen", "token_level", "stop_token", "temperature", "passk"),
        *("loss_type", "vllm_max_model_length"),
    ],
)
def test_names_of_what_is_no_secret(name):
    assert not is_secret(name)


def test_values_at_any_depth():
    given = {
        "a": [{"token": SECRET, "n": 1}, (f"https://u:{SECRET}@host/x", None)],
        "api_key": SECRET,
        "token": None,
        "use_auth_token": True,
        "eos_token": "</s>",
    }
    before = copy.deepcopy(given)
    assert without_secrets(given) == {
        "a": [{"token": "<hidden>", "n": 1}, ("https://<hidden>@host/x", None)],
        "api_key": "<hidden>",
        "token": None,
        "use_auth_token": True,
        "eos_token": "</s>",
    }
    assert given == before
    assert without_secrets({"token": SECRET}, None) == {"token": None}


def test_commands():
    given = ["train.py", "--hub_token", SECRET, f"--api-key={SECRET}", f"http://u:{SECRET}@h/x"]
    expected = ["train.py", "--hub_token", "<hidden>", "--api-key=<hidden>", "http://<hidden>@h/x"]
    assert command_without_secrets([*given, "--steps", "3"]) == [*expected, "--steps", "3"]
    assert command_without_secrets(["--token", "--steps", "3"]) == ["--token", "--steps", "3"]


def test_a_config_shows_none_but_keeps_them(tmp_path):
    kwargs = {"token": SECRET, "revision": "main"}
    args = config(tmp_path, hub_token=SECRET, model_init_kwargs=kwargs)
    assert SECRET not in args.to_json_string()
    assert SECRET not in str(args.to_dict())
    assert args.to_dict()["model_init_kwargs"] == {"token": "<hidden>", "revision": "main"}
    assert SECRET.encode() not in pickle.dumps(args)
    assert pickle.loads(pickle.dumps(args)).model_init_kwargs == {"token": None, "revision": "main"}
    for kept in (args, copy.copy(args), copy.deepcopy(args)):
        assert kept.hub_token == SECRET
        assert kept.model_init_kwargs == kwargs
    assert copy.deepcopy(args).model_init_kwargs is not args.model_init_kwargs


def test_nothing_secret_in_what_a_run_writes_or_logs(tmp_path, monkeypatch, caplog, capfd):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SOME_PASSWORD", "UNSUSPICIOUS"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("http_proxy", f"http://user:{SECRET}@127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", SECRET, f"--password={SECRET}"])
    events = importlib.util.find_spec("tensorboard") is not None
    run = trainer(
        tmp_path,
        max_steps=1,
        hub_token=SECRET,
        log_completions=True,
        report_to="tensorboard" if events else "none",
        push_to_hub=False,
    )
    with caplog.at_level(logging.DEBUG):
        run.train()
        run.save_model(str(tmp_path / "model"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"run.json", "training_args.bin", "manifest.json", "metrics.jsonl"} <= names
    assert any(name.startswith("events.out") for name in names) == events
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    out = capfd.readouterr()
    assert SECRET not in caplog.text + out.out + out.err
    command = json.loads((tmp_path / "run.json").read_text())["command"]
    assert command == ["train.py", "--hub_token", "<hidden>", "--password=<hidden>"]
    assert run.args.hub_token == SECRET
