"""Sums of gradients on four ranks: against one process, clipped, rounded to bfloat16,
overlapping backward.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run_ranks
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.groups import ShardGroups
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.sharding import ShardedReducer, ShardLayout
from mlbert.distributed.world import World
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb

Ranks = list[dict[str, Any]]
# float32 sums in another order, of gradients of about 1 (weights: after LAMB's division by their
# norm).
TOLERANCE = 2e-6
SAMPLES = 8
VOCABULARY = 11
WIDTH = 6
BUCKET_ELEMENTS = 50
CASES: dict[str, dict[str, Any]] = {
    "one": {"accumulation": 1, "max_norm": 0.5},
    "two": {"accumulation": 2, "max_norm": 0.5},
    "long limit": {"accumulation": 2, "max_norm": 1e6},
    "scaled": {"accumulation": 2, "max_norm": 0.5, "scale": 1024.0},
    "poisoned": {"accumulation": 2, "max_norm": 0.5, "poisoned": True},
}
# No bucket size is divisible by the number of ranks.
SHAPES = ((37, 11), (5,), (64, 64), (1,), (129,))
LIMIT = 0.5
ROUNDING = 2.0**-8  # of bfloat16
FLOAT32 = 1e-6  # several float32 additions
TINY = 1e-37  # underflows in any format


class TinyModel(nn.Module):
    """An embedding tied to the output layer, two dense layers, and an optional layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.optional = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        self.output_bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens: Tensor, use_optional: bool) -> Tensor:
        hidden = torch.tanh(self.first(self.embedding(tokens)))
        if use_optional:
            hidden = hidden + self.optional(hidden)
        hidden = self.LayerNorm(torch.tanh(self.second(hidden)))
        return hidden @ self.embedding.weight.T + self.output_bias


def loss_sum(
    model: TinyModel, tokens: Tensor, use_optional: bool = True, divisor: float = SAMPLES
) -> Tensor:
    logits = model(tokens, use_optional)
    return (
        nn.functional.cross_entropy(logits, (tokens * 3 + 1) % VOCABULARY, reduction="sum")
        / divisor
    )


def parts_of(flat: FlatParameters, world: World, bucket_elements: int) -> tuple[Any, ...]:
    """Return what every reducer of whole buckets needs."""
    buckets = cut_buckets(flat.offsets, flat.numel, bucket_elements)
    return flat.parameters, flat.grad, flat.offsets, world, buckets


def train(world: World, accumulation: int = 1) -> dict[str, Any]:
    """Train the tiny model with LAMB and a global batch of 8;
    the optional layer is used in the last update only.
    """
    torch.manual_seed(5)
    model = TinyModel()
    flat = FlatParameters(model.named_parameters())
    numbers = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    optimizer = Lamb(flat, ShardLayout.whole(flat.numel), **numbers)
    reducer = GradientReducer(*parts_of(flat, world, BUCKET_ELEMENTS), clip_before=None)
    generator = torch.Generator().manual_seed(9)
    grads = []
    losses = []
    norms = []
    for update in range(3):
        tokens = torch.randint(VOCABULARY, (SAMPLES,), generator=generator)
        flat.zero_grad()
        loss = torch.zeros(())
        mine = tokens.chunk(world.world_size)[world.rank]
        for index, part in enumerate(mine.chunk(accumulation)):
            reducer.prepare(last=index == accumulation - 1)
            part_loss = loss_sum(model, part, use_optional=update == 2)
            part_loss.backward()
            loss += part_loss.detach()
        reducer.finish()
        grads.append(flat.grad.tolist())
        losses.append(world.all_reduce_sum(loss).item())
        norms.append(float(optimizer.step(0.02)))
    return {"grads": grads, "losses": losses, "norms": norms, "weights": flat.data.tolist()}


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_training_matches_one_process(ranks: Ranks, accumulation: str) -> None:
    expected = train(World())
    found = ranks[0]["train"][accumulation]
    for key in ("losses", "grads", "norms", "weights"):
        torch.testing.assert_close(
            torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=TOLERANCE
        )
    assert [rank["train"][accumulation] for rank in ranks] == [found] * 4, (
        "all ranks must be bit-equal"
    )


