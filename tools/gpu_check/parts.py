"""The parts of the two calls (`gpu_check.calls`), each of which runs in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_check import external, gemm, kernels, modernbert, published_step
from gpu_check.command import command_of
from gpu_check.decisions import adopted
from gpu_check.hardware import environment_facts, synchronize
from gpu_check.profile import profile_step
from gpu_check.published_step import Tuning
from gpu_check.rows import Rows, read_rows
from gpu_check.turns import Make, TimedSide, measure_turn, take_turns
from mlbert.config.bert_config import BertConfig
from mlbert.config.flops import BatchWork, training_flops
from mlbert.host.native import NativeUnavailable
from mlbert.host.provenance import shipped, tree_root
from mlbert.models.bert import BertForPreTraining
from mlbert.ops import api as ops
from mlbert.ops import cublaslt, proof
from mlbert.ops import forms as registry
from mlbert.programs.bench.expert import Choice, expert_side
from mlbert.programs.bench.sides import make_batch

SEED = 1
FUSED = "bert fp8 fused"
WITH_FUSED = {"OPS": "fused"}  # its settings
SLOPES = "bert fp8 slopes"
WITH_SLOPES = {"OPS": "slopes"}
WITH_QKV = {"OPS": "qkv"}
WITH_GLUON = {"OPS": "gluon"}
GLUON_ATTENTION = "gluon-attention"
WITH_GLUON_ATTENTION = {"OPS": GLUON_ATTENTION}
# Precision -> side -> its settings. The last one that call 1 adopts is measured in call 2.
VARIANTS = {
    # Attention is the same in FP8, where another side would not fit into memory.
    "bf16": {"bert bf16 qkv": WITH_QKV, "bert bf16 gluon-attention": WITH_GLUON_ATTENTION},
    "fp8": {
        FUSED: WITH_FUSED,
        SLOPES: WITH_SLOPES,
        "bert fp8 gluon": WITH_GLUON,
        "bert fp8 qkv": WITH_QKV,
    },
}
# What it refuses stays refused in the process, so nothing may be made after it.
FASTEST = "bert fp8 fastest"
WITH_FASTEST = {"OPS": "fastest"}
# Not for a CPU without Triton's interpreter, or of no use there.
HOPPER_FORMS = ("fused", "slopes", "gluon", GLUON_ATTENTION, "qkv", "fastest")
# Those whose partitions share memory through barriers.
PARTITIONED_FORMS = ("gluon", GLUON_ATTENTION)
# Ops and their forms that compute-sanitizer watches.
MEMCHECKED = (
    ("fp8_product_gelu", "gluon"),
    ("fp8_product_gelu_backward", "gluon"),
    ("attention", GLUON_ATTENTION),
    ("fp8_product_gelu", "fused"),
    ("fp8_product_gelu_backward", "fused"),
    ("fp8_product_slope", "slopes"),
    ("fp8_product_slope_backward", "slopes"),
    ("fp8_qkv_attention", "qkv"),
)
COUNTED = ("product_kernel", "attention_forward_kernel")
COUNT_SECONDS = 33
MEMCHECK_SECONDS = 65
ALGORITHM_SECONDS = 0.3
ALGORITHM_PRODUCTS = 2  # of each precision
OPPONENT_GROUPS = 2
OPPONENT_SEQUENCES = 96
OPPONENT_ATTENTION = ("sdpa", "flex_attention")
DRY_OPPONENT_ATTENTION = ("sdpa", "eager")  # transformers compiles flex_attention for minutes
GPU_TESTS = ("test_fp8.py", "test_graphs.py")
PUBLISHED_SHAPE = "large"  # of BERT
FP8_OPERAND = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scale:
    """The sizes of everything that is measured.

    Attributes:
        bert, base, large: shapes; `base` and `large` are ModernBERT's.
        layers: of the shapes that are only compiled.
        packs: of BERT's step, a small and a large number.
        base_tokens, large_tokens: of ModernBERT's steps.
        lengths: of ModernBERT's sequences.
        square: rows of the products that are the ceiling.
        copied_bytes: of the copy that is the ceiling.
        turn_seconds, ceiling_seconds, kernel_seconds: measuring times.
    """

    bert: BertConfig
    base: BertConfig
    large: BertConfig
    layers: int
    packs: tuple[int, int]
    base_tokens: int
    large_tokens: int
    lengths: tuple[int, int]
    square: int
    copied_bytes: int
    turn_seconds: float
    ceiling_seconds: float
    kernel_seconds: float


def _shape(name: str, options: str | None = None) -> BertConfig:
    return BertConfig.from_json(shipped("configs") / f"{name}.json").with_options(options)


def full_scale() -> Scale:
    """Return the published sizes."""
    padded = "vocab_size_multiple=64"
    return Scale(
        bert=_shape(PUBLISHED_SHAPE),
        base=_shape("modernbert_base", padded),
        large=_shape("modernbert_large", padded),
        layers=4,
        packs=(48, 224),
        base_tokens=32_768,
        large_tokens=16_384,
        lengths=(1024, 8192),
        square=8192,
        copied_bytes=4 << 30,
        turn_seconds=2.0,
        ceiling_seconds=2.0,
        kernel_seconds=0.2,
    )


def tiny_scale() -> Scale:
    """Return sizes for a dry run on a CPU."""
    sizes = "hidden_size=64 num_attention_heads=1 intermediate_size=64 num_hidden_layers=2"
    modern = _shape("modernbert_base", f"{sizes} vocab_size=512 local_attention=16")
    bert = _shape(PUBLISHED_SHAPE, f"{sizes} vocab_size=1018 max_position_embeddings=48")
    return Scale(
        bert=bert,
        base=modern,
        large=modern,
        layers=1,
        packs=(1, 2),
        base_tokens=128,
        large_tokens=128,
        lengths=(32, 64),
        square=64,
        copied_bytes=1 << 20,
        turn_seconds=0.0,
        ceiling_seconds=0.0,
        kernel_seconds=0.0,
    )


@dataclass(frozen=True)
class Bench:
    """What a part works with.

    Attributes:
        rows: rows of this part.
        scale: sizes.
        device: where to compute; a CPU in a dry run.
        work: folder for files that are not results.
        out: folder of the results.
        first: file with the rows of the first call, for the second one.
        command: runs another part of this call with ``--part`` and its name.
    """

    rows: Rows
    scale: Scale
    device: torch.device
    work: Path
    out: Path
    first: Path
    command: list[str]

    @property
    def is_dry(self) -> bool:
        """True without a GPU."""
        return self.device.type != "cuda"

    @property
    def opponent_attention(self) -> tuple[str, ...]:
        """transformers' attention implementations, the safest one first."""
        return DRY_OPPONENT_ATTENTION if self.is_dry else OPPONENT_ATTENTION

    def bert(
        self,
        name: str,
        precision: str,
        packs: int,
        shape: BertConfig,
        baseline: str | None = None,
        opponent: str | None = None,
        changes: Mapping[str, str] | None = None,
        tuning: Tuning = Tuning.TIMED,
    ) -> TimedSide:
        """Return the step of the published configuration with changed settings."""
        settings = {"BATCHSIZE": str(packs), **(changes or {})}
        if self.is_dry and settings.get("OPS") in HOPPER_FORMS:
            settings["OPS"] = "plain"
        other_shape = None if shape == _shape(PUBLISHED_SHAPE) else shape
        resolved = published_step.configured(precision, self.work, settings, other_shape)
        remarks: list[str] = []
        published = published_step.PublishedStep(resolved, self.device, remarks.append, tuning)
        batch = published.batch
        return TimedSide(
            name=name,
            step=published.step,
            units=batch.num_samples,
            unit="sequences",
            flops=training_flops(published.config, BatchWork.of(batch)),
            precision=precision,
            baseline=baseline,
            opponent=opponent,
            remarks=tuple(remarks),
        )

    def modernbert(
        self,
        size: str,
        length: int,
        precision: str,
        layers: int | None = None,
        is_tuned: bool = True,
        choice: str = "auto",
    ) -> TimedSide:
        """Return our ModernBERT step; ``layers`` other than the model's if given.

        ``choice``: of the ops. The baseline of another one than ``auto`` is the step with it.
        """
        scale = self.scale
        config = scale.base if size == "base" else scale.large
        tokens = scale.base_tokens if size == "base" else scale.large_tokens
        if layers is not None:
            config = replace(config, num_hidden_layers=layers)
        name = f"modernbert {size} {length} {precision}"
        batch = modernbert.full_batch(config, length, tokens)
        side = partial(
            modernbert.our_side,
            config=config,
            batch=batch,
            precision=precision,
            device=self.device,
            is_tuned=is_tuned,
        )
        if choice == "auto":
            return side(name)
        used = "plain" if self.is_dry else choice
        return side(f"{name} {choice}", baseline=name, choice=used)


