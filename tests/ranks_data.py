"""Data parallelism: averaged gradients of every parameter against one process with all the data."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import case, counted_collectives, everyone, of_all, rank, summed, world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fused_grpo import grpo_loss, linear_logprobs
from fused_grpo.aggregation import PRESETS, SCHEMES
from fused_grpo.distributed import full_weight, union_token_weights

VOCAB, WIDTH, LENGTH = 61, 16, 7
TOLERANCE = 1e-5
# rows of each rank, and groups of samples: some lie on two ranks
SPLITS = {2: [0, 5, 8], 4: [0, 1, 4, 6, 8]}
GROUPS = torch.tensor([3, 3, 3, 9, 9, 9, 5, 5])


class Net(nn.Module):
    """A trunk and a head; its forward is a loss, as the hooks of wrappers want it."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, function: Callable[[Tensor, nn.Module], Any], ids: Tensor) -> Any:
        return function(self.body(self.embedding(ids)), self.head)


def net(tied: bool = False) -> Net:
    torch.manual_seed(3)
    return Net(tied)


class Data:
    """Eight sequences, ragged, one of them masked, and the part of them that this rank has."""

    def __init__(self, part: slice | None = None, empty_rank: bool = True) -> None:
        g = torch.Generator().manual_seed(1)
        cuts = SPLITS[world()]
        mask = torch.ones(8, LENGTH, dtype=torch.long)
        for row in range(8):
            mask[row, 1 + (5 * row) % LENGTH :] = 0
        mask[3] = 0
        if empty_rank:
            mask[cuts[-2] :] = 0  # the last rank has no token that counts
        advantages = torch.randn(8, generator=g)
        advantages[: cuts[1]] = 0  # the first has groups of zero variance only
        part = slice(cuts[rank()], cuts[rank() + 1]) if part is None else part
        self.input = torch.randint(VOCAB, (8, LENGTH), generator=g)[part]
        self.ids = torch.randint(VOCAB, (8, LENGTH), generator=g)[part]
        self.old = (torch.randn(8, LENGTH, generator=g) * 0.3 - 4)[part]
        self.mask, self.advantages, self.groups = mask[part], advantages[part], GROUPS[part]
        self.total = int(mask.sum())

    def loss(self, hidden: Tensor, head: Any, **options: Any) -> Any:
        weight, bias = (full_weight(x) if x is not None else None for x in (head.weight, head.bias))
        assert weight is not None
        return grpo_loss(
            hidden,
            weight,
            self.ids,
            self.advantages,
            bias=bias,
            completion_mask=self.mask,
            ref_per_token_logps=self.old,  # so that zero advantages still have gradients
            old_per_token_logps=self.old,
            beta=0.1,
            **options,
        )

    def through(self, model: nn.Module, **options: Any) -> Any:
        return model(lambda hidden, head: self.loss(hidden, head, **options), self.input)


