"""``glue.py YAML [name=value ...]``: fine-tune on GLUE's tasks, one process per job,
and print the scores.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import torch
import typer
from rich.console import Console

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import write_tokenizer
from mlbert.data.prepare import glue_sources
from mlbert.distributed.world import World
from mlbert.host.console import console_progress
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, public_names
from mlbert.host.exit_statuses import FAILED, SUCCEEDED
from mlbert.host.files import write_atomically, writing
from mlbert.host.option_checks import first_given, refuse_with
from mlbert.models.fill_mask import open_model
from mlbert.programs import glue_runner
from mlbert.programs.glue_published import published_scores
from mlbert.programs.glue_runner import GlueJob, GlueProgress, Runner, State
from mlbert.programs.task_metrics import last_evaluation
from mlbert.runs.config import RunConfig
from mosaic_yaml import finetuning_yaml, glue_of_model, glue_yaml
from mosaic_yaml.commands.main_yaml import WORDS, Words, check_yaml_file, resolve_layer
from mosaic_yaml.common_yaml import find_start, names_for_errors
from mosaic_yaml.glue_of_model import Asked
from mosaic_yaml.glue_yaml import GlueYaml
from mosaic_yaml.nested_yaml import Leaves, YamlValue, read_nested

PROGRAM = "glue.py"
JOB_YAML = "job.yaml"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings=WORDS)
def glue(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="YAML", help="YAML file to start from.", show_default=False),
    ] = None,
    words: Words = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="MODEL", help="Model to evaluate, with the settings for its kind."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="GLUE's files, default glue-data; missing ones are downloaded."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Jobs and scores; default glue.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Such as cola,rte; default: all eight.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=len(glue_runner.MOST_SEEDS),
            help="Runs of each task; default: as published, 1 to 5.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Search over the settings of ModernBERT's paper: 48 jobs per task."
        ),
    ] = False,
) -> int:
    """Fine-tune on GLUE's eight tasks, one process per job, and print the scores.

    \b
    mlbert glue --from MODEL
        with the settings published for models of its form
    mlbert glue YAML [NAME=VALUE]...
        with every setting

    MODEL is a run folder, its weights/, or a Hugging Face folder of a BERT, RoBERTa, MosaicBERT or
    ModernBERT. Its YAML is written to DIR/glue.yaml. Scores are printed next to published ones.

    Each job has its own folder. As many jobs run in parallel as there are GPUs, or CPU cores
    without a GPU. rte, mrpc and stsb start from the weights of the first mnli job. If started
    again, finished jobs are skipped. A job's YAML also runs alone: mlbert finetune
    FOLDER/task=T/seed=S/job.yaml. In a YAML:

    \b
    starting_checkpoint_load_path=WEIGHTS
        a run folder, its weights/, a Hugging Face folder, a Composer checkpoint
    base_run_name=NAME
        job T with seed S is named NAME_task=T_seed=S
    save_finetune_checkpoint_folder=DIR
        its folder is DIR/task=T/seed=S; scores and their figure are in DIR
    parallel=false
        run the jobs one after the other
    published_order=true
        never shuffle the training rows, as in the published program
    data.glue=FOLDER
        GLUE's files in their official format
    data.source=NAME
        how to create missing files: datasets, python (stand-ins)
    tasks.T.seeds=[19,717]
        seeds of a task; only the tasks in the YAML run
    tasks.T.trainer_kwargs.NAME=VALUE
        max_duration, eval_interval, eval_subset_num_batches, and
        save_num_checkpoints_to_keep (0: delete the weights after the job)
    tasks.T.optimizer.lr=5e-5
        also optimizer.weight_decay, batch_size
    callbacks.early_stopper.patience=3
        evaluations without improvement before a job stops
    search=true
        one job for each trial, as --search

    \b
    Examples:
      mlbert glue --from my-model/model --out scores
      mlbert glue --from my-model/model --tasks cola,rte --seeds 3
    """
    others = {"--data": data, "--out": out, "--tasks": tasks, "--seeds": seeds}
    others["--search"] = search or None
    if World.identify(environment()).world_size > 1:
        remedy = f"Run python {PROGRAM} without a launcher"
        raise UserError("command.launcher", PROGRAM, "starts its processes itself", remedy)
    if start is not None:
        refuse_with("--from", {"the YAML": path})
        asked = Asked(
            start=start,
            data=data or Path("glue-data"),
            out=out or Path("glue"),
            tasks=glue_of_model.chosen_tasks(tasks),
            num_seeds=seeds,
            is_search=search,
        )
        with public_names(glue_of_model.OPTIONS):
            return _of_model(asked)
    if (option := first_given(others)) is not None:
        raise UserError("config.conflict", option, "needs --from", "Write --from MODEL")
    if path is None:
        remedy = "Write mlbert glue --from MODEL"
        raise UserError("config.missing", PROGRAM, "needs a model or a YAML file", remedy)
    check_yaml_file(PROGRAM, path)
    given = GlueYaml(Leaves(path, read_nested(path, words or [], glue_yaml.KNOWN)))
    shape = None if given.start is None else find_start(given.start)[0]
    return Program(path, given, Console(), shape).run()


def _of_model(asked: Asked) -> int:
    """Write the YAML for a model, and run it."""
    model, _, tokenizer = open_model(asked.start)
    shape = model.config
    del model  # its weights are read by the jobs
    glue_sources.complete(asked.data, glue_sources.HUB, asked.tasks)
    path = asked.out / glue_of_model.GLUE_YAML
    vocabulary = asked.out / glue_of_model.TOKENIZER
    with writing(asked.out, "Name another --out"):
        vocabulary.mkdir(parents=True, exist_ok=True)
        write_tokenizer(tokenizer, vocabulary)
        write_atomically(path, glue_of_model.glue_yaml_text(asked, shape))
    console = Console()
    source = glue_of_model.settings_source(shape, asked.is_search)
    console.print(f"settings: {source}", markup=False, highlight=False, soft_wrap=True)
    leaves = Leaves(path, read_nested(path, [], glue_yaml.KNOWN))
    given = GlueYaml(leaves, glue_of_model.OPTIONS)
    return Program(path, given, console, shape, glue_of_model.OPTIONS).run()


class Program:
    """One run of glue.py: its YAML, its jobs and their metrics.

    Args:
        path: of the YAML.
        given: its content.
        console: where to print.
        shape: of the model to start from, if known.
        options: what a user who wrote no YAML types for its names.
    """

    def __init__(
        self,
        path: Path,
        given: GlueYaml,
        console: Console,
        shape: BertConfig | None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._path = path
        self._given = given
        self._console = console
        self._published = [] if shape is None else published_scores(shape)
        self._another = "--out" if options else "base_run_name"
        self._metrics: dict[GlueJob, dict[str, float]] = {}

    def run(self) -> int:
        """Run the unfinished jobs; print and write the scores."""
        given = self._given
        if not given.jobs:
            raise UserError(
                "config.missing", self._path, "defines no jobs", "Give tasks with seeds"
            )
        glue_sources.complete(given.glue, given.source, given.tasks)
        samples = self._check_settings()
        given.folder.mkdir(parents=True, exist_ok=True)
        done = []
        for job in given.jobs:  # those that wait come last, and need the metrics before
            if self._is_done(job):
                done.append(job)
                self._metrics[job] = last_evaluation(self._folder(job) / "run_0")
        if done:
            self._print(f"{len(done)} of {len(given.jobs)} jobs are already done")
        most = len(given.jobs) if given.parallel else 1
        visible = environment().get("CUDA_VISIBLE_DEVICES")
        slots = glue_runner.make_slots(
            torch.cuda.device_count(), visible, sorted(os.sched_getaffinity(0)), most
        )
        runner = Runner(
            given.jobs,
            done,
            slots,
            self._prepare,
            self._folder,
            environment(),
            given.names_for_errors,
        )
        to_do = {job: samples[job] for job in given.jobs if job not in done}
        progress = console_progress(self._console)
        display = GlueProgress(progress, to_do, self._folder, self._metrics)
        with progress.task("fine-tuning", display.total, "samples") as advance:

            def on_change(job: GlueJob | None) -> None:
                if job is not None and runner.states[job] is State.DONE:
                    self._end(job)
                display.show(runner, job, advance)

            runner.run(on_change)
        missing = [job for job, state in runner.states.items() if state is not State.DONE]
        glue_runner.write_scores(given.folder, self._metrics, missing, self._published)
        best = glue_runner.best_trials(self._metrics)
        self._console.print(glue_runner.scores_table(best, self._published))
        if given.is_search:
            for task, trial in {job.task: job.trial for job in best}.items():
                self._print(f"best of {task}: {trial.name if trial else ''}")
        self._print(f"{given.folder / glue_runner.SCORES}, {given.folder / glue_runner.FIGURE}")
        for job in missing:
            why = f"{glue_runner.FIRST} has failed"
            if runner.states[job] is State.FAILED:
                why = f"{runner.last_line(job)} ({self._folder(job) / glue_runner.LOG})"
            print(f"{PROGRAM}: {job.label}: {why}", file=sys.stderr)
        return FAILED if missing else SUCCEEDED

    def _end(self, job: GlueJob) -> None:
        """Read a finished job's metrics, and remove the weights that no other job needs."""
        self._metrics[job] = last_evaluation(self._folder(job) / "run_0")
        shutil.rmtree(self._folder(job) / "run_0" / "best", ignore_errors=True)  # weights, too
        start = self._start_of_waiting()
        is_needed = self._given.is_search or any(other.waits for other in self._given.jobs)
        for other in self._metrics:
            if other.task != job.task or (is_needed and other == start):
                continue
            is_beaten = other.trial is not None
            if is_beaten or not self._given.keeps_weights(other):
                for name in ("weights", "huggingface"):
                    shutil.rmtree(self._folder(other) / "run_0" / name, ignore_errors=True)

    def _start_of_waiting(self) -> GlueJob | None:
        """Return the job whose weights those that wait start from: the first of `FIRST`, or of a
        search the first of its best trial so far. None if there is none yet.
        """
        firsts = [job for job in self._given.jobs if job.task == glue_runner.FIRST]
        if self._given.is_search:
            firsts = [job for job in glue_runner.best_trials(self._metrics) if job in firsts]
        return next(iter(firsts), None)

    def _check_settings(self) -> dict[GlueJob, int]:
        """Return the training samples of each job.

        Raises UserError for a wrong setting of any task.
        """
        samples: dict[GlueJob, int] = {}
        for task in self._given.tasks:
            job = next(job for job in self._given.jobs if job.task == task)
            values = self._given.of_job(job, self._given.start)
            del values["save_folder"]  # the job may be done already
            leaves = Leaves(
                self._path,
                {name: YamlValue(value, str(self._path)) for name, value in values.items()},
            )
            names = names_for_errors(leaves, finetuning_yaml.NAMES)
            with public_names(self._given.names_for_errors(task)), public_names(names):
                layer = finetuning_yaml.to_settings(leaves, 1, torch.cuda.is_available())
                config = resolve_layer(self._path, layer).config
            most = config[RunConfig].max_samples_termination
            for other in self._given.jobs:
                if other.task == task:
                    samples[other] = most
                    if other.trial is not None and job.trial is not None:
                        samples[other] = most * other.trial.epochs // job.trial.epochs
        return samples

    def _prepare(self, job: GlueJob) -> list[str]:
        folder = self._folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB_YAML).write_text(self._yaml(job), encoding="utf-8")
        return [sys.executable, "-m", "mlbert", "finetune", str(folder / JOB_YAML)]

    def _yaml(self, job: GlueJob) -> str:
        start = self._given.start
        first = self._start_of_waiting() if job.waits else None
        if first is not None:
            start = str(self._folder(first) / "run_0" / "weights")
        return glue_yaml.as_text(self._given.of_job(job, start))

    def _is_done(self, job: GlueJob) -> bool:
        """Return True if a finished run with the same settings exists.

        Raises UserError if its settings differ.
        """
        folder = self._folder(job)
        if not (folder / "run_0" / "summary.json").exists():
            return False
        path = folder / JOB_YAML
        if not path.exists() or path.read_text(encoding="utf-8") != self._yaml(job):
            reason = f"contains the result of a different {JOB_YAML}"
            remedy = f"Choose another {self._another}, or remove the folder"
            raise UserError("run.exists", folder, reason, remedy)
        return True

    def _folder(self, job: GlueJob) -> Path:
        return job.folder(self._given.folder)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
