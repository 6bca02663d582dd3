"""The routed backward: unbiased, sparse gradients (docs/routed-backward.md).

Nearly all of a token's probability is in a few of the vocabulary's entries, and of the rest a few
stand for all: an entry is kept with probability q = min(1, p / tau) and then counts p / q =
max(p, tau). Values stay exact, gradients are right on average, and their cost follows the entries
that are kept: some thirty to three hundred a token at tau = 2^-12.

What is kept is drawn in two steps, so that most entries are never looked at: a group of GROUP
neighbours, whose sum the forward adds up, with probability min(1, S / tau), and in it each entry
with what is left of its own. The noise is a hash of the seed, the sequence's id and the position in
it, so that a token keeps the same entries whatever else is in the batch. Nothing depends on what
was drawn; rows that can be expected to keep much take the exact path.

Of a shared vocabulary each rank draws from its own rows, with noise of its own. What is expected is
added up over the ranks, so that all of them send the same rows the exact path.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch
from torch import Tensor

from fused_grpo.checks import check_choice, check_number, check_tensor
from fused_grpo.chunked import empty_result, forward_chunk, head_pass
from fused_grpo.gradients import (
    Chunk,
    add_gradients,
    add_rows,
    cap_slope,
    product_dtype,
    target_share,
)
from fused_grpo.memory import NOISE_ROWS, NOISE_WINDOWS, ROUTED_ROWS, slices, waiting_entries
from fused_grpo.passes import (
    Coefficients,
    HeadResult,
    Needs,
    Reference,
    Tokens,
    TokenValues,
    Upstream,
    select_rows,
    with_gradients,
)
from fused_grpo.tiles import GROUP, Head, compute_dtype, rows_in_tile
from fused_grpo.workspace import Workspace, plan_pass

DEFAULT_TAU = 2.0**-12
# Kept entries cost about as much as twelve of a dense product's; the expected number is bounded
# from the groups' sums, some three times above it.
_DENSE_SHARE = 0.25
_NOISE_SHIFT = 33 - NOISE_ROWS.bit_length()
_GROUP_SHIFT = GROUP.bit_length() - 1
_BLOCK = 8192  # groups looked into at a time: they stay in cache
_ROUNDED_UP = 1 + 2.0**-8  # sums of groups are of entries before they were rounded to bf16


class RouteOptions(TypedDict, total=False):
    """Options of `linear_logprobs` and `grpo_loss` for their gradients.

    backward: "exact", or "routed": sparse and unbiased, for little more than the forward's work
        (docs/routed-backward.md).
    route_tau: entries at least this likely are always kept, others with probability p / tau; 0
        (which is exact) or in [1e-12, 1]. None: 2^-12.
    route_seed: an integer; the same seed keeps the same entries. None: drawn from torch's default
        generator, as dropout's noise is. Give seed + step where runs must be replayed.
    route_weight_grad: "routed", or "exact": a dense weight gradient, for 2NHV more, where rare rows
        must not wait for their turn (Adam).
    sequence_ids: integers, one per sequence, that stay with it whatever the batch: the key of the
        noise. None: the order in this call; ranks that see different sequences should then have
        different seeds. Not so those of a process_group or sequence_group, whose noise differs.
    """

    backward: str
    route_tau: float | None
    route_seed: int | None
    route_weight_grad: str
    sequence_ids: Tensor | None


@dataclass(frozen=True)
class Route:
    """How the gradients of n tokens are routed."""

    tau: float
    seed: int
    keys: Tensor  # [n] int64 in [0, 2^32), see `token_keys`
    exact_weight_grad: bool = False

    def __getitem__(self, span: slice) -> Route:
        return replace(self, keys=self.keys[span])

    def dense_weight_grad(self, needs: Needs) -> bool:
        """Whether dW or db are formed from all entries, which takes dL/dlogp inside the pass."""
        return self.exact_weight_grad and (needs.weight_grad or needs.bias_grad)


def make_route(options: RouteOptions, sequence: Tensor, num_sequences: int) -> Route | None:
    """Of n tokens, which belong to the sequences `sequence` [n]; None where gradients are exact.

    Raises:
        TypeError, ValueError: naming the option; options that exact gradients would ignore.
    """
    check_route_options(options)
    ids = options.get("sequence_ids")
    if ids is not None:
        check_tensor("sequence_ids", ids, sequence.device, floating=False)
    if options.get("backward", "exact") == "exact":
        return None
    tau, seed = options.get("route_tau"), options.get("route_seed")
    tau = DEFAULT_TAU if tau is None else tau
    if tau == 0:
        return None
    if seed is None:
        seed = int(torch.randint(2**62, (), device="cpu"))
    ids = torch.arange(num_sequences, device=sequence.device) if ids is None else ids.long()
    if ids.shape != (num_sequences,):
        raise ValueError(
            f"sequence_ids has shape {list(ids.shape)}; it must be [{num_sequences}], one per "
            "sequence"
        )
    ids = ids[sequence]
    exact_weight_grad = options.get("route_weight_grad") == "exact"
    return Route(tau, seed, token_keys(seed, ids, _ordinals(ids)), exact_weight_grad)


def check_route_options(options: RouteOptions) -> None:
    """TypeError or ValueError: out of range, or what exact gradients would ignore."""
    backward = options.get("backward", "exact")
    check_choice("backward", backward, ("exact", "routed"))
    weight_grad = options.get("route_weight_grad", "routed")
    check_choice("route_weight_grad", weight_grad, ("routed", "exact"))
    tau, seed = options.get("route_tau"), options.get("route_seed")
    if tau is not None:
        check_number("route_tau", tau, lambda x: x == 0 or 1e-12 <= x <= 1, "0 or in [1e-12, 1]")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"route_seed must be an integer, not {type(seed).__name__}")
    if backward == "exact":
        for name, value in options.items():
            default = {"backward": "exact", "route_weight_grad": "routed"}.get(name)
            if value is not None and value is not default and value != default:
                raise ValueError(
                    f"{name} is an option of backward='routed', which is not asked for"
                )


def _ordinals(ids: Tensor) -> Tensor:
    """[n] how many earlier tokens have the same id."""
    ids, order = ids.sort(stable=True)
    ordinal = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ids, ids)
    return torch.empty_like(ordinal).index_copy_(0, order, ordinal)


def token_keys(seed: int, sequence_ids: Tensor, position: Tensor) -> Tensor:
    """[n] hashes of (seed, sequence id, position in the sequence)."""
    key = _mix(sequence_ids ^ _mix((sequence_ids >> 32) ^ _seed_word(seed)))
    return _mix(key ^ _mix(position + 1))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that leaves no pattern, on the low words of int64."""
    x = x & _WORD
    x = ((x ^ x >> 16) * 0x7FEB352D) & _WORD
    x = ((x ^ x >> 15) * 0x846CA68B) & _WORD
    return x ^ x >> 16


