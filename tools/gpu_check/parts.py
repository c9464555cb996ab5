"""The parts of the GPU check, each of which writes a JSON file row by row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_check import collectives, external, gemm, published_step
from gpu_check.end_to_end import EndToEnd
from gpu_check.hardware import environment_facts
from gpu_check.ladder import Ladder, Rung, Sizes, fp8_rungs, rungs
from gpu_check.op_cases import OpCases
from gpu_check.op_checks import check_rows
from gpu_check.op_speed import speed_rows
from gpu_check.profile import profile_step
from gpu_check.rows import Measurement, Rows
from gpu_check.tables import read_rows
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import StaticShape
from mlbert.host.provenance import shipped
from mlbert.ops import api as ops
from mlbert.programs.bench.sides import make_batch

SEED = 1
# Settings that the record tries in addition to the published ones.
VARIANTS = (
    ("CUDA_GRAPH_MODE", "none"),
    ("FP8_FAST_ACCUMULATION", "forward"),
    ("OPS", "fused"),
    ("OPS", "fastest"),
)


@dataclass(frozen=True)
class Scale:
    """The sizes of everything that is measured.

    Attributes:
        config: shape of the model.
        check_config: shape of the smaller model for checks.
        compiled, checked, timed: sequences for compiling kernels,
            for checks and for micro-benchmarks.
        sizes: sequences of the ladder's steps.
        packs: packs of the published step, a small and a large number.
        op_seconds, step_seconds, record_seconds: measuring time of a row.
        numel: size of a collective's tensors.
        loss_packs, loss_steps: packs and number of the steps whose losses are compared.
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
    """Return BERT-large with the sizes of training."""
    large = BertConfig.from_json(shipped("configs") / "large.json")
    two_layers = replace(large, num_hidden_layers=2)
    return Scale(
        large,
        two_layers,
        8,
        48,
        448,
        Sizes(448, 32, 96),
        (48, 224),
        0.3,
        3.0,
        20.0,
        1 << 26,
        8,
        200,
    )


def tiny_scale() -> Scale:
    """Return sizes for the rehearsal on a CPU, which take seconds even in Triton's interpreter."""
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
    """The device, sizes and files of a part.

    Attributes:
        rows: the rows of this process.
        scale: sizes.
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
        """The published step's shape, or None for the published one."""
        return self.scale.config if self.rehearses else None

    def cases(self, sequences: int) -> OpCases:
        batch = make_batch(self.scale.config, sequences, None, SEED).to(self.device)
        return OpCases(self.scale.config, batch, torch.bfloat16)

    def published(
        self, precision: str, packs: int, shape: BertConfig | None, **changes: str
    ) -> published_step.PublishedStep:
        """Return the published step with this number of packs, shape and changed settings."""
        settings = {"BATCHSIZE": str(packs), **changes}
        resolved = published_step.configured(precision, self.work, settings, shape)
        return published_step.PublishedStep(resolved, self.device)

    def two_layers(self, precision: str) -> published_step.PublishedStep:
        """Return the published step with two layers and without a graph."""
        return self.published(
            precision, self.scale.packs[0], self.scale.check_config, CUDA_GRAPH_MODE="none"
        )

    def speed(self, precision: str, packs: int, seconds: float, **changes: str) -> Measurement:
        """Return the measurement of the published step's speed."""
        return partial(
            published_step.measure_largest,
            precision,
            packs,
            self.work,
            self.device,
            seconds,
            self.shape,
            changes,
        )


def compile_kernels(bench: Bench) -> None:
    """Run a share of the ops and steps once with small sizes, to fill Triton's cache;
    one share runs nvcc.

    A failure here is reported again by the part that checks the op.
    """
    if bench.share == "fmha":
        bench.rows.measure("csrc/fmha", external.build_fmha)
        return
    first, count = map(int, bench.share.split("-of-"))
    bench.rows.measure_all(
        (name, partial(_compiled, call)) for name, call in compile_calls(bench)[first::count]
    )


def _compiled(call: Callable[[], object]) -> dict[str, Any]:
    call()
    return {}


def compile_calls(bench: Bench) -> list[tuple[str, Callable[[], object]]]:
    """Return (name, call) of steps in all precisions and of all checks, the longest first."""
    config = bench.scale.check_config
    device = bench.device
    host = make_batch(config, bench.scale.compiled, None, SEED)
    ladder = Ladder(config, device, torch.bfloat16, Sizes(*(3 * [bench.scale.compiled])), 0.0, SEED)
    best = rungs(device, ladder.sizes)[-1]

    def step(rung: Rung) -> object:
        return ladder.side(rung, host).step()

    calls: list[tuple[str, Callable[[], object]]]
    calls = [(rung.name, partial(step, rung)) for rung in (*fp8_rungs(device, best), best)]
    shape = StaticShape.over([host])
    filled = shape.allocate(device)
    shape.write(host, filled)
    # Triton compiles some kernels separately for numbers of tokens that are divisible by 16,
    # so use one of each kind.
    for name, batch in {"": host.to(device), ", filled": filled}.items():
        checks = check_rows(config, OpCases(config, batch, torch.bfloat16))
        calls += [(f"{check}{name}", row) for check, row in checks]
    return calls


def measure_smoke(bench: Bench) -> None:
    """Measure the published step, FP8 first: with the packs of one GPU in a run on eight,
    then with more.
    """
    for packs in bench.scale.packs:
        for precision in published_step.CONFIGS:
            row = bench.speed(precision, packs, bench.scale.step_seconds)
            bench.rows.measure(f"{precision}, {packs} packs", row)


