"""``glue.py YAML [name=value ...]``: fine-tune on GLUE's tasks, one process per job,
and print the scores.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
import typer
from rich.console import Console

from mlbert.data.prepare import glue_sources
from mlbert.distributed.world import World
from mlbert.host.console import console_progress
from mlbert.host.environment import environment
from mlbert.host.errors import UserError, public_names
from mlbert.host.exit_statuses import FAILED, SUCCEEDED
from mlbert.programs import glue_runner
from mlbert.programs.glue_runner import GlueJob, GlueProgress, Runner, State
from mlbert.programs.task_metrics import last_evaluation
from mlbert.runs.config import RunConfig
from mosaic_yaml import finetuning_yaml, glue_yaml
from mosaic_yaml.commands.main_yaml import WORDS, Words, YamlFile, check_yaml_file, resolve_layer
from mosaic_yaml.common_yaml import names_for_errors
from mosaic_yaml.glue_yaml import GlueYaml
from mosaic_yaml.nested_yaml import Leaves, YamlValue, read_nested

PROGRAM = "glue.py"
JOB_YAML = "job.yaml"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings=WORDS)
def glue(path: YamlFile, words: Words = None) -> int:
    """Fine-tune on GLUE's eight tasks, one process per job, and print the scores.

    Each job has its own folder. As many jobs run in parallel as there are GPUs, or CPU cores
    without a GPU. rte, mrpc and stsb start from the weights of the first mnli job. If started
    again, finished jobs are skipped. A job's YAML also runs alone: mlbert finetune
    FOLDER/task=T/seed=S/job.yaml

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
    """
    check_yaml_file(PROGRAM, path)
    if World.identify(environment()).world_size > 1:
        remedy = f"Run python {PROGRAM} without a launcher"
        raise UserError("command.launcher", PROGRAM, "starts its processes itself", remedy)
    return Program(
        path, GlueYaml(Leaves(path, read_nested(path, words or [], glue_yaml.KNOWN))), Console()
    ).run()


class Program:
    """One run of glue.py: its YAML, its jobs and their metrics."""

    def __init__(self, path: Path, given: GlueYaml, console: Console) -> None:
        self._path = path
        self._given = given
        self._console = console
        self._metrics: dict[GlueJob, dict[str, float]] = {}
        self._first = next((job for job in given.jobs if job.task == glue_runner.FIRST), None)

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
        done = [job for job in given.jobs if self._is_done(job)]
        for job in done:
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
        to_do = {job: samples[job.task] for job in given.jobs if job not in done}
        progress = console_progress(self._console)
        display = GlueProgress(progress, to_do, self._folder, self._metrics)
        with progress.task("fine-tuning", display.total, "samples") as advance:

            def on_change(job: GlueJob | None) -> None:
                if job is not None and runner.states[job] is State.DONE:
                    self._end(job)
                display.show(runner, job, advance)

            runner.run(on_change)
        missing = [job for job, state in runner.states.items() if state is not State.DONE]
        glue_runner.write_scores(given.folder, self._metrics, missing)
        self._console.print(glue_runner.scores_table(self._metrics))
        self._print(f"{given.folder / glue_runner.SCORES}, {given.folder / glue_runner.FIGURE}")
        for job in missing:
            why = f"{glue_runner.FIRST} has failed"
            if runner.states[job] is State.FAILED:
                why = f"{runner.last_line(job)} ({self._folder(job) / glue_runner.LOG})"
            print(f"{PROGRAM}: {job.task} seed {job.seed}: {why}", file=sys.stderr)
        return FAILED if missing else SUCCEEDED

    def _end(self, job: GlueJob) -> None:
        self._metrics[job] = last_evaluation(self._folder(job) / "run_0")
        is_start = job == self._first and any(other.waits for other in self._given.jobs)
        if not is_start and not self._given.keeps_weights(job):
            for name in ("weights", "huggingface"):
                shutil.rmtree(self._folder(job) / "run_0" / name, ignore_errors=True)

    def _check_settings(self) -> dict[str, int]:
        """Return the training samples of each task.

        Raises UserError for a wrong setting of any task.
        """
        samples = {}
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
            samples[task] = config[RunConfig].max_samples_termination
        return samples

    def _prepare(self, job: GlueJob) -> list[str]:
        folder = self._folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB_YAML).write_text(self._yaml(job), encoding="utf-8")
        return [sys.executable, "-m", "mlbert", "finetune", str(folder / JOB_YAML)]

    def _yaml(self, job: GlueJob) -> str:
        start = self._given.start
        if job.waits and self._first is not None:
            start = str(self._folder(self._first) / "run_0" / "weights")
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
            reason = f"holds the result of another {JOB_YAML}"
            raise UserError(
                "run.exists", folder, reason, "Choose another base_run_name, or remove the folder"
            )
        return True

    def _folder(self, job: GlueJob) -> Path:
        return job.folder(self._given.folder)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