_WORD = 0xFFFFFFFF


def keys_of_part(keys: Tensor, part: int) -> Tensor:
    """[n] keys for noise of its own: of the rows from `part` on of a shared vocabulary, or of the
    tokens that rank -`part` of a sequence_group holds; both count from 0. Part 0 keeps its keys."""
    return _mix(keys ^ _mix(torch.tensor(part, device="cpu"))) if part else keys


def _seed_word(seed: int) -> Tensor:
    words = torch.tensor([seed & _WORD, (seed >> 32) & _WORD], device="cpu")
    return _mix(words[0] ^ _mix(words[1]))


@functools.lru_cache(maxsize=4)
def _uniform(seed: int, stream: int, count: int, device: torch.device) -> Tensor:
    """[count] fp32 in (0, 1), multiples of 2^-25."""
    salt = _seed_word(seed ^ stream).to(device)
    noise = torch.empty(count, dtype=torch.float32, device=device)
    for part in slices(count, 2**14):
        counter = torch.arange(part.start, part.stop, device=device) + (stream << 24)
        word = _mix(_mix(counter) ^ salt)
        noise[part] = ((word >> 8).double() + 0.5).mul_(2.0**-24).float()
    return noise


@dataclass
class Entries:
    """The kept entries [m] of c tokens, row after row, and what their targets' gradients need."""

    row: Tensor  # [m] int32
    column: Tensor  # [m] int32
    value: Tensor  # [m] p / q, times the softcap's slope
    log_p: Tensor | None  # [m], where an entropy has a gradient
    target_slope: Tensor | float  # [c] the softcap's slope there
    dense: Tensor  # [c] bool, rows that keep nothing here because they take the exact path
    statistics: Tensor  # [c, 3] entries kept, variance of their p / q, sum of p^2 estimated


