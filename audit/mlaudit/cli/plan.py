"""``mlaudit plan``: estimate samples, time, memory, cost and limits of a run."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mlaudit import rules
from mlaudit.cli.report_table import as_table
from mlaudit.logs import is_number, read_log
from mlaudit.planner import calibrate as calibration
from mlaudit.planner import pretraining, request, timing
from mlaudit.planner.cost import Estimate, Prices, estimate
from mlaudit.planner.gpus import ALIASES, GPUS
from mlaudit.planner.request import MOST_GPUS, Given, job_of
from mlaudit.planner.timing import Parameters, TrainingJob, load
from mlaudit.result_set import evaluations_of, run_file, samples_before, samples_to_target
from mlaudit.training_program import ask
from mlbert.config import presets
from mlbert.config.bert_config import BertConfig
from mlbert.config.shell import planned_world_size
from mlbert.host.console import standard_output, write_page
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.host.option_checks import first_given, refuse_with

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gb|gb/s|gbps|g)?", re.ASCII | re.IGNORECASE)
MOST_GBPS = 10_000.0  # per GPU port


@app.command()
def plan(
    config: Annotated[
        Path | None, typer.Option(help="YAML of mlbert train; default: the sourced exports.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A name in configs/, or a bert_config.json.")
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}; a100 and h100 mean sxm.")] = "h100",
    like: Annotated[
        str | None, typer.Option(help="Estimate another --gpu like this one.", metavar="GPU")
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(help="Speed of --gpu relative to that of --like.", min=0.01, max=100),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs.", min=1, max=MOST_GPUS)] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes.", min=1, max=MOST_GPUS)
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Network speed per GPU, such as 400Gb.", metavar="SPEED")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences per step on all GPUs.", min=1)
    ] = None,
    batch_per_gpu: Annotated[
        int | None, typer.Option(help="Sequences per step and GPU.", min=1)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="bf16|fp8", help="Number format; default: as published for the GPU."),
    ] = None,
    samples: Annotated[
        float | None, typer.Option(help="Samples to the target, if known.", min=1e3, max=1e12)
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(help="Tokens on the fullest GPU, divided by the mean.", min=1.0, max=4.0),
    ] = 1.0,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Model FLOPs as a fraction of the 16-bit peak.", min=0.01, max=2),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(
            "--price-per-gpu-hour",
            "--dollars-per-hour",
            help="US dollars per GPU-hour.",
            min=0,
            max=1e4,
        ),
    ] = None,
    watts_per_gpu: Annotated[
        float | None,
        typer.Option(help="Power of a GPU with its share of the node.", min=1, max=1e5),
    ] = None,
    co2_per_kwh: Annotated[
        float | None, typer.Option(help="kg of CO2 per kWh.", min=0, max=10)
    ] = None,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="mlbert's MLPerf log on such GPUs; repeatable.")
    ] = None,
    to_4096: Annotated[
        bool, typer.Option("--sweep", help="1 to 4,096 GPUs, each with its best batch.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="Dollars per run; with --sweep.", min=0, max=1e9)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan mlbert pretrain --preset NAME instead."),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="With --recipe: tokens of the phase.", min=1, max=1e14)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"With --recipe: tokens of a sequence; default: {presets.ROW_TOKENS}.",
            min=16,
            max=32768,
        ),
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="With --recipe: measured, per GPU.", min=1, max=1e9)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan as an HTML page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Predict a run from published results: time, samples, memory, cost, and what limits it.

    \b
    Examples:
      mlbert plan --gpu h100 --gpus 64 --nodes 8 --price-per-gpu-hour 3
      source config_X.sh && mlbert plan --gpu h100
      mlbert plan --recipe modernbert-base --tokens 30e9 --gpu h100 --gpus 1
    """
    if recipe is not None:
        benchmark_only = {
            "--config": config,
            "--model": model,
            "--batch": batch,
            "--batch-per-gpu": batch_per_gpu,
            "--precision": precision,
            "--samples": samples,
            "--imbalance": None if imbalance == 1.0 else imbalance,
            "--efficiency": efficiency,
            "--co2-per-kwh": co2_per_kwh,
            "--calibrate": calibrate or None,
            "--sweep": to_4096 or None,
            "--budget": budget,
            "--html": html,
        }
        refuse_with("--recipe", benchmark_only)
        if tokens is None:
            reason = "needs the length of the training"
            raise UserError("config.missing", "--recipe", reason, "Add --tokens, such as 30e9")
        given = Given(
            _known_gpu(gpu, like, factor),
            timing.named("large"),
            gpus=gpus or (None if nodes else 1),
            nodes=nodes,
            port_gbps=_gbps(network),
            precision="bf16",
            name=gpu if like is not None else "",
            speed=factor or 1.0,
        )
        found = pretraining.estimate(
            recipe,
            round(tokens),
            length or presets.ROW_TOKENS,
            request.hardware(given),
            load(),
            Prices(price_per_gpu_hour, watts_per_gpu),
            tokens_per_second,
        )
        _show_pretraining(found, as_json)
        return 0
    recipe_only = {
        "--tokens": tokens,
        "--tokens-per-second": tokens_per_second,
        "--length": length,
    }
    name = first_given(recipe_only)
    if name is not None:
        remedy = "Give --recipe modernbert-base"
        raise UserError("config.missing", name, "needs --recipe", remedy)
    if batch is not None and batch_per_gpu is not None:
        raise UserError(
            "config.conflict", "--batch-per-gpu", "conflicts with --batch", "Give one of the two"
        )
    if to_4096 and (gpus or nodes or batch or batch_per_gpu):
        remedy = "Remove --gpus, --nodes and --batch"
        raise UserError("config.conflict", "--sweep", "chooses GPUs and batch itself", remedy)
    if factor is not None and calibrate:
        raise UserError(
            "config.conflict", "--factor", "conflicts with --calibrate", "Give one of the two"
        )
    logs = [read_measured(path) for path in calibrate or ()]
    given = Given(
        _known_gpu(gpu, like, factor),
        timing.named(model or "large"),
        port_gbps=_gbps(network),
        imbalance=imbalance,
        name=gpu if like is not None else "",
        speed=factor or 1.0,
    )
    if config is not None or environment().get("CONFIG_FILE"):
        configured = _configured(given, config)
        given = configured if model is None else replace(configured, shape=given.shape)
    if gpus or nodes:
        given = replace(given, gpus=gpus, nodes=nodes)
    if batch or batch_per_gpu:
        given = replace(given, batch=batch, batch_per_gpu=batch_per_gpu)
    given = replace(given, precision=precision or given.precision)
    estimator = _Estimator(
        given, load(), Prices(price_per_gpu_hour, watts_per_gpu, co2_per_kwh), samples
    )
    estimator = estimator.with_measured(logs, efficiency)
    if to_4096:
        if budget is not None and price_per_gpu_hour is None:
            raise UserError(
                "config.missing", "--budget", "needs a price", "Give --price-per-gpu-hour too"
            )
        sweep = request.sweep(
            lambda gpus, size: estimator(
                job_of(replace(given, gpus=gpus, nodes=None, batch=size), estimator)
            )
        )
        chosen = None if budget is None else request.within(sweep, budget)
        best = chosen[1] if chosen else min(sweep, key=lambda found: found.seconds)
    elif budget is not None:
        raise UserError("config.conflict", "--budget", "needs --sweep", "Give --sweep too")
    else:
        sweep = []
        chosen = None
        best = estimator(job_of(given, estimator))
    _show(best, sweep, chosen, html, as_json)
    return 0