def measure_record(bench: Bench) -> None:
    """Measure the published step for longer, and with one setting changed at a time."""
    small, large = bench.scale.packs
    for packs in (large, small):
        for precision in published_step.CONFIGS:
            row = bench.speed(precision, packs, bench.scale.record_seconds)
            bench.rows.measure(f"{precision}, {packs} packs", row)
    for name, value in VARIANTS:
        variant = {name: value}
        row = bench.speed("fp8", small, bench.scale.step_seconds, **variant)
        bench.rows.measure(f"fp8, {small} packs, {name}={value}", row)


def compare_losses(bench: Bench) -> None:
    """Record the losses of the same steps in bfloat16, in FP8,
    and in FP8 with exact accumulation in gradients.
    """

    def losses(precision: str, **changes: str) -> dict[str, Any]:
        step = bench.published(precision, bench.scale.loss_packs, bench.shape, **changes)
        found = step.losses(bench.scale.loss_steps)
        return {"losses": found[::10], "mean_of_last_20": sum(found[-20:]) / len(found[-20:])}

    bench.rows.measure("bf16", partial(losses, "bf16"))
    bench.rows.measure("fp8", partial(losses, "fp8"))
    bench.rows.measure(
        "fp8, exact gradients", partial(losses, "fp8", FP8_FAST_ACCUMULATION="forward")
    )


def check_ops(bench: Bench) -> None:
    """Check every implementation against its plain reference;
    then run the checks under compute-sanitizer.
    """
    bench.rows.measure_all(check_rows(bench.scale.check_config, bench.cases(bench.scale.checked)))
    bench.rows.measure("compute-sanitizer", lambda: external.sanitize(bench.work, bench.rehearses))


def time_ops(bench: Bench) -> None:
    """Time the step's matrix products in each precision, then all implementations of all ops."""
    for precision in published_step.CONFIGS:
        bench.rows.measure_all(gemm.rows(partial(bench.two_layers, precision)))
    bench.rows.measure_all(
        speed_rows(bench.scale.config, bench.cases(bench.scale.timed), bench.scale.op_seconds)
    )


def profile_replays(bench: Bench) -> None:
    """Profile the replay of the published step's graph in each precision."""

    def profiled(precision: str) -> dict[str, Any]:
        return profile_step(
            bench.published(precision, bench.scale.packs[0], bench.shape), torch.bfloat16
        )

    bench.rows.measure_all(
        (f"replay in {name}", partial(profiled, name)) for name in published_step.CONFIGS
    )


def train(bench: Bench) -> None:
    """Run ``mlbert train`` from start to end."""
    if bench.rehearses:
        run = EndToEnd(bench.scale.config, bench.work, 2, 1, 600.0, "none")
    else:
        run = EndToEnd(bench.scale.check_config, bench.work, bench.scale.packs[0], 16)
    bench.rows.measure_all(run.rows())


def read_counters(bench: Bench) -> None:
    """Read ncu's counters of the kernels that took the most time in the profiled replays."""
    for kernel in external.costliest(read_rows(bench.work.with_name("run1"), "profile")):
        bench.rows.measure(
            kernel, partial(external.count_kernel, kernel, bench.work, bench.rehearses)
        )


def check_collectives(bench: Bench) -> None:
    """Check and time collectives in a group of one rank."""
    with collectives.one_rank(bench.device):
        bench.rows.measure_all(
            collectives.rows(bench.device, bench.scale.numel, bench.scale.op_seconds)
        )


def climb_ladder(bench: Bench) -> None:
    """Measure the ladder and Hugging Face's step."""
    scale = bench.scale
    ladder = Ladder(
        scale.config, bench.device, torch.bfloat16, scale.sizes, scale.step_seconds, SEED
    )
    bench.rows.measure_all(ladder.rows())


def run_counted_step(bench: Bench) -> None:
    """Run a step under ncu, which counts only the step itself,
    not the proofs and the warm-up before it.
    """
    published = bench.two_layers("fp8")
    with nullcontext() if bench.rehearses else torch.cuda.profiler.profile():
        published.step()


def run_sanitized_checks(bench: Bench) -> None:
    """Run the checks under compute-sanitizer."""
    for name, row in check_rows(bench.scale.check_config, bench.cases(bench.scale.compiled)):
        print(name, row(), flush=True)


def run_part(part: str, share: str, path: Path, device: torch.device) -> None:
    """Measure one part, or a share of it, into ``path``, after the rows it already has;
    with small sizes on a CPU.

    Raises:
        gpu_check.rows.DeviceLost: this process can measure no further rows;
            a new process can continue.
    """
    scale = full_scale() if device.type == "cuda" else tiny_scale()
    if device.type != "cuda":
        torch.set_num_threads(1)
    ops.select("auto", device)
    torch.manual_seed(SEED)
    rows = Rows(path, device, environment_facts(device))
    measurements: dict[str, Callable[[Bench], None]] = {
        "compile": compile_kernels,
        "smoke": measure_smoke,
        "checks": check_ops,
        "ops": time_ops,
        "profile": profile_replays,
        "train": train,
        "counters": read_counters,
        "nccl": check_collectives,
        "step": climb_ladder,
        "record": measure_record,
        "losses": compare_losses,
        "counted": run_counted_step,  # started by ncu
        "sanitized": run_sanitized_checks,  # started by compute-sanitizer
    }
    measurements[part](Bench(rows, scale, device, share, path.parent))