def uneven_use(world: World) -> dict[str, Any]:
    """Use a layer on rank 0 only, so that buckets become ready in a different order on each
    rank.
    """
    torch.manual_seed(5)
    model = TinyModel()
    flat = FlatParameters(model.named_parameters())
    reducer = GradientReducer(*parts_of(flat, world, 1), clip_before=None)
    own: list[float] = []
    for last in (False, True):
        flat.zero_grad()
        reducer.prepare(last)
        loss_sum(model, torch.arange(4) + world.rank, use_optional=world.rank == 0).backward()
        own = own or flat.grad.tolist()
    reducer.finish()
    return {"own": own, "summed": flat.grad.tolist()}


def one_parameter(world: World) -> dict[str, Any]:
    """Return the sum of a gradient that only rank 0 has,
    and the error of a second backward pass.
    """
    parameter = nn.Parameter(torch.ones(3))
    reducer = GradientReducer(
        *parts_of(FlatParameters([("w", parameter)]), world, 3), clip_before=None
    )
    if world.rank == 0:
        reducer.prepare(last=True)
        (parameter * torch.arange(3.0)).sum().backward()
    reducer.finish()
    summed = parameter.grad.tolist()
    reducer.prepare(last=True)
    parameter.sum().backward()
    with pytest.raises(AssertionError) as caught:
        parameter.sum().backward()
    reducer.finish()
    return {"summed": summed, "error": str(caught.value)}


def test_ranks_may_use_different_parameters_or_none(ranks: Ranks) -> None:
    expected = torch.tensor([rank["uneven_use"]["own"] for rank in ranks]).sum(0)
    for rank in ranks:
        assert rank["uneven_use"]["summed"] == ranks[0]["uneven_use"]["summed"]
        torch.testing.assert_close(
            torch.tensor(rank["uneven_use"]["summed"]), expected, rtol=1e-5, atol=TOLERANCE
        )
        assert rank["one_parameter"]["summed"] == [0.0, 1.0, 2.0]
        assert "after its sum had started" in rank["one_parameter"]["error"]


def overlap(world: World, clips: bool) -> dict[str, Any]:
    """Return the buckets that are ready (clipped, if it clips) and the sums that it has chained to
    clipping when backward reaches the first of four layers, one bucket each, in each of two
    micro-batches.
    """
    layers = [nn.Linear(64, 64) for _ in range(4)]
    flat = FlatParameters(nn.Sequential(*layers).named_parameters())
    parts = parts_of(flat, world, 64 * 64)
    reducer: Any = GradientReducer(*parts, clip_before=None)
    if clips:
        reducer = BucketClippingReducer(*parts, max_norm=1.0, accumulation=2)
    reducer.warm_up()
    assert not flat.grad.any(), "warm-up must not leave gradients"
    seen: list[tuple[int, int]] = []
    for last in (False, True):
        reducer.prepare(last)
        x = layers[0](torch.ones(2, 64))
        x.register_hook(
            lambda grad: seen.append((reducer.num_started, len(reducer._chains) if clips else 0))
        )
        for layer in layers[1:]:
            x = layer(x)
        x.sum().backward()
    reducer.finish()
    return {"seen": seen, "overlapped": reducer.num_overlapped, "buckets": reducer.num_buckets}