def select(chunk: Chunk, work: Workspace, route: Route, head: Head, log_p: bool) -> Entries:
    """The entries of a chunk that are kept.

    Rows that can be expected to keep more than `_DENSE_SHARE` of the vocabulary, and those with
    NaN, are dense: the same ones on all ranks of a shared vocabulary.
    """
    assert chunk.exps is not None
    assert work.groups is not None
    groups = work.groups[: len(chunk.rows)]
    share = _share_of_groups(chunk, groups, work.tile) / route.tau
    mass = groups * share  # S / tau
    if chunk.exps[0].dtype != groups.dtype:
        mass *= _ROUNDED_UP
    expected = mass.clamp(max=GROUP).sum(1)
    if head.shard is not None:
        expected = head.shard.sum(expected)
    dense = ~(expected <= _DENSE_SHARE * head.vocab)
    mass.masked_fill_(dense[:, None], -1)
    at = (mass >= _windows(route, groups.shape[1])).view(-1).nonzero().squeeze(1)
    share, mass = (x.reshape(-1).index_select(0, at) for x in (share, mass))
    found = _look_into(work, at, share, mass.clamp_(max=1), route)
    return _entries(chunk, *found, dense, route.tau, head, log_p)


def _share_of_groups(chunk: Chunk, groups: Tensor, tile: int) -> Tensor:
    """[c, V / GROUP] P of p = P exps in each group."""
    share = chunk.stats.log_scale.exp()
    if share.shape[1] == 1:
        return share.expand_as(groups)
    return share.repeat_interleave(tile // GROUP, 1)[:, : groups.shape[1]]


def _windows(route: Route, count: int) -> Tensor:
    """[c, count] noise of the groups: each row reads one long vector from a place of its own."""
    noise = _uniform(route.seed, 1, NOISE_WINDOWS + count, route.keys.device)
    return noise.unfold(0, count, 1).index_select(0, route.keys % NOISE_WINDOWS)


def _look_into(
    work: Workspace, at: Tensor, share: Tensor, mass: Tensor, route: Route
) -> tuple[Tensor, Tensor, Tensor]:
    """(row, column, p / tau) of the entries kept in the groups that are kept, which stand `at` in
    [c, V / GROUP].

    An entry stays with probability min(1, p / tau) / min(1, S / tau), which `mass` holds, that is,
    where its softmax is at least noise * mass / share.
    """
    assert work.groups is not None
    assert work.slabs is not None
    count, device = work.groups.shape[1], at.device
    row = at // count
    group = at - row * count
    number = torch.arange(count, device=device)
    per_tile = -(-work.tile // GROUP)
    first = number - number % per_tile
    width = (count - first).clamp_(max=per_tile)  # of the group's tile
    # where a group stands in the slabs, row 0's first
    start = first * (len(work.slabs) // count) + (number - first)
    place = start.index_select(0, group) + row * width.index_select(0, group)
    odd = _mix(number + 1) | 1
    product = route.keys.index_select(0, row) * odd.index_select(0, group)
    noise_row = (product & _WORD) >> _NOISE_SHIFT
    noise = _uniform(route.seed, 2, NOISE_ROWS * GROUP, device).view(-1, GROUP).to(share.dtype)
    bound, entries = (mass / share)[:, None], work.slabs
    first_column = (group - torch.arange(len(at), device=device)) * GROUP
    parts = [(row[:0], row[:0], share[:0])]
    for b in slices(len(at), _BLOCK):
        q = entries.index_select(0, place[b]).to(share.dtype)
        hit = (q >= noise.index_select(0, noise_row[b]).mul_(bound[b])).view(-1).nonzero()[:, 0]
        which = (hit >> _GROUP_SHIFT) + b.start
        ratio = q.view(-1).index_select(0, hit).mul_(share.index_select(0, which))
        column = first_column.index_select(0, which).add_(hit).add_(b.start * GROUP)
        parts.append((row.index_select(0, which), column, ratio))
    row, column, ratio = (torch.cat(x) for x in zip(*parts, strict=True))
    if bool((ratio <= 0).any()):  # a bound so small that noise * bound is 0
        row, column, ratio = (x[ratio > 0] for x in (row, column, ratio))
    return row.int(), column.int(), ratio


def _entries(
    chunk: Chunk,
    row: Tensor,
    column: Tensor,
    ratio: Tensor,
    dense: Tensor,
    tau: float,
    head: Head,
    log_p: bool,
) -> Entries:
    value = ratio.clamp(min=1).mul_(tau)
    variance = (1 - ratio).clamp_(min=0).mul_(tau * tau)  # its sum estimates p^2 (1 / q - 1)
    statistics = value.new_zeros(3, len(dense))
    statistics[0] = torch.bincount(row, minlength=len(dense))
    statistics[0].masked_fill_(dense, head.weight.shape[0])
    add_rows(statistics[1], row, variance)
    add_rows(statistics[2], row, (ratio * value).mul_(tau))
    logs = (ratio * tau).log() if log_p or head.softcap is not None else None
    slope: Tensor | float = 1.0
    if head.softcap is not None and logs is not None:
        z_target, t = chunk.sums.z_target, chunk.temperature
        of_row = t[:, 0] if isinstance(t, Tensor) else t
        of_entry = of_row[row] if isinstance(of_row, Tensor) else of_row
        slope = cap_slope(z_target, of_row, head)
        value = value * cap_slope(logs + (z_target - chunk.stats.logps)[row], of_entry, head)
    return Entries(row, column, value, logs if log_p else None, slope, dense, statistics.T)


_ADDED_ROWS = 4096


class Gradients:
    """Adds up the gradients of the kept entries: dh by rows, dW at once from all entries."""

    def __init__(
        self, tokens: Tokens, head: Head, needs: Needs, route: Route, chunk_bytes: int | None
    ) -> None:
        self.tokens, self.head, self.needs, self.route = tokens, head, needs, route
        self.chunk_bytes = chunk_bytes
        self.dtype = compute_dtype(tokens.hidden, head.weight)
        self.product = product_dtype(tokens.hidden, head.weight)
        self.result = empty_result(tokens, head, replace(needs, weight_grad=False), None)
        self.dense: list[tuple[Tensor, Upstream]] = []
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []  # row, column, weight
        self._waiting, self._limit = 0, waiting_entries(chunk_bytes)
        self._weight_grad: Tensor | None = None

    def add(self, span: slice, entries: Entries, values: TokenValues, upstream: Upstream) -> None:
        """The share of a span of tokens, from dL/dlogp and dL/dentropy."""
        g, e = upstream.logps, upstream.entropy
        live = upstream.live(values.logps)
        if bool(entries.dense.any()):
            at = entries.dense.nonzero().squeeze(1)
            self.dense.append((at + span.start, upstream[at]))
            live = live & ~entries.dense
        temperature = self.tokens.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[span].to(self.dtype)
        jacobian = self.head.logit_scale / temperature
        row, column = entries.row, entries.column
        weight = (-(g * jacobian)).index_select(0, row) * entries.value
        if e is not None and entries.log_p is not None and values.entropy is not None:
            surprise = entries.log_p + values.entropy.index_select(0, row)
            weight -= (e * jacobian).index_select(0, row) * entries.value * surprise
        logps = values.logps
        at_target = target_share(logps, -logps.expm1(), values.entropy, upstream)
        at_target = at_target * (jacobian * entries.target_slope)
        if not bool(live.all()):
            kept = live.index_select(0, row)
            row, column, weight = row[kept], column[kept], weight[kept]
        self._accumulate(span, live, row, column, weight, at_target)

    def _accumulate(
        self,
        span: slice,
        live: Tensor,
        row: Tensor,
        column: Tensor,
        weight: Tensor,
        at_target: Tensor,
    ) -> None:
        rows, result, shard = live.nonzero().squeeze(1), self.result, self.head.shard
        if rows.numel() == 0 and shard is None:
            return
        target, at_target = self.head.local(self.tokens.target[span])[rows], at_target[rows]
        if shard is not None:  # only the targets whose rows are here
            here = rows_in_tile(target, self.head.weight.shape[0])
            target, at_target, of_target = target[here], at_target[here], rows[here]
        else:
            of_target = rows
        if result.hidden_grad is not None:
            w, index = self.head.weight, self.tokens.index[span]
            if shard is not None:  # of all tokens: the ranks' sums have one shape, come what may
                rows = torch.arange(len(live), device=rows.device)
            bounds = torch.cat([rows, rows.new_tensor([len(live)])])
            offsets = torch.searchsorted(row, bounds, out_int32=True)
            dh = _weighted_sums(w, column, offsets, weight, self.product).to(self.dtype)
            if shard is None:
                dh.addcmul_(w[target].to(self.dtype), at_target[:, None])
            else:
                dh[of_target] += w[target].to(self.dtype) * at_target[:, None]
                shard.sum(dh)
            flat = result.hidden_grad.view(-1, w.shape[1])
            flat[index[rows]] = dh.to(flat.dtype)
        if self.route.exact_weight_grad:
            return
        row, column = torch.cat([row, of_target.int()]), torch.cat([column, target.int()])
        weight = torch.cat([weight, at_target])
        if result.bias_grad is not None:
            add_rows(result.bias_grad, column, weight)
        if self.needs.weight_grad and len(row):
            self._pending.append((row + span.start, column, weight))
            self._waiting += len(row)
            if self._waiting > self._limit:
                self._flush()

    def _flush(self) -> None:
        """dW of the pending entries, a row of it after the other."""
        if not self._pending:
            return
        row, column, weight = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        self._pending, self._waiting = [], 0
        start = int(row.min())
        table = self.tokens.rows(slice(start, int(row.max()) + 1)).to(self.product)
        column, order = column.sort(stable=True)
        vocab = self.head.weight.shape[0]
        offsets = column.new_zeros(vocab + 1)
        offsets[1:] = torch.bincount(column, minlength=vocab).cumsum(0)
        row, weight = (row - start).index_select(0, order), weight.index_select(0, order)
        self._add_weight_grad(_weighted_sums(table, row, offsets, weight, self.product))

    def _add_weight_grad(self, more: Tensor) -> None:
        if self._weight_grad is None:
            self._weight_grad = more
        else:
            self._weight_grad = total = self._weight_grad.to(self.dtype)
            for rows in slices(len(total), _ADDED_ROWS):  # which would be copied whole, as fp32
                total[rows] += more[rows]

    def add_exact(self, exact: HeadResult) -> None:
        """What the exact path has found: other tokens' dh, and the rest of dW and db."""
        for name in ("hidden_grad", "bias_grad"):
            mine, more = getattr(self.result, name), getattr(exact, name)
            if mine is not None and more is not None:
                mine += more
        if exact.weight_grad is not None:
            self._add_weight_grad(exact.weight_grad)

    def finish(self) -> HeadResult:
        """The gradients, once every token was added."""
        self._flush()
        if self.dense:
            at = torch.cat([where for where, _ in self.dense])
            self.add_exact(self._exact_pass(at, [upstream for _, upstream in self.dense]))
        result, like = self.result, self.head.weight
        if self.needs.weight_grad:
            dw = self._weight_grad
            result.weight_grad = torch.zeros_like(like) if dw is None else dw.to(like.dtype)
        if result.bias_grad is not None and self.head.bias is not None:
            result.bias_grad = result.bias_grad.to(self.head.bias.dtype)
        return result

    def _exact_pass(self, at: Tensor, parts: list[Upstream]) -> HeadResult:
        entropies = [x.entropy for x in parts if x.entropy is not None]
        g, e = torch.cat([x.logps for x in parts]), torch.cat(entropies) if entropies else None
        known, tokens = Upstream(g, e), self.tokens.select(at)
        return head_pass(
            tokens, self.head, self.needs, lambda span, _: known[span], self.chunk_bytes
        )


def _weighted_sums(
    table: Tensor, index: Tensor, offsets: Tensor, weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """[bags, H] sums of weighted rows of a table; `dtype` is that of the products."""
    if table.dtype == dtype:
        bags = (table.contiguous(), index, offsets, False, 0, False, weight.to(dtype), True)
        return torch.embedding_bag(*bags)[0]
    used, index = index.unique(return_inverse=True)
    table = table.index_select(0, used).to(dtype)
    return _weighted_sums(table, index.int(), offsets, weight, dtype)


@dataclass
class Pending:
    """Entries that are kept until dL/dlogp is known."""

    route: Route
    chunk_bytes: int | None
    parts: list[tuple[slice, Entries]] = field(default_factory=list)

    def gradients(
        self, tokens: Tokens, head: Head, needs: Needs, values: TokenValues, upstream: Upstream
    ) -> HeadResult:
        """From dL/dlogp and dL/dentropy [n] of all tokens; may be called again."""
        total = Gradients(tokens, head, needs, self.route, self.chunk_bytes)
        per_token = TokenValues(values.logps, values.entropy)
        for span, entries in self.parts:
            total.add(span, entries, select_rows(per_token, span), upstream[span])
        return total.finish()


def routed_pass(
    tokens: Tokens,
    head: Head,
    needs: Needs,
    coefficients: Coefficients | None,
    chunk_bytes: int | None,
    route: Route,
    reference: Reference | None = None,
) -> tuple[HeadResult, Pending]:
    """`chunked.head_pass` with routed gradients; without `coefficients` they wait in `Pending`.

    Matmul work: 2NHV and the kept entries, 4NHV with an exact dW, for which `coefficients` must be
    given.
    """
    n = tokens.index.numel()
    wanted = Needs(entropy=needs.entropy, statistics=needs.statistics)
    result = empty_result(tokens, head, wanted, reference)
    result.routing = result.logps.new_empty(n, 3)
    pending = Pending(route, chunk_bytes)
    total = dense_w = None
    if coefficients is not None:
        total = Gradients(tokens, head, needs, route, chunk_bytes)
        if route.dense_weight_grad(needs):
            dense_w = empty_result(tokens, head, replace(needs, hidden_grad=False), None)
    if n == 0:
        return result if total is None else with_gradients(result, total.finish()), pending
    padded = n + -n % ROUTED_ROWS
    keys = route.keys if head.shard is None else keys_of_part(route.keys, head.shard.start)
    tokens, route = tokens.padded(padded), replace(route, keys=_pad(keys, padded))
    if reference is not None:
        reference = replace(reference, tokens=reference.tokens.padded(padded))
    plan = plan_pass(tokens, head, needs, chunk_bytes, reference, routed=True)
    work = Workspace.allocate(plan, tokens, head, needs, reference, routed=True)
    with torch.no_grad(), torch.autocast(tokens.hidden.device.type, enabled=False):
        for span in slices(padded, plan.tokens):
            chunk, values = forward_chunk(tokens, head, needs, span, work, reference)
            entries = select(chunk, work, route[span], head, needs.entropy_grad)
            values.routing = entries.statistics
            real = slice(span.start, min(span.stop, n))
            entries, values = _first_rows(real.stop - real.start, entries, values)
            result.write(real, values)
            if coefficients is None or total is None:
                pending.parts.append((real, entries))
                continue
            upstream = coefficients(real, values)
            total.add(real, entries, values, upstream)
            if dense_w is not None:
                sparse = without(upstream, entries.dense).filled(span.stop - span.start)
                add_gradients(chunk, sparse, head, work.tile, work.weight_tile, dense_w)
    if head.shard is not None:
        head.shard.sum(result.routing)
    if total is None:
        return result, pending
    if dense_w is not None:
        if dense_w.weight_grad is not None and not dense_w.weight_grad_written:
            dense_w.weight_grad.zero_()
        total.add_exact(dense_w)
    return with_gradients(result, total.finish()), pending


def _pad(x: Tensor, n: int) -> Tensor:
    """x [m] with its last row repeated up to n."""
    return torch.cat([x, x[-1:].expand(n - len(x))]) if n > len(x) else x


def _first_rows(count: int, entries: Entries, values: TokenValues) -> tuple[Entries, TokenValues]:
    """Without the rows that only fill a chunk."""
    if count == len(entries.dense):
        return entries, values
    kept = entries.row < count
    slope = entries.target_slope
    entries = Entries(
        entries.row[kept],
        entries.column[kept],
        entries.value[kept],
        None if entries.log_p is None else entries.log_p[kept],
        slope[:count] if isinstance(slope, Tensor) else slope,
        entries.dense[:count],
        entries.statistics[:count],
    )
    return entries, select_rows(values, slice(count))


def without(upstream: Upstream, dense: Tensor) -> Upstream:
    """Zeros for the dense rows."""
    e = upstream.entropy
    return Upstream(
        upstream.logps.masked_fill(dense, 0), None if e is None else e.masked_fill(dense, 0)
    )


def metrics(routing: Tensor, g: Tensor, logps: Tensor, vocab: int) -> dict[str, Tensor]:
    """Of a loss with dL/dlogp g [n]: "route/kept_per_token", "route/dense_fraction" (share of the
    rows), "route/relative_noise" (of the logits' gradient, estimated: root of variance over sum of
    squares)."""
    kept, variance, squares = routing.unbind(1)
    weight = g.square()
    signal = (weight * (squares + logps.expm1().square())).sum()
    noise = (weight * variance).sum() / torch.where(signal > 0, signal, 1)
    n = max(1, len(kept))
    return {
        "route/kept_per_token": kept.sum() / n,
        "route/dense_fraction": (kept >= vocab).to(kept.dtype).sum() / n,
        "route/relative_noise": noise.sqrt(),
    }
