"""The parts of the GPU check: each writes JSON files, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mlbert
from gpu_check import collectives, external, gemm, product
from gpu_check.end_to_end import EndToEnd
from gpu_check.hardware import device_name, environment_facts
from gpu_check.ladder import Ladder, Rung, Sizes, fp8_rungs, rungs
from gpu_check.op_cases import OpCases
from gpu_check.op_checks import check_rows
from gpu_check.op_speed import speed_rows
from gpu_check.profile import profile_step
from gpu_check.rows import Rows
from gpu_check.tables import read_rows
from mlbert.config.bert_config import BertConfig
from mlbert.data.loading.batches import StaticShape
from mlbert.ops import api as ops
from mlbert.programs.bench.step_time import make_batch

SEED = 1
# What the record tries besides the published settings.
VARIANTS = (("CUDA_GRAPH_MODE", "none"), ("FP8_FAST_ACCUMULATION", "forward"), ("OPS", "triton"), ("OPS", "flash"))
CONFIGS = Path(mlbert.__file__).resolve().parents[1] / "configs"


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        config: the model.
        check_config: the model whose parameters LAMB is checked on.
        compiled, checked, timed: sequences of the calls that compile kernels, the checks and the micro-benchmarks.
        sizes: sequences of the steps.
        packs: of the product's steps, in two sizes.
        op_seconds, step_seconds, record_seconds: measuring time of a row.
        numel: numbers that a collective exchanges.
        loss_packs, loss_steps: of the comparison of losses.
    """

    config: BertConfig
    check_config: BertConfig
    compiled: int
    checked: int
    timed: int
    sizes: Sizes
    packs: tuple[int, int]
    op_seconds: float
    step_seconds: float
    record_seconds: float
    numel: int
    loss_packs: int
    loss_steps: int


def full_scale() -> Scale:
    """BERT-large at the sizes of training."""
    large = BertConfig.from_json(CONFIGS / "large.json")
    two_layers = BertConfig(**{**vars(large), "num_hidden_layers": 2})
    return Scale(large, two_layers, 8, 48, 448, Sizes(448, 32, 96), (48, 224), 0.3, 3.0, 20.0, 1 << 26, 8, 200)


def tiny_scale() -> Scale:
    """For the rehearsal on a CPU: seconds even in Triton's interpreter."""
    tiny = BertConfig(
        vocab_size=1018,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=64,
        max_position_embeddings=48,
    )
    return Scale(tiny, tiny, 1, 2, 2, Sizes(2, 1, 1), (1, 2), 0.0, 0.0, 0.0, 16, 1, 2)


@dataclass(frozen=True)
class Bench:
    """What a part measures with.

    Attributes:
        rows: takes the measurements.
        scale: how large everything is.
        device: where to compute.
        share: name of this process's share of the part.
        work: folder of this run's rows; the folders of the other runs are next to it.
    """

    rows: Rows
    scale: Scale
    device: torch.device
    share: str
    work: Path

    @property
    def rehearses(self) -> bool:
        return self.device.type != "cuda"

    @property
    def shape(self) -> BertConfig | None:
        """The product's shape where it is not the published one."""
        return self.scale.config if self.rehearses else None

    def ladder(self) -> Ladder:
        scale = self.scale
        return Ladder(scale.config, self.device, torch.bfloat16, scale.sizes, scale.step_seconds, SEED)

    def cases(self, sequences: int) -> OpCases:
        batch = make_batch(self.scale.config, sequences, None, SEED).to(self.device)
        return OpCases(self.scale.config, batch, torch.bfloat16)

    def two_layers(self, precision: str) -> product.Product:
        """Return the product's step with two layers and without a graph."""
        changes = {"BATCHSIZE": str(self.scale.packs[0]), "CUDA_GRAPH_MODE": "none"}
        resolved = product.configured(precision, self.work, changes, self.scale.check_config)
        return product.Product(resolved, self.device)