def test_reduction_and_clipping_overlap_backward(ranks: Ranks) -> None:
    """When backward reaches the first layer, three layers have their gradients: in the earlier
    micro-batch they may already be clipped, but only in the last one their sums have started.
    """
    for rank in ranks:
        (started, _), (started_in_last, _) = rank["overlap"]["seen"]
        assert started == 0, "an earlier micro-batch must not start a sum"
        assert started_in_last >= 2
        (clipped, started), (clipped_in_last, started_in_last) = rank["overlap with clipping"][
            "seen"
        ]
        assert clipped >= 2
        assert started == 0, "an earlier micro-batch must not start a sum"
        assert clipped_in_last >= 2
        assert started_in_last == clipped_in_last
        for name in ("overlap", "overlap with clipping"):
            assert rank[name]["overlapped"] == rank[name]["buckets"] == 4


def clipped(
    world: World,
    accumulation: int,
    max_norm: float,
    scale: float | None = None,
    poisoned: bool = False,
) -> dict[str, Any]:
    """Return the clipped gradient of a step, and the gradient of this rank's mean loss for each
    micro-batch.
    """
    torch.manual_seed(5)
    model = TinyModel()
    flat = FlatParameters(model.named_parameters())
    tokens = torch.randint(VOCABULARY, (SAMPLES,), generator=torch.Generator().manual_seed(9))
    parts = tokens.chunk(world.world_size)[world.rank].chunk(accumulation)
    own = []
    for part in parts:
        flat.zero_grad()
        loss_sum(model, part, divisor=len(part)).backward()
        own.append(flat.grad.tolist())
    flat.zero_grad()
    options = {
        "accumulation": accumulation,
        "loss_scale": None if scale is None else torch.tensor(scale),
    }
    reducer = BucketClippingReducer(
        *parts_of(flat, world, BUCKET_ELEMENTS), max_norm=max_norm, **options
    )
    steps = []
    for poison in (poisoned, False):  # a skipped step must not affect the next one
        flat.zero_grad()
        for index, part in enumerate(parts):
            reducer.prepare(last=index == accumulation - 1)
            loss = loss_sum(model, part, divisor=len(part) * accumulation * world.world_size) * (
                scale or 1.0
            )
            if poison and index == 0 and world.rank == world.world_size - 1:
                loss = loss * float("inf")
            loss.backward()
        reducer.finish()
        steps.append({"grad": flat.grad.tolist(), "norm": float(reducer.grad_norm)})
    return {"own": own, "steps": steps}


@pytest.fixture(scope="module", params=[1, 4])
def clipping(request: pytest.FixtureRequest) -> Ranks:
    if request.param == 1:
        return [{name: clipped(World(), **case) for name, case in CASES.items()}]
    return [rank["clipped"] for rank in request.getfixturevalue("ranks")]


@pytest.mark.parametrize("case", [name for name in CASES if name != "poisoned"])
def test_clipped_buckets_match_the_formula(clipping: Ranks, case: str) -> None:
    """The mean over ranks and micro-batches of gradients clipped by bucket;
    the norm is the root mean square before.
    """
    found = [rank[case] for rank in clipping]
    max_norm = CASES[case]["max_norm"]
    gradients = torch.tensor([part for rank in found for part in rank["own"]], dtype=torch.float64)
    flat = FlatParameters(TinyModel().named_parameters())
    buckets = cut_buckets(flat.offsets, flat.numel, BUCKET_ELEMENTS)
    assert len(buckets) > 3
    mean = torch.zeros(flat.numel, dtype=torch.float64)
    for bucket in buckets:
        part = gradients[:, bucket.start : bucket.stop]
        limit = max_norm / math.sqrt(len(buckets)) / part.norm(dim=1, keepdim=True)
        mean[bucket.start : bucket.stop] = (part * limit.clamp(max=1.0)).mean(0)
    norm = float(gradients.square().sum(1).mean().sqrt())
    for rank in found:
        for step in rank["steps"]:
            grad = torch.tensor(step["grad"], dtype=torch.float64)
            torch.testing.assert_close(grad, mean, rtol=1e-5, atol=1e-8)
            assert step["norm"] == pytest.approx(norm, rel=1e-6)
        assert rank["steps"] == found[0]["steps"], "all ranks must be bit-equal"
    assert float(mean.norm()) <= max_norm
    if case != "long limit":
        assert float(mean.norm()) < 0.99 * norm, "something must be clipped"


