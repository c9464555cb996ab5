"""One step, called and replayed, gives the same bits; a number left on the host is found."""

import functools
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capturable import SETTINGS, SHAPE, TensorLamb, select_capturable
from emulated_cublaslt import Emulator, compile_emulator
from host_batches import made_up_batches
from mlbert.data.batches import HostBatch, StaticShape
from mlbert.distributed.bucket_clipping import BucketClippingReducer
from mlbert.distributed.capture import Capture, NoCapture
from mlbert.distributed.reduce import GradientReducer, cut_buckets
from mlbert.distributed.world import World
from mlbert.models.bert import BertForPreTraining
from mlbert.models.objectives import PreTraining
from mlbert.ops import api as ops
from mlbert.ops import cublaslt
from mlbert.ops import forms as registry
from mlbert.ops.fp8_scaling import Products
from mlbert.optim.flat import FlatParameters
from mlbert.optim.lamb import Lamb
from mlbert.training.step import GraphMode, Graphs, Step
from recorded_graph import RecordedGraph
from unsharded import unsharded

PACKS = 3
SEED = 5
UNCLIPPED = functools.partial(GradientReducer, clip_before=None)
RATES = (0.01, 0.02, 0.005, 0.03)
LONGEST = SHAPE.max_position_embeddings
LINEAR_OPS = ("linear", "linear_qkv", "linear_gelu", "feed_forward")
LARGE = StaticShape.of_packs(PACKS, LONGEST, 3, LONGEST, 5)


@pytest.fixture(autouse=True)
def static_ops(restore_selection: None) -> None:
    select_capturable()


def steps(accumulation: int, packs: int = PACKS) -> list[list[HostBatch]]:
    return [
        made_up_batches(
            packs * accumulation,
            SEED,
            SHAPE.vocab_size,
            LONGEST,
            accumulation=accumulation,
            step=step,
        )
        for step in range(len(RATES))
    ]


class Trainer:
    def __init__(
        self,
        dtype=torch.float32,
        products=None,
        shape=SHAPE,
        make_optimizer=TensorLamb,
        make_sync=UNCLIPPED,
    ) -> None:
        self.model = BertForPreTraining(shape, dtype, fp8_products=products)
        self.model.initialize(SEED)
        self.objective = PreTraining(scope="step")
        self.flat = FlatParameters(self.model.ordered_parameters())
        self.optimizer = make_optimizer(self.flat)
        buckets = cut_buckets(self.flat.offsets, self.flat.numel, self.flat.numel)
        self.sync = make_sync(
            self.flat.parameters, self.flat.grad, self.flat.offsets, World(), buckets
        )

    def state(self) -> list[Tensor]:
        tensors = (
            self.flat.data,
            self.flat.grad,
            self.optimizer.exp_avg,
            self.optimizer.exp_avg_sq,
            *self.model.buffers(),
        )
        copies = [tensor.clone() for tensor in tensors]
        return [*copies, torch.tensor(self.optimizer.num_updates)]

    def step(self, graphs: Graphs | None = None) -> Step:
        return Step(
            self.model,
            self.objective,
            self.flat,
            self.sync,
            self.optimizer,
            over_ranks=lambda amax: amax,
            say=print,
            graphs=graphs,
        )

    def graphed(self, mode: GraphMode, accumulation: int, capture: Capture) -> Step:
        step = self.step(Graphs(mode, LARGE, accumulation, lambda: capture))
        step.record()
        return step

    def run(
        self,
        step: Step,
        accumulation: int,
        packs: int = PACKS,
        count: int = len(RATES),
        before: Callable[[], object] = lambda: None,
    ) -> list[list[Tensor]]:
        """Return the results of steps; call `before` before each."""
        history = []
        for i, (batches, lr) in enumerate(
            zip(steps(accumulation, packs)[:count], RATES[:count], strict=True)
        ):
            counts = [
                sum(column) for column in zip(*map(self.objective.counts, batches), strict=True)
            ]
            before()
            result = step(batches, SEED, i, self.objective.divisors(counts), lr)
            norm = torch.tensor(result.grad_norm, dtype=torch.float64)
            history.append([result.loss_sum.clone(), norm, *self.state()])
        return history