def compile_kernels(bench: Bench) -> None:
    """Run a share of the ops and steps once, small, so that Triton's cache holds the kernels; one share is nvcc's.

    What fails here fails again where it is checked.
    """
    if bench.share == "fmha":
        bench.rows.measure("csrc/fmha", external.build_fmha)
        return
    first, count = map(int, bench.share.split("-of-"))
    for name, call in list(compile_calls(bench))[first::count]:
        bench.rows.measure(name, partial(_compiled, call))


def _compiled(call: Callable[[], object]) -> dict[str, Any]:
    call()
    return {}


def compile_calls(bench: Bench) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call): steps of all precisions, every check. The longest come first."""
    config, device = bench.scale.check_config, bench.device
    host = make_batch(config, bench.scale.compiled, None, SEED)
    ladder = Ladder(config, device, torch.bfloat16, Sizes(*(3 * [bench.scale.compiled])), 0.0, SEED)
    best = rungs(device, ladder.sizes)[-1]

    def step(rung: Rung) -> object:
        return ladder.side(rung, host).step()

    for rung in [*fp8_rungs(device, best), best]:
        yield rung.name, partial(step, rung)
    shape = StaticShape.over([host])
    filled = shape.allocate(device)
    shape.write(host, filled)
    # Both: some kernels are compiled for numbers of tokens that 16 divides, and once more for others.
    for name, batch in {"": host.to(device), ", filled": filled}.items():
        for check, row in check_rows(config, OpCases(config, batch, torch.bfloat16)):
            yield f"{check}{name}", row


def smoke(bench: Bench) -> None:
    """The published configuration's step, FP8 first: of as many packs as a GPU has in the runs of eight, and alone."""
    for packs in bench.scale.packs:
        for precision in product.CONFIGS:
            bench.rows.measure(
                f"{precision}, {packs} packs", _product(bench, precision, packs, bench.scale.step_seconds)
            )


def record(bench: Bench) -> None:
    """The same for longer, and what each setting of it is worth."""
    small, large = bench.scale.packs
    for packs in (large, small):
        for precision in product.CONFIGS:
            row = _product(bench, precision, packs, bench.scale.record_seconds)
            bench.rows.measure(f"{precision}, {packs} packs", row)
    for name, value in VARIANTS:
        row = _product(bench, "fp8", small, bench.scale.step_seconds, {name: value})
        bench.rows.measure(f"fp8, {small} packs, {name}={value}", row)


def losses(bench: Bench) -> None:
    """The losses of the same steps in bfloat16, in FP8, and in FP8 with exact accumulation in gradients."""
    slow = {"FP8_FAST_ACCUMULATION": "forward"}
    for name, precision, changes in (("bf16", "bf16", {}), ("fp8", "fp8", {}), ("fp8, exact gradients", "fp8", slow)):
        bench.rows.measure(name, partial(_losses, bench, precision, changes))


def _losses(bench: Bench, precision: str, changes: Mapping[str, str]) -> dict[str, Any]:
    changes = {"BATCHSIZE": str(bench.scale.loss_packs), **changes}
    step = product.Product(product.configured(precision, bench.work, changes, bench.shape), bench.device)
    found = step.losses(bench.scale.loss_steps)
    return {"losses": found[::10], "mean_of_last_20": sum(found[-20:]) / len(found[-20:])}


def _product(
    bench: Bench, precision: str, packs: int, seconds: float, changes: Mapping[str, str] | None = None
) -> Callable[[], dict[str, Any]]:
    arguments = (precision, packs, bench.work, bench.device, seconds, bench.shape, changes or {})
    return partial(product.measure_largest, *arguments)


def checks(bench: Bench) -> None:
    """Every implementation against its plain twin at the model's sizes; then the same under compute-sanitizer."""
    for name, row in check_rows(bench.scale.check_config, bench.cases(bench.scale.checked)):
        bench.rows.measure(name, row)
    bench.rows.measure("compute-sanitizer", lambda: external.sanitize(bench.work, bench.rehearses))