def test_loss_scales_change_nothing_and_infinite_buckets_are_detected_on_every_rank(
    clipping: Ranks,
) -> None:
    """Scaling by a power of two is exact before clipping."""
    for rank in clipping:
        for scaled, plain in zip(rank["scaled"]["steps"], rank["two"]["steps"], strict=True):
            torch.testing.assert_close(
                torch.tensor(scaled["grad"]), torch.tensor(plain["grad"]), rtol=1e-6, atol=0
            )
        bad, good = rank["poisoned"]["steps"]
        assert not math.isfinite(bad["norm"])
        assert good == rank["two"]["steps"][1]


def random_gradients(num_ranks: int, scale: float = 1.0) -> list[Tensor]:
    """Return the gradients of every rank; their sizes span ten orders of magnitude."""
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    found = []
    for rank in range(num_ranks):
        generator = torch.Generator().manual_seed(rank)
        sizes = 10 ** (10 * torch.rand(numel, generator=generator) - 8)
        found.append(torch.randn(numel, generator=generator) * sizes * scale)
    return found


def make_reducer(
    world: World, way: str, in_bf16: bool, loss_scale: Tensor | None
) -> tuple[FlatParameters, Any, Any]:
    limit = LIMIT if way == "before" else None
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(SHAPES)]
    if way in ("all", "node"):
        groups = ShardGroups.inside_nodes(world) if way == "node" else ShardGroups.all_ranks(world)
        flat = FlatParameters(parameters, ShardLayout.multiple(groups))
        layout = ShardLayout(flat.padded_data.numel(), groups, 500)
        reducer = ShardedReducer(
            flat.parameters,
            flat.padded_grad,
            flat.offsets,
            world,
            layout,
            limit,
            loss_scale,
            in_bf16,
        )
        return flat, reducer, layout
    flat = FlatParameters(parameters)
    parts = parts_of(flat, world, 300)
    if way == "buckets":
        options = {"accumulation": 2, "loss_scale": loss_scale, "in_bf16": in_bf16}
        return flat, BucketClippingReducer(*parts, max_norm=LIMIT, **options), None
    return flat, GradientReducer(*parts, limit, loss_scale, in_bf16), None


def summed(
    world: World, way: str, in_bf16: bool, bad: float = 1.0, scale: float = 1.0
) -> dict[str, Any]:
    """Sum the same gradients twice, half of them in each of two micro-batches;
    return the full sum on every rank.
    """
    flat, reducer, layout = make_reducer(
        world, way, in_bf16, None if scale == 1.0 else torch.tensor(scale)
    )
    reducer.warm_up()
    own = random_gradients(world.world_size, scale)[world.rank]
    if world.rank == world.world_size - 1:
        own[100] *= bad
    results = []
    for _ in range(2):
        flat.zero_grad()
        parts = own.split([p.numel() for p in flat.parameters])
        for last in (False, True):
            reducer.prepare(last)
            sum(
                (p.flatten() * part / 2).sum()
                for p, part in zip(flat.parameters, parts, strict=True)
            ).backward()
        reducer.finish()
        if layout is not None:
            layout.all_gather(flat.padded_grad)
        results.append(flat.grad.tolist())
    assert str(results[0]) == str(results[1]), "repeated sums must be bit-equal"
    return {"sum": results[0], "overlapped": reducer.num_overlapped, "buckets": reducer.num_buckets}