class LiveMemory(TorchDispatchMode):
    """Counts the live bytes, and their peak, of tensors created while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((args, kwargs))
            if torch.is_tensor(tensor)
        }
        for storage in (
            tensor.untyped_storage() for tensor in tree_leaves(out) if torch.is_tensor(tensor)
        ):
            if storage.data_ptr() not in old:
                self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self._storages = {
            key: value for key, value in self._storages.items() if not value[0].expired()
        }
        return sum(size for _, size in self._storages.values())


class MeasuredPool:
    """A capture that notes the peak of each recorded function, which does nothing on replay, and
    the bytes alive before the first warm-up and before each recording.
    """

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory
        self.sizes = []
        self.alive = []

    def warm_up(self, function: Callable[[], None]) -> None:
        self.alive = self.alive or [self._memory.now()]
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.alive.append(self._memory.now())
        self._memory.peak = 0
        function()
        self.sizes.append(self._memory.peak - self.alive[-1])
        return lambda: None


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("mode", list(GraphMode))
@pytest.mark.parametrize(
    ("products", "accumulation"), [(None, 1), (Products(), 2)], ids=["fp32", "fp8"]
)
def test_replayed_steps_are_the_steps(products, mode, accumulation):
    """Bit for bit, over steps of different data, masks and learning rates."""
    dtype = torch.bfloat16 if products else torch.float32
    replayed = Trainer(dtype, products)
    called = Trainer(dtype, products)
    start = called.state()
    graph = RecordedGraph()
    step = replayed.graphed(mode, accumulation, graph)
    assert graph.num_operations > 100
    assert same([replayed.state()], [start]), "recording left a trace"
    found = replayed.run(step, accumulation)
    expected = called.run(called.graphed(mode, accumulation, NoCapture()), accumulation)
    assert same(found, expected)
    losses = [float(values[0]) for values in found]
    assert len(set(losses)) == len(losses), "steps that differ have losses that differ"


@pytest.mark.parametrize("mode", list(GraphMode))
def test_the_step_that_finds_scales_shares_the_graphs_memory(mode):
    """Nothing that warming up made is left when recording starts;
    the first step works in the pool.
    """
    trainer = Trainer(torch.bfloat16, Products())
    # Of no gradient: its state is there, and its temporaries are not counted below.
    trainer.optimizer.step(0.0)
    with LiveMemory() as memory:
        pool = MeasuredPool(memory)
        step = trainer.graphed(mode, 1, pool)
        pool_size = max(pool.sizes)
        assert len(pool.sizes) == 2, "one that knows its scales, one that learns them"
        assert max(pool.alive) - pool.alive[0] < 0.01 * pool_size
        assert not trainer.model.is_calibrated
        memory.peak = 0
        forward = []
        trainer.optimizer.step = lambda lr: (
            forward.append(memory.peak) or trainer.optimizer.grad_norm
        )
        before = memory.now()
        (batches, *_) = steps(1)
        step(batches, SEED, 0, (1.0, 1.0), 0.01)
        assert trainer.model.is_calibrated
        assert (forward or [memory.peak])[0] - before < 0.05 * pool_size


@pytest.mark.parametrize("mode", list(GraphMode))
def test_batches_that_vary_take_the_smallest_graph(mode):
    """Recorded with one pool and called, the same bits;
    a batch over the smaller ones takes the largest.
    """
    small, middle = (replace(LARGE, tokens=tokens) for tokens in (85, 94))

    def history(capture: Capture) -> list[list[Tensor]]:
        trainer = Trainer(torch.bfloat16, Products())
        asked: list[Capture] = []
        graphs = Graphs(
            mode, LARGE, 1, lambda: asked.append(capture) or capture, smaller=(small, middle)
        )
        step = trainer.step(graphs)
        step.record()
        assert len(asked) == 1, "one pool"
        first = {step.graph_for(batches).static_shape for batches in steps(1)}
        assert first == {LARGE}, "the step that learns the scales, whichever it is"
        found = trainer.run(step, 1)
        taken = [step.graph_for(batches).static_shape for batches in steps(1)]
        assert taken == [
            next(b for b in (small, middle, LARGE) if b.holds(*batches)) for batches in steps(1)
        ]
        assert set(taken) == {small, middle, LARGE}, "batches vary"
        assert step.graph_for([*steps(1)[0], *steps(1)[1]]) is None, (
            "of another number of micro-batches"
        )
        return found

    assert same(history(RecordedGraph()), history(NoCapture()))


@pytest.mark.parametrize("mode", list(GraphMode))
def test_a_filled_step_is_the_step_without_graphs(mode):
    """Up to rounding: batches that are filled up are summed in other pieces."""
    filled = Trainer()
    plain = Trainer()
    found = filled.run(filled.graphed(mode, 2, NoCapture()), 2)
    for values, expected in zip(found, plain.run(plain.step(), 2), strict=True):
        assert float(values[0]) == pytest.approx(float(expected[0]), rel=1e-5)
        torch.testing.assert_close(values[2], expected[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", list(GraphMode))
def test_steps_of_a_growing_batch(mode, capsys):
    """Without a graph while micro-batches are missing, with it afterwards."""
    sizes = (1, 1, 2, 2)

    def history(trainer: Trainer, step: Step) -> list[list[Tensor]]:
        found = []
        rows = zip(sizes, steps(2), RATES, strict=True)
        for number, (size, batches, lr) in enumerate(rows):
            counts = trainer.objective.counts(batches[0])
            result = step(batches[:size], SEED, number, trainer.objective.divisors(counts), lr)
            norm = torch.tensor(result.grad_norm, dtype=torch.float64)
            found.append([result.loss_sum.clone(), norm, *trainer.state()])
        return found

    def graphed(capture: Capture, **options: Any) -> list[list[Tensor]]:
        trainer = Trainer(**options)
        return history(trainer, trainer.graphed(mode, 2, capture))

    plain = Trainer()
    expected = history(plain, plain.step())
    assert capsys.readouterr().out == ""
    found = graphed(NoCapture())
    said = "step 1 runs without a graph: it has 1 of 2 micro-batches, as all steps while the "
    assert capsys.readouterr().out == f"{said}batch grows\n"
    assert same(found[:2], expected[:2])
    for values, others in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(values[2], others[2], rtol=1e-3, atol=1e-4)
    narrow = {"dtype": torch.bfloat16, "products": Products()}
    assert same(graphed(RecordedGraph(), **narrow), graphed(NoCapture(), **narrow))


def test_a_step_is_the_loss_the_gradient_and_the_update():
    """By hand, over two micro-batches: keys as numbers on the host, one divisor for both."""
    trainer = Trainer()
    plain = Trainer()
    (found, *_) = trainer.run(trainer.step(), 2)
    batches = steps(2)[0]
    masked = sum(b.num_masked for b in batches)
    samples = sum(b.num_samples for b in batches)
    divisors = [torch.tensor(masked + 1e-5), torch.tensor(float(samples))]
    keys = plain.model.dropout_keys(SEED, 0).tolist()
    total = 0.0
    for batch in batches:
        loss = plain.objective.loss(plain.model, batch.to("cpu"), keys, divisors)
        loss.backward()
        total += float(loss.detach())
    norm = plain.optimizer.step(RATES[0])
    assert float(found[0]) == pytest.approx(total, rel=1e-12)
    assert float(found[1]) == float(norm)
    assert torch.equal(found[2], plain.flat.data)


@pytest.fixture
def emulated_cublaslt(tmp_path):
    """Linear layers in bfloat16 as on a GPU."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on PATH")
    compile_emulator(tmp_path / "cublaslt.so")
    cublaslt.use(Emulator(tmp_path / "cublaslt.so").library)
    registry.select_each(dict.fromkeys(LINEAR_OPS, "cublaslt") | {"attention": "static"}, "cpu")
    yield
    cublaslt.use(None)