def speed(bench: Bench) -> None:
    """Micro-benchmarks: the products of the step in each precision, then all forms of all ops."""
    for precision in product.CONFIGS:
        for name, row in gemm.rows(partial(bench.two_layers, precision), device_name(bench.device)).items():
            bench.rows.measure(name, row)
    for name, row in speed_rows(bench.scale.config, bench.cases(bench.scale.timed), bench.scale.op_seconds):
        bench.rows.measure(name, row)


def profiles(bench: Bench) -> None:
    """Where the time of the product's replays goes."""
    for precision in product.CONFIGS:
        bench.rows.measure(f"replay in {precision}", partial(profiled_replay, bench, precision))


def profiled_replay(bench: Bench, precision: str) -> dict[str, Any]:
    """Profile the replay of the product's graph."""
    changes = {"BATCHSIZE": str(bench.scale.packs[0])}
    resolved = product.configured(precision, bench.work, changes, bench.shape)
    step = product.Product(resolved, bench.device)
    return profile_step(step, torch.bfloat16)


def train(bench: Bench) -> None:
    """``mlbert train`` from its start to its end."""
    if bench.rehearses:
        run = EndToEnd(bench.scale.config, bench.work, 2, 1, 600.0, "none")
    else:
        run = EndToEnd(bench.scale.check_config, bench.work, bench.scale.packs[0], 16)
    for name, row in run.rows():
        bench.rows.measure(name, row)


def counters(bench: Bench) -> None:
    """What ncu counts of the kernels that took most of the time of the profiled replays."""
    for kernel in external.costliest(read_rows(bench.work.with_name("run1"), "profile")):
        bench.rows.measure(kernel, partial(external.count_kernel, kernel, bench.work, bench.rehearses))


def nccl(bench: Bench) -> None:
    """Collectives in a group of one rank."""
    with collectives.one_rank(bench.device):
        for name, row in collectives.rows(bench.device, bench.scale.numel, bench.scale.op_seconds):
            bench.rows.measure(name, row)


def step(bench: Bench) -> None:
    """The ladder, and Hugging Face."""
    for name, row in bench.ladder().rows():
        bench.rows.measure(name, row)


def counted(bench: Bench) -> None:
    """What ncu runs; it counts in the step alone, not in the proofs and the short warm-up before."""
    made = bench.two_layers("fp8")
    with nullcontext() if bench.rehearses else torch.cuda.profiler.profile():
        made.step()


def sanitized(bench: Bench) -> None:
    """What compute-sanitizer runs."""
    for name, row in check_rows(bench.scale.check_config, bench.cases(bench.scale.compiled)):
        print(name, row(), flush=True)


MEASURED: dict[str, Callable[[Bench], None]] = {
    "compile": compile_kernels,
    "smoke": smoke,
    "checks": checks,
    "ops": speed,
    "profile": profiles,
    "train": train,
    "counters": counters,
    "nccl": nccl,
    "step": step,
    "record": record,
    "losses": losses,
}
UNDER_TOOLS: dict[str, Callable[[Bench], None]] = {"counted": counted, "sanitized": sanitized}


def run_part(part: str, share: str, path: Path, device: torch.device) -> None:
    """Measure one part, or a share of it, into `path`, behind the rows that are there; on a CPU at small sizes.

    Raises:
        gpu_check.rows.DeviceLost: this process can measure no more; a new one can go on.
    """
    scale = full_scale() if device.type == "cuda" else tiny_scale()
    if device.type != "cuda":
        torch.set_num_threads(1)
    ops.select("auto", device)
    torch.manual_seed(SEED)
    rows = Rows(path, device, environment_facts(device))
    (MEASURED | UNDER_TOOLS)[part](Bench(rows, scale, device, share, path.parent))
