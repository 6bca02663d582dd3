"""Faults of servers that sample, of the weights on their way there, and of what samplers report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fault_arena import STOPS, Arena, Fault
from rollout_server import Handler, Server, drop, half, hang, status

from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.models import tiny
from fused_grpo.trainer.rollouts.http import Http

Inject = Callable[[Arena], None]
MANY = 50  # requests that meet a fault: all of them


def _with_server(change: Callable[[Arena, Server], None], **options: Any) -> Inject:
    """Samples from a server that `change` has spoilt once the trainer has found it."""

    def inject(arena: Arena) -> None:
        *others, _, _ = Http.__init__.__defaults__ or ()
        arena.patch.setattr(Http.__init__, "__defaults__", (*others, 0.01, 0.02))  # its waits
        torch.manual_seed(0)
        model, tokenizer = tiny(torch.float32)
        server = Server(model, tokenizer.eos_token_id)
        server.http.handle_error = lambda *_: None  # type: ignore[method-assign]
        arena.options |= {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_timeout": 2.0,
            "server_retries": 2,
            "sampling_correction": "monitor",
            "generation_kwargs": {"eos_token_id": 96},  # none is sampled: always six tokens
            **options,
        }
        arena.prepare.append(lambda run: change(arena, server))
        arena.cleanup.append(server.close)

    return inject


def _answers(fault: Any, **options: Any) -> Inject:
    def change(arena: Arena, server: Server) -> None:
        server.faults = [fault] * MANY

    return _with_server(change, **options)


def _spoils(spoil: Callable[[Any], Any], **options: Any) -> Inject:
    """The server's answer, changed."""

    def change(arena: Arena, server: Server) -> None:
        server.spoil = spoil

    return _with_server(change, **options)


def _choice(**fields: Any) -> Inject:
    def spoil(answer: Any) -> Any:
        answer["choices"][0].update(fields)
        return answer

    return _spoils(spoil)


def _logps(*values: Any) -> Inject:
    def spoil(answer: Any) -> Any:
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"] = list(values)
        return answer

    return _spoils(spoil)


def _cut(handler: Handler, path: str) -> bool:
    """JSON that ends in the middle, of the length that is announced."""
    text = b'{"choices": [{"token_ids": [5, 6'
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(text)))
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    handler.wfile.write(text)
    return True


def _page(handler: Handler, path: str) -> bool:
    """What a proxy says for a server."""
    handler.send(200, "<html>login</html>")
    return True


def _dies(arena: Arena, server: Server) -> None:
    server.close()
    server.close = lambda: None  # type: ignore[method-assign]


def _dies_between(arena: Arena, server: Server) -> None:
    """The weights arrive, and the prompts do not."""
    assert arena.run is not None
    sync = arena.run.sampler.sync

    def sync_and_die(model: Any) -> None:
        sync(model)
        _dies(arena, server)

    arena.run.sampler.sync = sync_and_die  # type: ignore[method-assign]


def _nowhere(arena: Arena) -> None:
    _with_server(lambda arena, server: None)(arena)
    arena.options |= {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.1}


def _no_endpoint(arena: Arena, server: Server) -> None:
    server.paths -= {"/collective_rpc"}


def _refuses_weights(arena: Arena, server: Server) -> None:
    server.load = lambda path: 1 / 0  # type: ignore[method-assign, assignment, return-value]


def _keeps_cache(arena: Arena, server: Server) -> None:
    server.resets = False


def _no_room_for_weights(arena: Arena, server: Server) -> None:
    from safetensors import SafetensorError

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    assert arena.run is not None
    arena.run.sampler.folder.write_model = full  # type: ignore[attr-defined]


def _sampled(change: Callable[[Any], Any], **options: Any) -> Inject:
    """A rollout of one's own, which reports what `change` makes of a right sample."""

    def inject(arena: Arena) -> None:
        def prepare(run: GRPOTrainer) -> None:
            inner: Any = run.sampler

            def sampler(*args: Any, **kwargs: Any) -> Any:
                return change(inner(*args, **kwargs))

            sampler.sync = inner.sync  # type: ignore[attr-defined]
            run.sampler = run.collector.sampler = sampler  # type: ignore[assignment]

        arena.prepare.append(prepare)
        arena.options |= options

    return inject


def _with_id(number: int) -> Callable[[Any], Any]:
    def change(sample: Any) -> Any:
        ids = sample.completion_ids.clone()
        ids[0, 0] = number
        return replace(sample, completion_ids=ids)

    return change


def _fewer(sample: Any) -> Any:
    fields = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "ended")
    return replace(sample, **{name: getattr(sample, name)[:-1] for name in fields})