def everything(world: World) -> dict[str, Any]:
    """Run all programs with the ranks started once,
    since starting takes longer than the programs.
    """
    ways = ("whole", "before", "buckets", "all", "node")
    return {
        "train": {str(n): train(world, n) for n in (1, 2)},
        "uneven_use": uneven_use(world),
        "one_parameter": one_parameter(world),
        "overlap": overlap(world, clips=False),
        "overlap with clipping": overlap(world, clips=True),
        "clipped": {name: clipped(world, **case) for name, case in CASES.items()},
        "bf16": {way: summed(world, way, True) for way in ways},
        "fp32": {way: summed(world, way, False) for way in ways},
        "scaled": summed(world, "whole", True, scale=1024.0),
        "bad": {way: summed(world, way, True, bad=float("nan")) for way in ("whole", "node")},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(everything, 4, tmp_path_factory.mktemp("ranks"), node_size=2)


def assert_within(found: Tensor, addends: Tensor, roundings: tuple[float, float]) -> None:
    total = addends.sum(0)
    bound = (
        roundings[0] * addends.abs().sum(0)
        + roundings[1] * total.abs()
        + FLOAT32 * addends.abs().sum(0)
        + TINY
    )
    assert ((found - total).abs() <= bound).all()


@pytest.mark.parametrize(
    ("way", "roundings"),
    [
        ("whole", (ROUNDING, ROUNDING * (1 + ROUNDING))),
        ("all", (ROUNDING, 0.0)),
        # Partial sums are rounded again between nodes, and so is their sum.
        ("node", (2 * ROUNDING + ROUNDING**2, 2 * ROUNDING)),
    ],
)
def test_sums_are_bit_equal_and_within_the_error_bound(
    ranks: Ranks, way: str, roundings: tuple[float, float]
) -> None:
    shares = torch.stack(random_gradients(4)).double()
    for form, allowed in (("fp32", (0.0, 0.0)), ("bf16", roundings)):
        assert all(rank[form][way] == ranks[0][form][way] for rank in ranks)
        found = torch.tensor(ranks[0][form][way]["sum"], dtype=torch.float64)
        # A sum that cancels is rounded relative to its computed value,
        # which may be off by one addend's rounding.
        assert_within(found, shares, (allowed[0] + allowed[1] * allowed[0], allowed[1]))
    assert ranks[0]["bf16"][way]["sum"] != ranks[0]["fp32"][way]["sum"], "bf16 must round"


def test_rounded_sums_overlap_backward_unless_they_are_clipped_before(ranks: Ranks) -> None:
    """Each rank clips its gradient in float32 and then rounds it for the reduction."""
    overlapped = {way: found["overlapped"] for way, found in ranks[0]["bf16"].items()}
    buckets = {way: found["buckets"] for way, found in ranks[0]["bf16"].items()}
    assert overlapped == {**buckets, "before": 0}
    assert min(buckets.values()) > 1
    own = torch.stack(random_gradients(4)).double() * 4
    addends = own * (LIMIT / own.norm(dim=1, keepdim=True)).clamp(max=1.0) / 4
    for form, roundings in (("fp32", (0.0, 0.0)), ("bf16", (2 * ROUNDING, ROUNDING))):
        assert_within(torch.tensor(ranks[0][form]["before"]["sum"]).double(), addends, roundings)


def test_clipped_buckets_match_float32_up_to_rounding(ranks: Ranks) -> None:
    exact, rounded = (torch.tensor(ranks[0][form]["buckets"]["sum"]) for form in ("fp32", "bf16"))
    assert float(exact.norm()) <= LIMIT
    assert float((exact - rounded).norm()) <= 3 * ROUNDING * float(exact.norm())


@pytest.mark.parametrize("way", ["whole", "node"])
def test_non_finite_values_stay_in_place(ranks: Ranks, way: str) -> None:
    for rank in ranks:
        found = rank["bad"][way]["sum"]
        good = rank["bf16"][way]["sum"]
        assert [i for i, value in enumerate(found) if not math.isfinite(value)] == [100]
        assert found[:100] + found[101:] == good[:100] + good[101:]
        assert rank["scaled"]["sum"] == rank["bf16"]["whole"]["sum"], (
            "scaling by a power of two is exact"
        )