ALL_ROWS = slice(0, 8)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(got: nn.Module, want: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Gradients, relative to the norm of each."""
    expected = dict(want.named_parameters())
    named = {k.removeprefix("module."): p for k, p in got.named_parameters()}
    assert named.keys() == expected.keys()
    for name, p in named.items():
        reference = expected[name].grad
        assert reference is not None, name
        assert p.grad is not None, name
        if isinstance(p, DTensor):
            assert isinstance(p.grad, DTensor), name
            assert p.grad.placements == p.placements, name
        error = (whole(p.grad) - reference).norm() / reference.norm()
        assert error <= tolerance, f"{name}: {error:.1e}"


def needs_of(scheme: str) -> dict[str, Any]:
    needs = SCHEMES[PRESETS.get(scheme, scheme)].needs
    given = {"max_completion_length": 6, "group_ids": None}
    return {name: given[name] for name in needs}


def ddp_reductions() -> None:
    """D1, R3: Every scheme and every preset, averaged by DDP."""
    ours, alone = DistributedDataParallel(net()), net()
    mine, union = Data(), Data(ALL_ROWS)
    for scheme in (*SCHEMES, *PRESETS):
        needs, given = needs_of(scheme), needs_of(scheme)
        if "group_ids" in needs:
            needs["group_ids"], given["group_ids"] = mine.groups, union.groups
        ours.zero_grad()
        alone.zero_grad()
        weights = union_token_weights(mine.mask, scheme, **needs)
        loss = mine.through(ours, token_weights=weights).loss
        loss.backward()
        expected = union.through(alone, aggregation=scheme, **given).loss
        expected.backward()
        error = (summed(loss) / world() - expected).abs()
        assert error <= TOLERANCE * expected.abs(), (scheme, error)
        compare(ours, alone)


def ddp_totals() -> None:
    """The recipe without the helper: global counts, and the loss times the number of ranks."""
    ours, alone = DistributedDataParallel(net()), net()
    mine, union = Data(), Data(ALL_ROWS)
    for options in (
        {"loss_type": "dapo", "num_items_in_batch": mine.total},
        {"loss_type": "grpo", "num_sequences": 8},
        {"loss_type": "dr_grpo", "num_sequences": 8, "max_completion_length": 6},
        {"loss_type": "luspo", "num_sequences": 8},
    ):
        ours.zero_grad()
        alone.zero_grad()
        (mine.through(ours, **options).loss * world()).backward()
        union.through(alone, **options).loss.backward()
        compare(ours, alone)


def ddp_accumulated() -> None:
    """The weights of all calls of a step, cut: their losses add up without a factor."""
    ours, alone = DistributedDataParallel(net()), net()
    cuts = [0, 4, 8] if world() == 2 else [0, 2, 4, 6, 8]
    begin, end = cuts[rank()], cuts[rank() + 1]
    weights = union_token_weights(Data(slice(begin, end)).mask, "sequence_mean")
    for i, row in enumerate(range(begin, end)):
        ours.require_backward_grad_sync = row == end - 1
        data = Data(slice(row, row + 1))
        data.through(ours, token_weights=weights[i : i + 1]).loss.backward()
    Data(ALL_ROWS).through(alone, aggregation="sequence_mean").loss.backward()
    compare(ours, alone)


def ddp_with_shared_sequences() -> None:
    """Two pairs of ranks, each with its sequences, whose tokens the two share: the normalisers are
    over all data, and every sequence counts once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank() // 2]
    rows = slice(0, 5) if rank() < 2 else slice(5, 8)
    positions = slice(0, 3) if rank() % 2 == 0 else slice(3, LENGTH)
    ours, alone = DistributedDataParallel(net()), net()
    data, union = Data(rows), Data(ALL_ROWS)
    for name in ("input", "ids", "old", "mask"):
        setattr(data, name, getattr(data, name)[:, positions])
    for scheme in SCHEMES:
        needs, given = needs_of(scheme), needs_of(scheme)
        if "group_ids" in needs:
            needs["group_ids"], given["group_ids"] = data.groups, union.groups
        level = {"importance_sampling_level": "sequence"}
        ours.zero_grad()
        alone.zero_grad()
        weights = union_token_weights(data.mask, scheme, sequence_group=mine, **needs)
        data.through(ours, token_weights=weights, sequence_group=mine, **level).loss.backward()
        union.through(alone, aggregation=scheme, **given, **level).loss.backward()
        compare(ours, alone)


case(ddp_reductions)
case(ddp_totals)
case(ddp_accumulated)
case(ddp_with_shared_sequences, worlds=[4])


# --- FSDP2 ---------------------------------------------------------------------------------------


def sharded(model: Any, **how: Any) -> Any:
    mesh = init_device_mesh("cpu", (world(),))
    how = {"mesh": mesh, "reshard_after_forward": True} | how
    fully_shard(model.body, **how)
    return fully_shard(model, **how)


def fsdp(tied: bool, reduction: str, frozen: bool = False) -> None:
    """D4: The head inside the module's forward. Unreduced losses compute the logits again in the
    backward, after the weight has been resharded."""
    ours, alone = net(tied), net(tied)
    if frozen:
        for model in (ours, alone):
            model.head.requires_grad_(False)
    ours = sharded(ours)
    mine, union = Data(), Data(ALL_ROWS)
    share = torch.linspace(0.5, 1.5, 8 * LENGTH).view(8, LENGTH)
    cuts = SPLITS[world()]
    if reduction == "none":
        out = mine.through(ours, reduction="none")
        (out.loss * share[cuts[rank()] : cuts[rank() + 1]]).sum().mul(world()).backward()
        (union.through(alone, reduction="none").loss * share).sum().backward()
    else:
        mine.through(ours, token_weights=union_token_weights(mine.mask)).loss.backward()
        union.through(alone).loss.backward()
    if frozen:
        assert ours.head.weight.grad is None
        ours.head, alone.head = nn.Identity(), nn.Identity()
    compare(ours, alone)


for tied in (False, True):
    for reduction in ("sum", "none"):
        of = f"{'tied' if tied else 'untied'}-{reduction}"
        worlds = [2, 4] if of in ("untied-sum", "tied-none") else [2]
        case(fsdp, worlds=worlds, of=of, tied=tied, reduction=reduction)
case(fsdp, worlds=[2], of="frozen", tied=False, reduction="sum", frozen=True)


def fsdp_in_bf16() -> None:
    """Parameters and gradients in bf16, their mean over the ranks in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = sharded(net(), mp_policy=policy)
    mine = Data()
    mine.through(ours, token_weights=union_token_weights(mine.mask)).loss.backward()
    rounded, want = net().bfloat16(), net()
    mine.through(rounded, token_weights=union_token_weights(mine.mask)).loss.backward()
    for p, q in zip(want.parameters(), rounded.parameters(), strict=True):
        assert q.grad is not None
        p.grad = summed(q.grad.float()) / world()
    compare(ours, want)


def fsdp_of_transformers(tied: bool) -> None:
    """`add_head_forward` on a sharded transformers model."""
    transformers = pytest.importorskip("transformers")
    from fused_grpo.integrations.models import add_head_forward

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(5)
    alone = transformers.LlamaForCausalLM(config)
    ours = copy.deepcopy(alone)
    for model in (alone, ours):
        add_head_forward(model)
    mesh = init_device_mesh("cpu", (world(),))
    for layer in ours.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh, reshard_after_forward=True)
    for step in range(2):
        for model, data in ((ours, Data()), (alone, Data(ALL_ROWS))):
            weights = union_token_weights(data.mask) if model is ours else None

            def head_fn(hidden: Tensor, head: Any, data: Data = data, w: Any = weights) -> Any:
                return data.loss(hidden, head, token_weights=w)

            model(input_ids=data.input, head_fn=head_fn).loss.backward()
        compare(ours, alone, TOLERANCE * (1 + step))


def dtensor_directly() -> None:
    """D4: A sharded weight given from outside of its module's forward."""
    alone = net()
    ours = net()
    body = fully_shard(ours.body)
    fully_shard(ours.head)
    mine, union = Data(), Data(ALL_ROWS)
    hidden = body(ours.embedding(mine.input))
    with pytest.raises(ValueError, match=r"not DTensors.*full_weight.*process_group"):
        linear_logprobs(hidden, ours.head.weight, mine.ids)
    with counted_collectives() as called:
        loss = mine.loss(hidden, ours.head, token_weights=union_token_weights(mine.mask)).loss
        loss.backward()
    assert len({tuple(c) for c in of_all(called)}) == 1
    union.through(alone).loss.backward()
    for p in ours.embedding.parameters():  # not wrapped
        assert p.grad is not None
        p.grad = summed(p.grad) / world()
    compare(ours, alone)


def dtensor_summed() -> None:
    """average=False: the sum of the ranks' gradients."""
    mesh = init_device_mesh("cpu", (world(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(VOCAB, 3), mesh, [Shard(0)]))
    full = full_weight(weight, average=False)
    assert full.shape == (VOCAB, 3)
    (full * (rank() + 1)).sum().backward()
    assert isinstance(weight.grad, DTensor)
    assert (whole(weight.grad) == sum(range(1, world() + 1))).all()


def dtensor_of_a_vocabulary() -> None:
    """A mesh that shards the vocabulary of a tensor-parallel head: the local rows and its group."""
    mesh = init_device_mesh("cpu", (world(),))
    torch.manual_seed(0)
    rows = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    targets = torch.tensor([0, 60, 31, -100, 16])
    weight = nn.Parameter(distribute_tensor(rows, mesh, [Shard(0)]))
    full = rows.clone().requires_grad_()
    out = linear_logprobs(hidden, weight.to_local(), targets, process_group=mesh.get_group())
    want = linear_logprobs(hidden, full, targets, backend="reference")
    torch.testing.assert_close(out.logps, want.logps)
    out.logps.sum().backward()
    want.logps.sum().backward()
    torch.testing.assert_close(whole(weight.grad), full.grad)


case(fsdp_in_bf16, worlds=[2])
for tied in (False, True):
    case(fsdp_of_transformers, worlds=[2], of="tied" if tied else "untied", tied=tied)
for function in (dtensor_directly, dtensor_summed, dtensor_of_a_vocabulary):
    case(function)


# --- ZeRO-3 --------------------------------------------------------------------------------------


class Status(enum.Enum):  # the names of deepspeed.runtime.zero.partition_parameters
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def partitioned(parameter: Any) -> Any:
    """Gives a parameter what ZeRO-3 gives it: attributes, methods, and a hook that reduces its
    gradient to this rank's part as soon as it has been accumulated."""
    parameter.ds_id, parameter.ds_shape = id(parameter), parameter.shape
    parameter.ds_numel = parameter.numel()
    parameter.gathers = 0

    def own_part(x: Tensor) -> Tensor:
        size = -(-x.numel() // world())
        flat = torch.cat([x.detach().reshape(-1), x.new_zeros(size * world() - x.numel())])
        return flat[rank() * size :][:size]

    def partition(param_list: list[Any], has_been_updated: bool = False) -> None:
        for p in param_list:
            assert p.ds_status is Status.AVAILABLE
            if has_been_updated or not hasattr(p, "ds_tensor"):
                p.ds_tensor = own_part(p.data).clone()
            p.data = torch.empty(0)
            p.ds_status = Status.NOT_AVAILABLE

    def all_gather(param_list: list[Any]) -> None:
        for p in param_list:
            if p.ds_status is Status.AVAILABLE:
                continue
            parts = [torch.empty_like(p.ds_tensor) for _ in range(world())]
            dist.all_gather(parts, p.ds_tensor)
            p.data = torch.cat(parts)[: p.ds_numel].view(p.ds_shape)
            p.ds_status = Status.AVAILABLE
            p.gathers += 1

    def reduce(p: Any) -> None:
        p.ds_grad = own_part(summed(p.grad) / world())
        p.grad = None

    # made while the parameter is whole, and kept, as DeepSpeed does
    parameter.accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    parameter.register_post_accumulate_grad_hook(reduce)
    parameter.all_gather, parameter.partition = all_gather, partition
    parameter.ds_status = Status.AVAILABLE
    partition([parameter])
    return parameter


class GatheredParameters:
    """deepspeed.zero.GatheredParameters, for reading."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def __enter__(self) -> None:
        self.parameters[0].all_gather(param_list=self.parameters)

    def __exit__(self, *_: object) -> None:
        self.parameters[0].partition(param_list=self.parameters, has_been_updated=False)


class GatheredModule(nn.Module):
    """A module whose parameters are gathered around its forward and around its backward, as
    DeepSpeed's hooks do it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        parameters = list(self.inner.parameters())
        with GatheredParameters(parameters):
            out: Tensor = self.inner(x)

        def before(_: Tensor) -> None:
            parameters[0].all_gather(param_list=parameters)

        def after() -> None:
            held = [p for p in parameters if p.ds_status is Status.AVAILABLE]
            parameters[0].partition(param_list=held)

        def around(gradient: Tensor) -> None:
            before(gradient)
            torch.autograd.Variable._execution_engine.queue_callback(after)  # type: ignore[attr-defined]

        out.register_hook(around)
        return out


def zero3(tied: bool, reduction: str) -> None:
    """D2: A weight that is partitioned between its forward and its backward is gathered in both."""
    ours, alone = net(tied), net(tied)
    parameters = dict(ours.named_parameters())
    for p in parameters.values():
        partitioned(p)
    ours.embedding = GatheredModule(ours.embedding)  # type: ignore[assignment]
    ours.body = GatheredModule(ours.body)  # type: ignore[assignment]
    mine, union = Data(), Data(ALL_ROWS)
    share = torch.linspace(0.5, 1.5, 8 * LENGTH).view(8, LENGTH)
    cuts = SPLITS[world()]
    if reduction == "none":
        out = mine.through(ours, reduction="none")
        loss = (out.loss * share[cuts[rank()] : cuts[rank() + 1]]).sum() * world()
        (union.through(alone, reduction="none").loss * share).sum().backward()
    else:
        loss = mine.through(ours, token_weights=union_token_weights(mine.mask)).loss
        union.through(alone).loss.backward()
    weight: Any = parameters["embedding.weight" if tied else "head.weight"]
    for p in parameters.values():
        assert p.numel() == 0
    gathers = weight.gathers
    loss.backward()
    for name, p in parameters.items():
        assert p.numel() == 0, f"{name} was not partitioned again"
        assert p.grad is None
        want = dict(alone.named_parameters())[name].grad
        assert want is not None
        parts = [torch.empty_like(p.ds_grad) for _ in range(world())]
        dist.all_gather(parts, p.ds_grad)
        error = (torch.cat(parts)[: want.numel()].view_as(want) - want).norm() / want.norm()
        assert error <= TOLERANCE, f"{name}: {error:.1e}"
    assert weight.gathers == gathers + 1
    assert len(set(of_all(weight.gathers))) == 1


for tied in (False, True):
    for reduction in ("sum", "none"):
        of = f"{'tied' if tied else 'untied'}-{reduction}"
        worlds = [2, 4] if of == "tied-sum" else [2]
        case(zero3, worlds=worlds, of=of, tied=tied, reduction=reduction)


def zero3_by_hand() -> None:
    """A partitioned weight is refused by name; gathered by the caller it stays gathered; one that
    is being prefetched is refused; a frozen one is gathered once."""
    mine = Data()
    head: Any = net().head
    partitioned(head.weight)
    hidden = torch.randn(*mine.ids.shape, WIDTH)
    with pytest.raises(ValueError, match=r"ZeRO-3.*full_weight"):
        linear_logprobs(hidden, head.weight, mine.ids)
    with GatheredParameters([head.weight]):
        full_weight(head.weight)
        assert head.weight.ds_status is Status.AVAILABLE
    head.weight.ds_status = Status.INFLIGHT
    with pytest.raises(ValueError, match="INFLIGHT"):
        full_weight(head.weight)
    head.weight.ds_status = Status.NOT_AVAILABLE
    head.weight.requires_grad_(False)
    hidden.requires_grad_()
    before = head.weight.gathers
    weight = full_weight(head.weight)
    assert not weight.requires_grad
    linear_logprobs(hidden, weight, mine.ids).logps.sum().backward()
    assert head.weight.gathers == before + 1
    assert head.weight.numel() == 0
    assert hidden.grad is not None
    assert hidden.grad.any() or not mine.ids.numel()
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor"):
        full_weight("lm_head")  # type: ignore[arg-type]
    plain = torch.ones(2, 2)
    assert full_weight(plain) is plain
    assert everyone() is not None


case(zero3_by_hand, worlds=[2])