def measure_ceilings(bench: Bench) -> None:
    """Measure a copy and large products for seconds each, with energy."""
    bench.rows.append("facts", environment_facts(bench.device))
    report = external.run(["nvidia-smi", "-q"], 5.0, {})
    print(report if isinstance(report, str) else report.stdout, flush=True)
    scale = bench.scale
    device = bench.device
    source = torch.empty(scale.copied_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied = partial(_ceiling, bench, lambda: target.copy_(source))
    row = bench.rows.measure("copy", copied)
    if "ms" in row:
        bench.rows.append("copy rate", {"tb_per_second": 2e-9 * scale.copied_bytes / row["ms"]})
    left = torch.randn(scale.square, scale.square, device=device)
    wide = left.bfloat16()
    small = left.to(FP8_OPERAND)
    one = torch.ones((), device=device)

    def product_fp8() -> torch.Tensor:
        return torch._scaled_mm(
            small,
            small.t(),
            one,
            one,
            out_dtype=torch.bfloat16,
            use_fast_accum=not bench.is_dry,
        )

    products = {"bf16": lambda: torch.mm(wide, wide), "fp8": product_fp8}
    for precision, call in products.items():

        def measured(call: Callable[[], object] = call) -> dict[str, Any]:
            found = _ceiling(bench, call)
            return {**found, "tflops": 2e-9 * scale.square**3 / found["ms"]}

        bench.rows.measure(f"product {precision}", measured)


def _ceiling(bench: Bench, call: Callable[[], object]) -> dict[str, Any]:
    side = TimedSide("ceiling", call, 1, "calls", 0.0, "")
    found = measure_turn(side, 0, bench.scale.ceiling_seconds, bench.device)
    return {name: found[name] for name in ("ms", "watts", "power", "steps")}


def compile_bert(bench: Bench) -> None:
    """Compile and prove the kernels of BERT's steps, with few layers.

    No part that compiles times algorithms: others use the GPU meanwhile, and choices are cached.
    """
    shape = replace(bench.scale.bert, num_hidden_layers=bench.scale.layers)
    packs = bench.scale.packs[0]
    for precision in published_step.CONFIGS:
        make = partial(bench.bert, "", precision, packs, shape, tuning=Tuning.NONE)
        bench.rows.measure(precision, partial(_once, bench, make))


def compile_fused(bench: Bench) -> None:
    """Compile and prove the kernels of the variants."""
    shape = replace(bench.scale.bert, num_hidden_layers=bench.scale.layers)
    packs = bench.scale.packs[0]
    for precision, variants in VARIANTS.items():
        side = partial(bench.bert, "", precision, packs, shape, tuning=Tuning.NONE)
        for name, changes in variants.items():
            bench.rows.measure(name, partial(_once, bench, partial(side, changes=changes)))


def compile_modernbert(bench: Bench) -> None:
    """Compile and prove the kernels of ModernBERT's steps, with few layers."""
    length = bench.scale.lengths[0]
    layers = max(2, bench.scale.layers)
    for precision in published_step.CONFIGS:
        make = partial(bench.modernbert, "base", length, precision, layers, is_tuned=False)
        bench.rows.measure(precision, partial(_once, bench, make))
    make = partial(
        bench.modernbert, "base", length, "bf16", layers, is_tuned=False, choice=GLUON_ATTENTION
    )
    bench.rows.measure(GLUON_ATTENTION, partial(_once, bench, make))


def compile_opponent_bert(bench: Bench) -> None:
    """Let torch compile a layer of transformers' BERT, and keep what it compiled."""
    shape = replace(bench.scale.bert, num_hidden_layers=bench.scale.layers)
    make = partial(_their_bert, bench, shape)
    bench.rows.measure("layer", partial(_once, bench, make))
    _save_compiled(bench, "opponent-bert.cache")


def compile_opponent_modernbert(bench: Bench) -> None:
    """Let torch compile the kinds of layers of transformers' ModernBERT, and keep the result."""
    layers = max(2, bench.scale.layers)
    shape = replace(bench.scale.base, num_hidden_layers=layers)
    for attention in bench.opponent_attention:
        make = partial(_their_modernbert, bench, shape, attention)
        bench.rows.measure(attention, partial(_once, bench, make))
    _save_compiled(bench, "opponent-modernbert.cache")


def _once(bench: Bench, make: Make) -> dict[str, Any]:
    side = make()
    side.step()
    synchronize(bench.device)
    return {"remarks": list(side.remarks)}


def _save_compiled(bench: Bench, name: str) -> None:
    """Write what torch has compiled, to be copied into the next visit's --out."""
    if not bench.is_dry and (found := torch.compiler.save_cache_artifacts()) is not None:
        (bench.out / name).write_bytes(found[0])


def _load_compiled(bench: Bench, name: str) -> None:
    path = bench.out / name
    if not bench.is_dry and path.exists():
        torch.compiler.load_cache_artifacts(path.read_bytes())


def check_memory(bench: Bench) -> None:
    """Run the new kernels under compute-sanitizer."""
    command = [*bench.command, "--part", "memchecked"]
    bench.rows.measure("new kernels", partial(external.sanitize, command, MEMCHECK_SECONDS))


def check_races(bench: Bench) -> None:
    """Run the kernels whose partitions share memory through barriers under racecheck."""
    command = [*bench.command, "--part", "racechecked"]
    check = partial(external.sanitize, command, MEMCHECK_SECONDS, "racecheck")
    bench.rows.measure("gluon kernels", check)


def run_memchecked(bench: Bench) -> None:
    """Run the kernels that compute-sanitizer's memcheck watches."""
    _run_watched(bench, MEMCHECKED)


def run_racechecked(bench: Bench) -> None:
    """Run the kernels that compute-sanitizer's racecheck watches."""
    _run_watched(bench, [(op, form) for op, form in MEMCHECKED if form in PARTITIONED_FORMS])


def _run_watched(bench: Bench, watched: Sequence[tuple[str, str]]) -> None:
    for op, form in watched:
        if form in registry.available(bench.device)[op]:
            print(op, proof.check(op, form, bench.device, torch.bfloat16), flush=True)


def turns_of_bert(bench: Bench) -> None:
    """Measure BERT-large's steps in turns, in bfloat16 and then in FP8, each of which takes most of
    the memory.

    In bfloat16, the step whose algorithms were timed is a variant of the one with a rule in place
    of timing: if it is not adopted, timing is of no use. In FP8 it cannot be 1 % faster.
    """
    packs = bench.scale.packs[0]
    shape = bench.scale.bert
    rule = "bert bf16 rule"
    for precision, variants in VARIANTS.items():
        auto = f"bert {precision} auto"
        side = partial(bench.bert, precision=precision, packs=packs, shape=shape)
        makes: dict[str, Make] = {auto: partial(side, auto)}
        if precision == "bf16":
            makes[auto] = partial(side, auto, baseline=rule)
            makes[rule] = partial(side, rule, tuning=Tuning.RULED)
        for name, changes in variants.items():
            makes[name] = partial(side, name, baseline=auto, changes=changes)
        if precision == "fp8":
            makes[FASTEST] = partial(side, FASTEST, baseline=auto, changes=WITH_FASTEST)
        take_turns(bench.rows, makes, bench.scale.turn_seconds, bench.device)


def turns_of_modernbert(bench: Bench) -> None:
    """Measure ModernBERT-base's steps in turns."""
    steps = [
        (length, precision, choice)
        for length in bench.scale.lengths
        for precision, choice in (("bf16", "auto"), ("bf16", GLUON_ATTENTION), ("fp8", "auto"))
    ]
    _turns_of_size(bench, "base", steps)


def turns_of_large(bench: Bench) -> None:
    """Measure ModernBERT-large's steps in turns."""
    short, long = bench.scale.lengths
    steps = ((short, "bf16", "auto"), (short, "fp8", "auto"), (long, "bf16", "auto"))
    _turns_of_size(bench, "large", steps)


def _turns_of_size(bench: Bench, size: str, steps: Iterable[tuple[int, str, str]]) -> None:
    """Measure steps of a ModernBERT in turns, each with a length, a precision and its ops."""
    makes: dict[str, Make] = {}
    for length, precision, choice in steps:
        name = f"modernbert {size} {length} {precision} {choice}"
        makes[name] = partial(bench.modernbert, size, length, precision, choice=choice)
    take_turns(bench.rows, makes, bench.scale.turn_seconds, bench.device)


def turns_of_winners(bench: Bench) -> None:
    """Measure what the first call has adopted, with few and with many packs."""
    if not bench.first.exists():
        bench.rows.append("first call", {"skipped": f"{bench.first} is missing: nothing adopted"})
    verdicts = adopted(read_rows(bench.first))
    settings: dict[str, Mapping[str, str]] = {}
    for precision, variants in VARIANTS.items():
        for side, changes in variants.items():
            if verdicts.get(side):
                settings[precision] = changes
    few, many = bench.scale.packs
    # Those with many packs leave no memory for another side.
    for group in ((("fp8", few), ("bf16", few)), (("fp8", many),)):
        makes: dict[str, Make] = {}
        for precision, packs in group:
            name = f"bert {precision} adopted, {packs} packs"
            own = settings.get(precision)
            makes[name] = partial(bench.bert, name, precision, packs, bench.scale.bert, changes=own)
        take_turns(bench.rows, makes, bench.scale.turn_seconds, bench.device)


def time_kernels(bench: Bench) -> None:
    """Time single kernels in graphs, and cublasLt's algorithms with their energy."""
    scale = bench.scale
    device = bench.device
    makes: list[Callable[[], dict[str, Callable[[], object]]]] = [
        partial(kernels.product_calls, scale.bert, scale.base_tokens, device),
        partial(kernels.gate_calls, scale.base, scale.base_tokens, device),
    ]
    for length in scale.lengths:
        attention = partial(kernels.attention_calls, scale.base, length, scale.base_tokens, device)
        makes.append(attention)
    for make in makes:
        for name, call in make().items():
            timing = partial(kernels.timed, call, device, scale.kernel_seconds)
            bench.rows.measure(name, timing)
    for precision in published_step.CONFIGS:
        _time_algorithms(bench, precision)


def _time_algorithms(bench: Bench, precision: str) -> None:
    try:
        library = cublaslt.library()
    except NativeUnavailable as error:
        bench.rows.append(f"cublasLt {precision}", {"skipped": str(error)})
        return
    scale = bench.scale
    shape = replace(scale.bert, num_hidden_layers=min(2, scale.bert.num_hidden_layers))
    settings = {"BATCHSIZE": str(scale.packs[0]), "CUDA_GRAPH_MODE": "none"}
    resolved = published_step.configured(precision, bench.work, settings, shape)
    published = published_step.PublishedStep(resolved, bench.device)
    problems = gemm.largest_of(gemm.products_of(published), ALGORITHM_PRODUCTS)
    seconds = 0.0 if bench.is_dry else ALGORITHM_SECONDS
    for problem in problems:
        timing = partial(gemm.measure, library, problem, bench.device, seconds)
        bench.rows.measure(f"GEMM {gemm.name_of(problem)}", timing)


def read_counters(bench: Bench) -> None:
    """Read ncu's counters of the first launch of two kernels."""
    command = [*bench.command, "--part", "counted"]
    counting = partial(external.count_kernels, COUNTED, command, COUNT_SECONDS)
    bench.rows.measure("ncu", counting)


def run_counted(bench: Bench) -> None:
    """Run a step under ncu, which counts only the step, not the proofs before it."""
    shape = replace(bench.scale.bert, num_hidden_layers=1)
    settings = {**WITH_FUSED, "CUDA_GRAPH_MODE": "none"}
    side = bench.bert("", "fp8", bench.scale.packs[0], shape, changes=settings)
    with nullcontext() if bench.is_dry else torch.cuda.profiler.profile():
        side.step()


def oppose_bert(bench: Bench) -> None:
    """Measure our BERT step and transformers' in turns."""
    _load_compiled(bench, "opponent-bert.cache")
    packs = bench.scale.packs[0]
    shape = bench.scale.bert
    theirs = "transformers bert"
    ours = "bert bf16, next to transformers"
    makes: dict[str, Make] = {
        ours: partial(bench.bert, ours, "bf16", packs, shape, opponent=theirs),
        theirs: partial(_their_bert, bench, shape),
    }
    take_turns(bench.rows, makes, bench.scale.turn_seconds, bench.device)


def oppose_modernbert(bench: Bench) -> None:
    """Measure our ModernBERT step and transformers' in turns."""
    _load_compiled(bench, "opponent-modernbert.cache")
    scale = bench.scale
    batch = modernbert.full_batch(scale.base, scale.lengths[0], scale.base_tokens)
    ours = "modernbert base bf16, next to transformers"
    opponents = "transformers modernbert"
    first, *others = bench.opponent_attention
    makes: dict[str, Make] = {
        ours: partial(
            modernbert.our_side, ours, scale.base, batch, "bf16", bench.device, opponents
        ),
        f"{opponents} {first}": partial(_their_modernbert, bench, scale.base, first),
    }
    take_turns(bench.rows, makes, scale.turn_seconds, bench.device)
    # The others may compile for too long, so they come last.
    for kind in others:
        make = partial(_their_modernbert, bench, scale.base, kind)
        take_turns(bench.rows, {f"{opponents} {kind}": make}, scale.turn_seconds, bench.device)


def _their_bert(bench: Bench, shape: BertConfig) -> TimedSide:
    number = 2 if bench.is_dry else OPPONENT_SEQUENCES
    batch = make_batch(shape, number, None, SEED)
    start = BertForPreTraining(shape, torch.bfloat16)
    start.initialize(SEED)
    start.to(bench.device)
    choice = Choice(OPPONENT_GROUPS, "sdpa", compiled=not bench.is_dry)
    side = expert_side(shape, batch, torch.bfloat16, start, choice)
    return TimedSide(
        name="transformers bert",
        step=side.step,
        units=batch.num_samples,
        unit="sequences",
        flops=training_flops(shape, BatchWork.of(batch)),
        precision="bf16",
    )


def _their_modernbert(bench: Bench, shape: BertConfig, attention: str) -> TimedSide:
    batch = modernbert.full_batch(shape, bench.scale.lengths[0], bench.scale.base_tokens)
    name = f"transformers modernbert {attention}"
    is_compiled = not bench.is_dry
    return modernbert.their_side(name, shape, batch, attention, bench.device, is_compiled)


def profile_replays(bench: Bench) -> None:
    """Profile one replay of BERT's and ModernBERT's steps."""
    makes: dict[str, Make] = {
        "bert fp8": partial(bench.bert, "bert fp8", "fp8", bench.scale.packs[0], bench.scale.bert),
        "modernbert bf16": partial(bench.modernbert, "base", bench.scale.lengths[0], "bf16"),
    }
    for name, make in makes.items():

        def profiled(make: Make = make) -> dict[str, Any]:
            return profile_step(make().step, bench.device)

        bench.rows.measure(name, profiled)


def run_tests(bench: Bench) -> None:
    """Run the GPU's tests of FP8 and of graphs; each outcome is a row."""
    import pytest

    class Recorder:
        """Appends a row for each test."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when != "call" and report.passed:
                return
            row: dict[str, Any] = {"outcome": report.outcome}
            if report.failed:
                row["error"] = report.longreprtext
            bench.rows.append(report.nodeid, row)

    folder = tree_root() / "tests" / "gpu"
    files = [str(folder / name) for name in GPU_TESTS]
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--rootdir={tree_root()}"]
    code = pytest.main([*files, *options], plugins=[Recorder()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        bench.rows.append("pytest", {"error": f"no tests ran: exit code {int(code)}; see the log"})


def parts_by_name() -> dict[str, Callable[[Bench], None]]:
    """Return the parts by the names that `gpu_check.calls` uses."""
    return {
        "ceilings": measure_ceilings,
        "compile-bert": compile_bert,
        "compile-fused": compile_fused,
        "compile-modernbert": compile_modernbert,
        "compile-opponent-bert": compile_opponent_bert,
        "compile-opponent-modernbert": compile_opponent_modernbert,
        "memcheck": check_memory,
        "memchecked": run_memchecked,  # started by compute-sanitizer
        "racecheck": check_races,
        "racechecked": run_racechecked,
        "turns-bert": turns_of_bert,
        "turns-modernbert": turns_of_modernbert,
        "kernels": time_kernels,
        "counters": read_counters,
        "counted": run_counted,  # started by ncu
        "opponent-bert": oppose_bert,
        "opponent-modernbert": oppose_modernbert,
        "winners": turns_of_winners,
        "large": turns_of_large,
        "profile": profile_replays,
        "tests": run_tests,
    }


def run_part(
    part: str, call: int, work: Path, out: Path, first: Path, device: torch.device
) -> None:
    """Run one part in this process."""
    is_dry = device.type != "cuda"
    ops.select("auto", device)

    bench = Bench(
        rows=Rows(out / f"call{call}.jsonl", part),
        scale=tiny_scale() if is_dry else full_scale(),
        device=device,
        work=work,
        out=out,
        first=first,
        command=command_of(call, work, out, first, is_dry),
    )
    parts_by_name()[part](bench)
