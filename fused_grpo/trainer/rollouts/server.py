"""What every server that samples has in common; `servers` has those that are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn

from fused_grpo.integrations.models import is_sharded
from fused_grpo.trainer import setup
from fused_grpo.trainer.checkpoints import is_write_error
from fused_grpo.trainer.config import GRPOConfig
from fused_grpo.trainer.rollout import Sampler, TokenRollout
from fused_grpo.trainer.rollouts.http import Http, RefusedError
from fused_grpo.trainer.rollouts.weights import WeightFolder, merged_weights
from fused_grpo.trainer.sample import Completion, Prompt, RolloutError, Sample

UNKNOWN_LOGP = -9998.0  # servers put -9999 where they have no number, which JSON lacks


class ServerRollout(TokenRollout):
    """Token ids to a server, token ids and log-probabilities back, one request for each prompt.

    Every process asks for its own share. The first process hands over the weights, the others wait.
    With `weight_sync="none"` the server keeps its own, so that greedy completions, which stand for
    the policy, are made here.
    """

    health = "/health"
    sync_paths: dict[str, str]  # by weight_sync, what the server must know for it

    def __init__(self, model: nn.Module, tokenizer: Any, args: GRPOConfig) -> None:
        super().__init__(model, tokenizer, args)
        self.http = Http(
            self.url(args).rstrip("/"),
            timeout=args.server_request_timeout,
            retries=int(args.server_retries),
            concurrency=int(args.server_concurrency),
        )
        self.http.wait_until_up(self.health, args.vllm_server_timeout)
        self.folder: WeightFolder | None = None
        self.adapter: str | None = None  # the name of the one that is served
        self._local: Sampler | None = None
        self._checked = args.temperature == 1 or not args.reads_sampler
        if args.weight_sync == "none":
            self._local = Sampler(model, tokenizer, args)
            return
        if args.weight_sync == "adapter" and not setup.is_peft(model):
            raise ValueError("weight_sync='adapter' needs a model with a PEFT adapter: use 'disk'")
        self._check_can_sync(self.sync_paths[args.weight_sync])
        self.folder = WeightFolder(args.weight_sync_dir)

    # ---- what a server defines -------------------------------------------------------------------

    def url(self, args: GRPOConfig) -> str:
        raise NotImplementedError

    def ask(self, prompt: list[int], copies: int, greedy: bool, logps: bool) -> list[Completion]:
        """`copies` completions of one prompt."""
        raise NotImplementedError

    def likeliest(self, prompt: list[int], temperature: float) -> dict[Any, float]:
        """Log-probabilities of a few likely first tokens, as the server reports them."""
        raise NotImplementedError

    def load_model(self, path: str) -> None:
        """Serve the weights at `path` from now on."""
        raise NotImplementedError

    def load_adapter(self, name: str, path: str) -> None:
        raise NotImplementedError

    def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    # ---- sampling --------------------------------------------------------------------------------

    def __call__(
        self, model: nn.Module, prompts: Sequence[Prompt], copies: int = 1, greedy: bool = False
    ) -> Sample:
        if greedy and self._local is not None:
            return self._local(model, prompts, copies, greedy)
        return super().__call__(model, prompts, copies, greedy)

    def complete(
        self, model: nn.Module, prompts: list[list[int]], copies: int, greedy: bool
    ) -> list[Completion]:
        wants_logps = self.args.reads_sampler and not greedy
        if wants_logps and not self._checked:
            self._check_temperature(prompts[0])

        def one(prompt: list[int]) -> list[Completion]:
            with self._reading():
                found = self.ask(prompt, copies, greedy, wants_logps)
            if len(found) != copies:
                raise self.unusable(f"{len(found)} completions in place of {copies}")
            return found

        rows = [row for found in self.http.map(one, prompts) for row in found]
        known = [row.logps for row in rows if row.logps is not None]
        if wants_logps and all(math.isnan(x) for logps in known for x in logps):
            raise self.unusable("not one log-probability is a number")
        return rows

    def completion(
        self, ids: Any, reason: Any, logps: Any, wants_logps: bool, experts: Any = None
    ) -> Completion:
        """A `Completion` of what the server sent. RolloutError: it cannot be one."""
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise self.unusable(f"no token ids, but {ids!r}")
        if not ids or len(ids) > self.args.max_completion_length:
            raise self.unusable(
                f"{len(ids)} tokens where max_completion_length="
                f"{self.args.max_completion_length} were asked for"
            )
        if reason not in ("stop", "length"):
            raise self.unusable(f"a completion that finished by {reason!r}")
        if reason == "stop" and ids[-1] not in self.eos_ids:
            raise self.unusable(
                f"a completion that ends with token {ids[-1]}, which is none of the ends "
                f"of sequence {self.eos_ids}: set generation_kwargs={{'eos_token_id': ...}}"
            )
        if not wants_logps:
            return Completion(ids, None, experts)
        if not isinstance(logps, list) or len(logps) != len(ids):
            count = len(logps) if isinstance(logps, list) else "no"
            raise self.unusable(f"{count} log-probabilities for {len(ids)} tokens")
        return Completion(ids, [known_logp(x) for x in logps], experts)

    def check_prompt(self, prompt: list[int], count: Any, ids: Any = None) -> None:
        """RolloutError unless the server has read the prompt that it was sent."""
        if (ids is not None and ids != prompt) or (count is not None and count != len(prompt)):
            raise self.unusable(
                f"a completion of another prompt than the one of {len(prompt)} tokens that was "
                f"sent ({count if ids is None else len(ids)} tokens were read): it was cut, or has "
                "got more special tokens"
            )

    def checked_post(self, path: str, body: Any = None) -> None:
        """For servers that report failure with a status of success."""
        answer = self.http.post(path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError(f"{self.http.base_url}{path} failed: {answer.get('message')}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """An answer of another form than the expected one may fail wherever it is looked at."""
        try:
            yield
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self.unusable(
                f"something that cannot be read ({type(error).__name__}: {error})"
            ) from error

    def unusable(self, what: str) -> RolloutError:
        return RolloutError(f"{self.http.base_url} answered with {what}")

    def _check_temperature(self, prompt: list[int]) -> None:
        """The gap between two log-probabilities shrinks by the temperature, if that is in them."""
        temperature = self.args.temperature
        with self._reading():
            plain, tempered = self.likeliest(prompt, 1.0), self.likeliest(prompt, temperature)
            both = [t for t in plain if t in tempered]
            first, last = max(both, key=lambda t: plain[t]), min(both, key=lambda t: plain[t])
            expected = (plain[first] - plain[last]) / temperature
            found = tempered[first] - tempered[last]
        if abs(found - expected) > abs(found - (plain[first] - plain[last])):
            raise RolloutError(
                f"{self.http.base_url} reports log-probabilities without the temperature, and "
                f"temperature={temperature}: {self.raw_logps_hint}"
            )
        self._checked = True

    raw_logps_hint = ""

    # ---- weights ---------------------------------------------------------------------------------

    def sync(self, model: nn.Module) -> None:
        """Write the weights down and have the server read them. RolloutError: it does not."""
        if self.folder is None:
            return
        self.folder.next()
        whole = self.args.weight_sync == "disk" or not setup.is_peft(model)
        main = self.args.process_index == 0
        weights = dict(merged_weights(model)) if whole and (main or is_sharded(model)) else {}
        problem: Exception | None = None
        if main:
            try:
                self._hand_over(model, weights, whole)
            except Exception as error:
                if not isinstance(error, RolloutError) and not is_write_error(error):
                    raise
                problem = error
        self.adapter = None if whole else self.folder.name
        told = [None if problem is None else str(problem)]
        if self.args.world_size > 1:  # all stop, rather than wait for one that has
            broadcast_object_list(told)
        if told[0] is not None:
            raise RolloutError(f"the server did not get the weights: {told[0]}") from problem

    def _hand_over(self, model: nn.Module, weights: dict[str, Any], whole: bool) -> None:
        assert self.folder is not None
        folder, before = self.folder, self.adapter
        if whole:
            folder.write_model(model, weights)
        else:
            folder.write_adapter(model)
        if before is not None:  # first, for some servers hold one adapter only
            self.unload_adapter(before)
        if whole:
            self.load_model(str(folder.path))
        else:
            self.load_adapter(folder.name, str(folder.path))
        folder.keep_only_last()

    def close(self) -> None:
        """Delete the weights on disk, if their folder is ours."""
        if self.folder is not None:
            self.folder.close()

    def _check_can_sync(self, path: str) -> None:
        """An endpoint that exists complains about an empty request in another way than by 404."""
        try:
            self.http.post(path)
        except RefusedError as error:
            if error.status in (404, 405):
                raise RolloutError(
                    f"{self.http.base_url} has no {path}, by which it would get new weights: "
                    f"{self.no_sync_hint[self.args.weight_sync]}, or set weight_sync='none' and a "
                    "correction"
                ) from error

    no_sync_hint: dict[str, str]


def known_logp(value: Any) -> float:
    """A log-probability, NaN where the server says that it does not know it.

    None, NaN, the -9999 that stands for minus infinity, and numbers that are no log-probability.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return math.nan
    return float(value) if UNKNOWN_LOGP < value <= 1e-3 else math.nan