def _known_gpu(gpu: str, like: str | None, factor: float | None) -> str:
    """Return the name in `GPUS` of the GPU, or of the one that it is like."""
    if like is None and factor is not None:
        raise UserError("config.missing", "--factor", "needs --like", "Give --like GPU too")
    name = ALIASES.get(gpu, gpu)
    if like is None and name not in GPUS:
        remedy = request.how_to_add(gpu)
        raise UserError("config.choice", "--gpu", f"{gpu} is unknown", remedy, GPUS)
    if like is None:
        return name
    if name in GPUS:
        problem = f"{gpu} is a GPU that the planner knows"
        raise UserError(
            "config.conflict", "--like", problem, "Give another --gpu, or leave out --like"
        )
    name = ALIASES.get(like, like)
    if name not in GPUS:
        known = [*GPUS, *ALIASES]
        raise UserError("config.choice", "--like", f"{like} is unknown", "Use a valid one", known)
    return name


def _show_pretraining(found: pretraining.PretrainingEstimate, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
        return
    title = f"{found.recipe}, estimate"
    standard_output().print(as_table(title, pretraining.answers(found)))
    standard_output().print("mlbert itself has not trained this model at this size (docs/plan.md).")


def _show(
    best: Estimate,
    sweep: Sequence[Estimate],
    chosen: tuple[Estimate, Estimate] | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the estimate or the sweep, and write the page."""
    words = request.choice(*chosen) if chosen else ""
    if as_json:
        choice = {"cheapest": chosen[0].as_dict(), "fastest": chosen[1].as_dict()} if chosen else {}
        values = (
            {"sweep": [found.as_dict() for found in sweep], **choice} if sweep else best.as_dict()
        )
        typer.echo(json.dumps(values, indent=2))
    else:
        title = (
            f"{best.job.label}, each with its fastest batch"
            if sweep
            else f"{best.job.label}, estimate"
        )
        standard_output().print(
            as_table(title, request.table(sweep) if sweep else request.answers(best))
        )
        typer.echo(words, nl=bool(words))
        standard_output().print(f"{request.expected_error_of(best.job)} (docs/plan.md).")
    if html is not None:
        from mlaudit.report.page import plan_page  # matplotlib takes a second

        write_page(html, plan_page(best, sweep, words))
        typer.echo(f"page: {html}", err=as_json)


def _configured(given: Given, file: Path | None) -> Given:
    """Add the values of a YAML file, or of the sourced exports if ``file`` is None."""
    if file is not None and file.suffix not in (".yaml", ".yml"):
        raise UserError(
            "config.file", file, "is not a YAML file", f"Write: source {file} && mlbert plan"
        )
    words = ["train", "--print-settings"]
    settings = ask(words if file is None else [*words, "--config", str(file)])
    value_of = {name: row["value"] for name, row in settings.items()}
    shape = BertConfig.from_json(Path(value_of["BERT_CONFIG"]))
    precision = value_of["PRECISION"]
    exports = environment()
    ranks = planned_world_size(exports)
    return replace(
        given,
        shape=timing.of(shape.with_options(value_of["MODEL_OPTIONS"])),
        gpus=ranks,
        nodes=None if ranks is None else int(exports["DGXNNODES"]),
        batch_per_gpu=rules.global_batch_size(value_of["BATCHSIZE"], 1, value_of["PACKING_FACTOR"]),
        precision=None if precision == "auto" else precision,
        sharing=value_of["SHARDED_OPTIMIZER"],
    )


@dataclass(frozen=True)
class _Estimator:
    """Estimate jobs that share a model, parameters and prices."""

    given: Given
    parameters: Parameters
    prices: Prices
    samples: float | None

    def __call__(self, job: TrainingJob) -> Estimate:
        sharers = {"off": 1, "node": max(1, int(job.per_node)), "all": job.gpus}[self.given.sharing]
        return estimate(job, self.given.shape, self.parameters, self.prices, self.samples, sharers)

    def with_measured(
        self, logs: Sequence[calibration.MeasuredRun], efficiency: float | None
    ) -> _Estimator:
        """Return a copy with the speed from logs or ``efficiency``,
        and the samples and power that the logs needed.
        """
        parameters = self.parameters
        samples = self.samples
        prices = self.prices
        if logs and efficiency is not None:
            raise UserError(
                "config.conflict",
                "--efficiency",
                "conflicts with --calibrate",
                "Give one of the two",
            )
        if logs:
            like = replace(
                self.given, batch=logs[0].batch, batch_per_gpu=None, gpus=logs[0].ranks, nodes=None
            )
            job = job_of(like, self)
            parameters = calibration.calibrated(parameters, job, logs)
            ratios = [
                log.samples / timing.samples(replace(job, batch=log.batch), parameters)
                for log in logs
                if log.samples
            ]
            reached = [log.samples for log in logs if log.samples is not None]
            if (
                ratios and self.given.shape.is_large
            ):  # scale the reference samples of every batch size alike
                parameters = replace(parameters, measured_samples=sum(ratios) / len(ratios))
            elif reached and samples is None:
                samples = sum(reached) / len(reached)
            watts = [log.watts for log in logs if log.watts is not None]
            if watts and prices.watts_per_gpu is None:
                prices = replace(prices, watts_per_gpu=statistics.median(watts))
        if efficiency is not None:
            gpu = self.given.gpu
            each = timing.named("large").flops / (efficiency * GPUS[gpu].peak_tflops * 1e12) * 1e3
            parameters = replace(parameters, sequence_ms={**parameters.sequence_ms, gpu: each})
        return replace(self, parameters=parameters, samples=samples, prices=prices)


def _gbps(text: str | None) -> float | None:
    if text is None:
        return None
    match = _NETWORK.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) <= MOST_GBPS:
        reason = f"{text!r} is not a speed up to {MOST_GBPS:g} Gb/s"
        raise UserError("config.value", "--network", reason, "Give for example 400Gb")
    return float(match[1])


def read_measured(path: Path) -> calibration.MeasuredRun:
    """Read ranks, batch and speed from one of our MLPerf logs (other submitters do not log
    ranks).
    """
    log = read_log(path)
    ranks = log.value("ranks")
    batch = log.value("global_batch_size")
    start = log.first("run_start")
    if (
        not isinstance(ranks, int)
        or not isinstance(batch, int)
        or start is None
        or ranks < 1
        or batch < 1
    ):
        reason = "does not record ranks, batch and run start"
        raise UserError("log.incomplete", path, reason, "Give a log that mlbert train wrote")
    triples = zip(log.all("eval_start"), log.all("eval_stop"), evaluations_of(log), strict=False)
    evaluations = [
        (begin.time_ms / 1e3, end.time_ms / 1e3, one.samples) for begin, end, one in triples
    ]
    try:
        found = calibration.measured(
            ranks,
            batch,
            start.time_ms / 1e3,
            evaluations,
            samples_to_target(log),
            samples_before(log) or 0.0,
        )
    except ValueError as error:
        reason = f"has no usable speed: {error}"
        raise UserError(
            "log.incomplete", path, reason, "Give a log of a run with evaluations"
        ) from None
    summary = run_file(path, "summary.json")
    watts = read_json(summary, "").get("average_watts") if summary else None
    return replace(found, watts=watts / ranks if is_number(watts) and watts > 0 else None)
