"""Run ``mlbert pretrain TEXT --tokens N``: one phase of a published recipe on the user's own text.

DIR/run_0/phase_ends/step_*   the checkpoint with which the phase ended, and each earlier end if it
                              was made longer; nothing removes them
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mlbert.config import presets
from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import Resolved
from mlbert.data.formats.manifest import make_folder
from mlbert.data.formats.tokenizer import load_tokenizer, write_tokenizer
from mlbert.data.prepare.custom_corpus import Facts, Request, write_facts
from mlbert.distributed.world import World
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import SUCCEEDED
from mlbert.host.files import writing
from mlbert.host.option_checks import refuse_with
from mlbert.programs.custom_corpus.own_folder import NOTES, OwnFolder
from mlbert.programs.custom_corpus.phase_plan import (
    DECAY,
    Parent,
    PhasePlan,
    PhaseRequest,
    check_ranks,
    easier_batch,
    plan_phase,
    resolve_phase,
)
from mlbert.programs.custom_corpus.prepared_sets import (
    PreparedSets,
    facts_of_sets,
    find_prepared,
)
from mlbert.programs.custom_corpus.run import Asked, CorpusRun, TrainingTask, start_run
from mlbert.runs.step_folders import step_path, steps_in
from mlbert.training.run_options import RunOptions

PHASE_ENDS = "phase_ends"
FEW_STEPS = 1000  # of a phase, below which a smaller batch is better


def pretrain(asked: Asked, request: PhaseRequest) -> int:
    """Run the whole command and return the exit status."""
    return start_run(asked, functools.partial(PhaseRun, request=request))


@dataclass(frozen=True)
class _ParentRun:
    """A run of this command that a phase starts from.

    Attributes:
        folder: of the run.
        checkpoint: of the run, named by the user, or the newest.
    """

    folder: OwnFolder
    checkpoint: Path


class PhaseRun(CorpusRun):
    """One call for a phase, whose length is in tokens."""

    def __init__(
        self,
        folder: OwnFolder,
        console: Console,
        asked: Asked,
        world: World,
        request: PhaseRequest,
    ) -> None:
        self._request_of_phase = request
        self._plan_before: PhasePlan | None = None
        self._phase_plan: PhasePlan | None = None
        self._sets: PreparedSets | None = None
        super().__init__(folder, console, asked, world)

    def prepare(self) -> TrainingTask | None:
        """See `CorpusRun.prepare`."""
        notes = self._folder.remembered()
        is_phase = notes is not None and _plan_of(self._folder, notes) is not None
        if is_phase and self._folder.finished() is not None and self._folder.has_checkpoint():
            keep_phase_end(self._folder)  # the call that ended it may have been killed before
        return super().prepare()

    def describe(self) -> int:
        """See `CorpusRun.describe`."""
        if find_prepared(self._asked.texts, self._asked.held_out) is None:
            return super().describe()
        self._open()
        for line in self._facts_of_sets(self._length()).inventory:
            self._say(line)
        return SUCCEEDED

    def _open(self) -> None:
        super()._open()
        if self._sets is None or self._vocabulary is not None:
            return
        if self._sets.home is None:
            reason = f"is missing, and {self._asked.texts[0]} is a prepared set"
            remedy = "Name the tokenizer that the set was made with, or is to be read with"
            raise UserError("config.missing", "--tokenizer", reason, remedy)
        self._vocabulary = load_tokenizer(self._sets.home)

    def _find_text(self) -> None:
        asked = self._asked
        self._sets = find_prepared(asked.texts, asked.held_out)
        if self._sets is None:
            super()._find_text()
            return
        of_text = {
            "--text": asked.column,
            "--encoding": asked.encoding,
            "--skip-bad": asked.skip_bad or None,
        }
        refuse_with(f"the prepared set {asked.texts[0]}", of_text)

    def _facts_of_sets(self, length: int) -> Facts:
        """Return the facts about the prepared sets."""
        assert self._sets is not None, "TEXT is a set"
        assert self._vocabulary is not None, "_open checks it"
        return facts_of_sets(self._sets, self._vocabulary, length)

    def _make_facts(self, plan: Any) -> Facts:
        if self._sets is None:
            return super()._make_facts(plan)
        assert self._vocabulary is not None, "_open checks it"
        facts = self._facts_of_sets(plan.length)
        make_folder(self._folder.text)
        write_tokenizer(self._vocabulary, self._folder.text)
        write_facts(facts, self._folder.text)
        return facts

    def _data(self) -> dict[str, Any]:
        return {} if self._sets is None else self._sets.settings(self._length())

    def _open_start(self) -> None:
        """Set the model to start from, and its vocabulary.

        Of an earlier phase only the notes are read: its weights are read when training begins, and
        not at all by a call that resumes.
        """
        start = self._asked.start
        run = None if start is None else _find_run(start)
        if run is None:
            super()._open_start()
            return
        self._vocabulary = load_tokenizer(run.folder.text)
        self._start = run.checkpoint, BertConfig.from_json(run.folder.shape)
        notes = run.folder.remembered()
        assert notes is not None, "the run has notes"
        self._plan_before = _plan_of(run.folder, notes)

    def _identity(self) -> dict[str, Any]:
        request = self._request_of_phase
        start = self._asked.start
        is_decay = request.phase == DECAY
        return {
            "--preset": request.preset,
            "--phase": request.phase,
            # A decay has one end: it is not made longer, as a constant phase is.
            "--tokens": request.tokens if is_decay else None,
            "--length": request.length,
            "--batch": request.rows,
            "--warmup-tokens": request.warmup_tokens,
            **super()._identity(),
            **self._identity_of_sets(),
            "--from": None if start is None else str(start.resolve()),
        }

    def _identity_of_sets(self) -> dict[str, Any]:
        if self._sets is None or self._vocabulary is None:
            return {}
        return {"set": self._sets.identity(self._vocabulary)}

    def _plan(self, notes: dict[str, Any] | None) -> Any:
        request = self._request_of_phase
        if notes is not None:
            plan = _plan_of(self._folder, notes)
            if plan is None:
                raise self._folder.damaged()
        else:
            plan = plan_phase(request, self._num_bytes, self._parent())
            if self._asked.vocab_size is not None:
                plan = replace(plan, vocab_size=self._asked.vocab_size)
            check_ranks(plan, self._world.world_size)
            self._folder.remember({"asked": self._identity(), "settings": asdict(plan)})
        self._phase_plan = plan
        for line in self._plan_words(plan):
            self._say(line)
        return plan

    def _parent(self) -> Parent | None:
        """Return what the phase starts from. Raises UserError if that does not exist."""
        if self._start is None:
            return None
        start, shape = self._start
        if not start.exists():
            remedy = "Give the run's folder, or a checkpoint in its phase_ends"
            raise UserError("checkpoint.missing", start, "does not exist", remedy)
        return Parent(str(start.resolve()), shape, self._plan_before)

    def _plan_words(self, plan: PhasePlan) -> list[str]:
        tokens = self._request_of_phase.tokens
        steps = plan.steps(tokens)
        rate = f"rate {plan.learning_rate:g}"
        if plan.warmup_tokens:
            rate += f" after {plan.warmup_tokens:,} tokens of warm-up"
        if plan.phase == DECAY:
            rate += ", to 0 by 1 - sqrt"
        batch = f"{plan.rows:,} rows of {plan.length:,} tokens a step"
        if plan.has_growth:
            batch += f", from {plan.first_rows:,} over {plan.growth_tokens:,} tokens"
        lines = [f"{plan.phase} of {plan.preset}: {tokens:,} tokens; {batch}; {rate}"]
        if plan.parent is not None:
            state = "with" if plan.with_optimizer else "without"
            lines.append(f"starting from {plan.parent}, {state} its optimizer state")
        easier = easier_batch(plan, self._world.world_size)
        if easier is not None:
            lines.append(
                f"warning: {plan.rows:,} rows divide only into small micro-batches, which is slow: "
                f"give --batch {easier}"
            )
        if steps < FEW_STEPS:
            lines.append(
                f"warning: only about {steps:,} full steps: a smaller --batch makes more of them"
            )
        return lines

    def _length(self) -> int:
        if self._phase_plan is not None:
            return self._phase_plan.length
        return self._request_of_phase.length or presets.ROW_TOKENS

    def _request(self, vocab_size: int, length: int) -> Request:
        """Return how to prepare the text: as in the published models, no sequence has two
        documents.
        """
        return replace(super()._request(vocab_size, length), joins=False)

    def _length_words(self) -> str:
        return f"{self._request_of_phase.tokens:,} tokens of training"

    def _is_complete(self, summary: Mapping[str, Any]) -> bool:
        notes = self._folder.remembered()
        plan = None if notes is None else _plan_of(self._folder, notes)
        if plan is None:
            raise self._folder.damaged()
        asked = plan.steps(self._request_of_phase.tokens) * plan.step_tokens
        return int(summary["tokens"]) >= asked

    def _complete_words(self, summary: Mapping[str, Any]) -> list[str]:
        trained = int(summary["tokens"])
        lines = [f"{self._folder.path} is finished; trained on {trained:,} tokens"]
        if self._request_of_phase.phase != DECAY:
            lines.append(f"To train it longer, repeat the command with --tokens {2 * trained:g}")
        return lines

    def _configure(self, task: TrainingTask) -> tuple[Resolved, RunOptions]:
        resolved = resolve_phase(
            self._folder,
            PhasePlan(**task.settings),
            self._request_of_phase.tokens,
            task.train_sequences,
            task.resume,
            self._world.world_size,
            task.data,
        )
        return resolved, RunOptions(mlperf_log=self._asked.mlperf, saves_last_step=True)

    def finish(self) -> None:
        """See `CorpusRun.finish`."""
        keep_phase_end(self._folder)
        super().finish()


def keep_phase_end(folder: OwnFolder) -> None:
    """Keep the newest checkpoint of a finished phase, whatever follows in its folder: as links to
    the same files where the file system has them.

    Raises UserError if it cannot be written.
    """
    source = step_path(folder.checkpoints, steps_in(folder.checkpoints)[-1])
    place = folder.run / PHASE_ENDS / source.name
    if place.exists():
        return
    partial = place.with_name(f".partial_{source.name}")
    with writing(place, "Free space, and repeat the command"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in source.iterdir():
            _link(file, partial / file.name)
        partial.rename(place)


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # no links on this file system
        shutil.copyfile(source, place)


def _find_run(start: Path) -> _ParentRun | None:
    """Return the run of this command that a path names: its folder, or a checkpoint in it.

    None if the path is something else, such as a model.

    Raises UserError if the run has no checkpoint.
    """
    if (start / NOTES).is_file():
        folder = OwnFolder(start)
        steps = steps_in(folder.checkpoints)
        if not steps:
            reason = "has no checkpoint to start from"
            remedy = "Train it first, or give a model: config.json, model.safetensors"
            raise UserError("checkpoint.missing", start, reason, remedy)
        return _ParentRun(folder, step_path(folder.checkpoints, steps[-1]))
    if not start.name.startswith("step_"):
        return None
    home = next((path for path in start.resolve().parents if (path / NOTES).is_file()), None)
    if home is None:
        return None
    return _ParentRun(OwnFolder(home), start)


def _plan_of(folder: OwnFolder, notes: Mapping[str, Any]) -> PhasePlan | None:
    """Return the plan in the notes of a run; None if the run was not planned in tokens."""
    settings = notes.get("settings")
    if not isinstance(settings, Mapping):
        raise folder.damaged()
    if "phase" not in settings:
        return None
    try:
        return PhasePlan(**settings)
    except TypeError:
        raise folder.damaged() from None