def poison(flat: FlatParameters) -> None:
    flat.padded_grad.fill_(torch.nan)


def poisoned_and_clean(
    accumulation: int, mode: GraphMode | None, capture: Callable[[], Capture], **options: Any
) -> None:
    """Assert that NaN in all gradients before each step changes nothing, of four steps."""
    histories = []
    for is_poisoned in (False, True):
        trainer = Trainer(**options)
        if mode is None:
            step = trainer.step()
        else:
            step = trainer.graphed(mode, accumulation, capture())
        before = functools.partial(poison, trainer.flat) if is_poisoned else lambda: None
        histories.append(trainer.run(step, accumulation, before=before))
        if mode is None:  # a replay leaves no trace on the host
            places = trainer.flat._places
            assert any(place.was_overwritten for place in places), "else all are cleared"
    clean, found = histories
    assert all(values[0].isfinite() and values[1].isfinite() for values in clean)
    assert same(found, clean)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", [None, *GraphMode])
def test_no_step_reads_the_gradients_of_the_one_before(mode, accumulation):
    """Gradients that products overwrite are not cleared; in FP8, products do."""
    poisoned_and_clean(accumulation, mode, RecordedGraph, dtype=torch.bfloat16, products=Products())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", [None, GraphMode.FULL_ITERATION])