READS = {"sampling_correction": "monitor"}
FAULTS = [
    ("nobody listens", _nowhere, "no server at http://127.0.0.1:9: GET /health was tried for"),
    (
        "dies before it gets the weights",
        _with_server(_dies),
        "did not get the weights: POST",
    ),
    (
        "dies after it got the weights",
        _with_server(_dies_between),
        "completions was tried 3 times",
    ),
    ("answers 500", _answers(status(500)), "/v1/completions was tried 3 times in"),
    ("answers 429", _answers(status(429)), "at last status 429"),
    ("answers 400", _answers(status(400)), "/v1/completions refused: status 400"),
    ("answers 404", _answers(status(404)), "/v1/completions refused: status 404"),
    ("closes the connection", _answers(drop), "was tried 3 times in"),
    ("sends less than it announces", _answers(half), "at last IncompleteRead"),
    ("sends JSON that is cut", _answers(_cut), "at last JSONDecodeError"),
    ("sends a page of HTML", _answers(_page), "answered with str in place of an object"),
    (
        "hangs",
        _answers(hang(0.4), server_request_timeout=0.1, server_retries=1),
        "was tried 2 times in",
    ),
    ("sends a number", _spoils(lambda a: 1), "answered with int in place of an object"),
    ("sends no choices", _spoils(lambda a: {}), "answered with no choices"),
    (
        "sends choices that are texts",
        _spoils(lambda a: {**a, "choices": ["x"]}),
        "that cannot be read",
    ),
    (
        "sends choices that are null",
        _spoils(lambda a: {**a, "choices": [None]}),
        "that cannot be read",
    ),
    ("sends usage as a list", _spoils(lambda a: {**a, "usage": [1]}), "that cannot be read"),
    ("numbers choices by texts", _choice(index="first"), "that cannot be read (TypeError"),
    ("sends log-probabilities as a list", _choice(logprobs=[1.0]), "that cannot be read"),
    (
        "sends one completion too few",
        _spoils(lambda a: {**a, "choices": a["choices"][1:]}),
        "answered with 3 completions in place of 4",
    ),
    (
        "sends one completion too many",
        _spoils(lambda a: {**a, "choices": a["choices"] + a["choices"][:1]}),
        "answered with 5 completions in place of 4",
    ),
    (
        "sends an id beyond the vocabulary",
        _choice(token_ids=[5] * 5 + [96000]),
        "token id 96000",
    ),
    (
        "sends a negative id",
        _choice(token_ids=[5] * 5 + [-1]),
        "token id -1, and",
    ),
    ("sends ids as texts", _choice(token_ids=["5"] * 6), "answered with no token ids, but"),
    ("sends ids as fractions", _choice(token_ids=[0.5] * 6), "answered with no token ids, but"),
    ("sends no ids", _choice(token_ids=[]), "answered with 0 tokens where"),
    (
        "sends more tokens than asked for",
        _choice(token_ids=[5] * 7),
        "with 7 tokens where",
    ),
    ("gives up on a completion", _choice(finish_reason="abort"), "that finished by 'abort'"),
    ("reads another prompt", _choice(prompt_token_ids=[5]), "a completion of another prompt"),
    ("sends NaN log-probabilities", _logps(*[math.nan] * 6), "not one log-probability is a number"),
    ("sends null log-probabilities", _logps(*[None] * 6), "not one log-probability is a number"),
    ("sends log-probabilities above 0", _logps(*[1.0] * 6), "not one log-probability is a number"),
    ("sends too few log-probabilities", _logps(-1.0), "1 log-probabilities for 6 tokens"),
    ("sends too many log-probabilities", _logps(*[-1.0] * 7), "7 log-probabilities for 6 tokens"),
    ("sends log-probabilities as texts", _logps(*["-1"] * 6), "not one log-probability"),
    (
        "answers the probe of the temperature with nothing",
        _spoils(
            lambda a: {**a, "choices": [{"logprobs": {"top_logprobs": [{}]}}]}, temperature=0.5
        ),
        "that cannot be read",
    ),
    (
        "cannot load the weights",
        _with_server(_refuses_weights),
        "did not get the weights",
    ),
    (
        "loads the weights, keeps its cache",
        _with_server(_keeps_cache),
        "/reset_prefix_cache",
    ),
    ("no room to write the weights", _with_server(_no_room_for_weights), "No space left on device"),
    ("loses the endpoint for weights", _with_server(_no_endpoint), "/collective_rpc refused: stat"),
]
OWN_FAULTS = [
    ("reports an id beyond the vocabulary", _sampled(_with_id(96000)), "token id 96000"),
    ("reports a negative id", _sampled(_with_id(-1)), "token id -1, and the model has ids from 0"),
    ("reports too few completions", _sampled(_fewer), "made 7 completions where 8 were asked for"),
    (
        "reports no log-probabilities",
        _sampled(lambda s: replace(s, sampling_logps=None), **READS),
        "the rollout reports no log-probabilities, which a correction reads",
    ),
    (
        "reports log-probabilities of another length",
        _sampled(lambda s: replace(s, sampling_logps=s.sampling_logps[:, 1:]), **READS),
        "log-probabilities of shape [8, 5] for token ids of shape [8, 6]",
    ),
]
SERVER_FAULTS = [Fault("Servers that sample", *row, STOPS) for row in FAULTS]
SERVER_FAULTS += [Fault("Rollouts of your own", *row, STOPS) for row in OWN_FAULTS]
