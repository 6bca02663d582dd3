"""A server around a small model that speaks as vLLM or SGLang do, and fails when it is told to.

It samples by whole forwards of one row at a time, so that nothing of what it is compared with is
used. `python tests/rollout_server.py PORT_FILE` serves the tiny model from a process of its own.
"""

from __future__ import annotations

import base64
import io
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from fused_grpo.integrations.routing import recording

Fault = Callable[["Handler", str], bool]  # true: it has answered


class Server:
    """Serves on a port of its own from the time it is made until `close`.

    Attributes:
        faults: one is taken off for each request to sample, as long as there are any.
        spoil: changes an answer to a request to sample before it is sent.
        requests: (path, body) of all that came.
        processed: whether log-probabilities have the temperature in them.
        paths: endpoints that exist.
    """

    def __init__(self, model: Any, eos: int, dev_mode: bool = True, moe: bool = False) -> None:
        self.model, self.eos, self.moe = model.eval(), eos, moe
        self.adapters: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.spoil: Callable[[Any], Any] | None = None
        self.requests: list[tuple[str, Any]] = []
        self.processed, self.resets, self.lock = True, True, threading.Lock()
        self.generator = torch.Generator().manual_seed(0)
        self.loaded: list[str] = []
        self.paths = {"/health", "/v1/models", "/v1/completions", "/generate"}
        if dev_mode:
            self.paths |= {"/collective_rpc", "/reset_prefix_cache", "/update_weights_from_disk"}
            self.paths |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
            self.paths |= {"/load_lora_adapter", "/unload_lora_adapter"}
        self.http = _Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"owner": self}))
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def close(self) -> None:
        """No further connection is accepted."""
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def sampled(self, path: str) -> list[Any]:
        return [body for at, body in self.requests if at == path]

    # ---- sampling --------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, prompt: list[int], rules: dict[str, Any], limit: int, top: int) -> Any:
        """(ids, log-probabilities, top log-probabilities of each, finish reason, experts)."""
        ids, logps, tops, reason = list(prompt), [], [], "length"
        temperature, stops = rules["temperature"], rules.get("stop_token_ids") or [self.eos]
        for _ in range(limit):
            raw = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            scores = raw.log_softmax(-1)
            tempered = scores if temperature == 0 else (raw / temperature).log_softmax(-1)
            kept = tempered.clone()
            if rules.get("top_k", 0) > 0:
                kept[kept < kept.topk(rules["top_k"]).values[-1]] = -math.inf
                kept = kept.log_softmax(-1)
            if temperature == 0:
                token = int(scores.argmax())
            else:
                token = int(torch.multinomial(kept.exp(), 1, generator=self.generator))
            reported = kept if self.processed else scores
            logps.append(float(reported[token]))
            best = reported.topk(max(top, 1))
            tops.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            ids.append(token)
            if token in stops:
                reason = "stop"
                break
        experts = None
        if self.moe:
            with recording(self.model) as tape:
                self.model(input_ids=torch.tensor([ids[:-1]]))
            experts = tape.experts(1)[0].numpy().astype(np.uint8)
        return ids[len(prompt) :], logps, tops, reason, experts

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(body.get("n", 1)):
            top = body.get("logprobs") or 0
            ids, logps, tops, reason, experts = self.sample(
                body["prompt"], body, body["max_tokens"], top
            )
            choice = {
                "index": index,
                "finish_reason": reason,
                "token_ids": ids,
                "prompt_token_ids": body["prompt"],
                "logprobs": None
                if body.get("logprobs") is None
                else {
                    "tokens": [f"token_id:{i}" for i in ids],
                    "token_logprobs": logps,
                    "top_logprobs": [{f"token_id:{i}": x for i, x in t.items()} for t in tops],
                },
            }
            if experts is not None:
                buffer = io.BytesIO()
                np.save(buffer, experts)
                choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
            choices.append(choice)
        usage = {"prompt_tokens": len(body["prompt"])}
        return {"choices": choices[::-1], "usage": usage, "model": body["model"]}

    def generate(self, body: dict[str, Any]) -> Any:
        rules = body["sampling_params"]
        out = []
        for _ in range(rules.get("n", 1)):
            ids, logps, tops, reason, _ = self.sample(
                body["input_ids"], rules, rules["max_new_tokens"], body.get("top_logprobs_num", 0)
            )
            meta: dict[str, Any] = {
                "finish_reason": {"type": reason},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [
                    [x, i, None] for x, i in zip(logps, ids, strict=True)
                ]
                meta["output_top_logprobs"] = [[[x, i, None] for i, x in t.items()] for t in tops]
            out.append({"output_ids": ids, "meta_info": meta})
        return out if len(out) > 1 else out[0]

    def load(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.loaded.append(path)

    def load_adapter(self, name: str, path: str) -> None:
        from peft import PeftModel

        assert not self.adapters, "there is room for one"
        if not isinstance(self.model, PeftModel):
            self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name)
        else:
            self.model.load_adapter(path, adapter_name=name)
        self.model.set_adapter(name)
        self.model.eval()
        self.adapters[name] = path

    # ---- endpoints -------------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path in ("/v1/completions", "/generate"):
            out = self.completions(body) if path.startswith("/v1") else self.generate(body)
            return 200, out if self.spoil is None else self.spoil(out)
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path == "/collective_rpc":
            if body.get("method") != "reload_weights":
                return 400, {"detail": "Missing 'method' in request body"}
            self.load(body["kwargs"]["weights_path"])
        elif path == "/update_weights_from_disk":
            if "model_path" not in body:
                return 422, {"detail": "model_path"}
            if not Path(body["model_path"]).exists():
                return 400, {"success": False, "message": "no such folder"}
            self.load(body["model_path"])
            return 200, {"success": True, "message": ""}
        elif path.endswith("/load_lora_adapter"):
            if "lora_name" not in body:
                return 400, {"detail": "lora_name"}
            self.load_adapter(body["lora_name"], body["lora_path"])
            return 200, "Success: LoRA adapter added successfully."
        elif path.endswith("/unload_lora_adapter"):
            self.adapters.pop(body["lora_name"])
            self.model = self.model.unload()
        elif path == "/reset_prefix_cache":
            return 200, {"success": self.resets}
        return 200, None


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Of clients that have gone: what is printed is for the run's own words."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    owner: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null"))

    def _handle(self, body: Any) -> None:
        owner, path = self.owner, self.path.split("?")[0]
        with owner.lock:
            owner.requests.append((self.path, body))
            if path not in owner.paths:
                return self.send(404, {"detail": "Not Found"})
            sampling = path in ("/v1/completions", "/generate")
            fault = owner.faults.pop(0) if sampling and owner.faults else None
            done = None if fault else owner.answer(path, body)
        if fault is not None and fault(self, path):
            return None
        with owner.lock:
            done = done or owner.answer(path, body)
        return self.send(*done)

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        plain = content is None or isinstance(content, str)
        data = (content or "").encode() if plain else json.dumps(content).encode()
        self.send_response(status)
        kind = "text/plain" if plain else "application/json"
        always = {"Content-Length": str(len(data)), "Content-Type": kind}
        for name, value in {**always, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


# ---- faults -------------------------------------------------------------------------------------


def status(code: int, **headers: str) -> Fault:
    """Answers with an error of HTTP."""

    def fault(handler: Handler, path: str) -> bool:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.send(code, {"error": f"told to answer {code}"}, named)
        return True

    return fault


def drop(handler: Handler, path: str) -> bool:
    """Closes the connection without an answer."""
    handler.connection.close()
    return True


def half(handler: Handler, path: str) -> bool:
    """Announces more than it sends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True
    return True


def hang(seconds: float) -> Fault:
    """Says nothing for that long, and answers then."""

    def fault(handler: Handler, path: str) -> bool:
        time.sleep(seconds)
        return False

    return fault


def main(port_file: str) -> None:
    from fused_grpo.trainer.models import tiny

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = tiny(torch.float32)
    server = Server(model, tokenizer.eos_token_id)
    Path(port_file).write_text(server.url)
    server.thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