def test_no_step_with_cublaslt_reads_the_gradients_of_the_one_before(
    emulated_cublaslt, mode, accumulation
):
    poisoned_and_clean(accumulation, mode, NoCapture, dtype=torch.bfloat16)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clipping", ["before", "buckets"])
def test_no_clipping_reads_the_gradients_of_the_step_before(clipping, accumulation):
    def make_sync(*reduced: Any) -> GradientReducer:
        if clipping == "before":
            return GradientReducer(*reduced, 1.0)
        return BucketClippingReducer(*reduced, max_norm=1.0, accumulation=accumulation)

    poisoned_and_clean(
        accumulation,
        None,
        RecordedGraph,
        dtype=torch.bfloat16,
        products=Products(),
        make_sync=make_sync,
    )


def test_steps_after_one_that_was_not_finite_are_finite():
    """Its gradients of NaN are overwritten, or cleared."""
    trainer = Trainer(torch.bfloat16, Products())
    step = trainer.step()
    trainer.run(step, 1, count=1)
    assert step(steps(1)[1], SEED, 0, (0.0, 0.0), 0.1).skipped
    assert trainer.flat.grad.isnan().any()
    for norm in (values[1] for values in trainer.run(step, 1, count=2)):
        assert norm.isfinite()


def test_skipped_step_changes_nothing():
    """A gradient that is not finite, in a graph: it is not counted,
    and the next step is as if it had not been.
    """
    trainer = Trainer()
    step = trainer.graphed(GraphMode.FULL_ITERATION, 1, RecordedGraph())
    (batches, *_) = steps(1)
    buffers = trainer.flat.data, trainer.optimizer.exp_avg, trainer.optimizer.exp_avg_sq
    before = [x.clone() for x in buffers]
    assert step(batches, SEED, 0, (0.0, 0.0), 0.1).skipped  # the loss is infinite
    assert same([before], [buffers])
    expected = Trainer()
    assert same(
        trainer.run(step, 1),
        expected.run(expected.graphed(GraphMode.FULL_ITERATION, 1, NoCapture()), 1),
    )


def test_warming_up_leaves_no_trace():
    trainer = Trainer(torch.bfloat16, Products())
    before = trainer.state()
    (unread,) = [
        i for i, (name, _) in enumerate(trainer.model.named_buffers()) if name.endswith("unread")
    ]
    trainer.step().warm_up()
    after = trainer.state()
    for values in (before, after):  # where magnitudes go that nobody wants to know
        del values[len(values) - 1 - len(list(trainer.model.buffers())) + unread]
    assert same([after], [before])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_replayed_kernels(use_triton):
    """With LAMB among them, every number baked in.

    The first step finds the scales, by its own graph.
    """
    # Heads of 32: the least that the kernels take.
    shape = replace(SHAPE, hidden_size=64, num_hidden_layers=1)
    make_optimizer = functools.partial(unsharded, Lamb, implementation="triton", **SETTINGS)
    static_shape = StaticShape.of_packs(1, LONGEST, 3, LONGEST, 5)
    ops.select("triton")

    def history(capture: Capture) -> list[list[Tensor]]:
        trainer = Trainer(torch.bfloat16, Products(), shape, make_optimizer)
        step = trainer.step(Graphs(GraphMode.FULL_ITERATION, static_shape, 1, lambda: capture))
        start = trainer.flat.data.clone()
        step.record()
        assert torch.equal(trainer.flat.data, start), "recording changed the weights"
        found = trainer.run(step, 1, packs=1, count=2)
        assert not torch.equal(trainer.flat.data, start)
        return found

    graph = RecordedGraph()
    assert same(history(graph), history(NoCapture()))
    assert graph.num_operations > 100
