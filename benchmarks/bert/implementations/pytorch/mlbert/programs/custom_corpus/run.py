"""Run ``mlbert pretrain TEXT``: check the folder, prepare the text, train,
and write the model and the report.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mlbert.config.bert_config import BertConfig
from mlbert.config.resolution import Resolved
from mlbert.data.formats.tokenizer import Tokenizer, check_for_masking, load_tokenizer
from mlbert.data.prepare.corpus_files import CorpusSource, find_sources
from mlbert.data.prepare.custom_corpus import Facts, Request, prepare, take_inventory
from mlbert.data.prepare.executor import Executor
from mlbert.distributed.world import World
from mlbert.host.console import LINE_SECONDS, console_progress, short_duration, write_page
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.exit_statuses import BY_SIGNAL, SUCCEEDED
from mlbert.host.files import write_atomically
from mlbert.host.packages import import_sibling
from mlbert.models.fill_mask import fill, open_masked_lm, open_model
from mlbert.models.weights.convert import grow_model
from mlbert.models.weights.model_card import header
from mlbert.models.weights.weight_files import new_path
from mlbert.programs import pretrain_rules as rules
from mlbert.programs.custom_corpus.corpus_plan import (
    CorpusPlan,
    make_plan,
    num_processes,
    resolve_settings,
)
from mlbert.programs.custom_corpus.own_folder import OwnFolder
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE
from mlbert.programs.save_on_signal import train_until_signal
from mlbert.runs.events import Events
from mlbert.runs.progress import TrainState
from mlbert.training.experiment import evaluate_only
from mlbert.training.run_options import RunOptions

TOP = 5
# Options that are called differently in the notes of a folder.
_NAMES_OF_NOTES = {"--vocab": "--tokenizer"}
# What a user types for the settings that errors name.
OPTIONS = {
    "INIT_CHECKPOINT": "--from",
    "DATADIR_PHASE2": "TEXT",
    "EVALDIR": "--eval",
    "TOKENIZER": "--tokenizer",
    "LOGDIR": "--out",
    "LOGDIR or EXPERIMENT": "--out",
    "MAX_SECONDS": "--minutes",
}
# A sentence with [MASK], the masked word, and the guesses, most probable first.
Guessed = tuple[str, str, str]
_REPORT_PAGES = "mlaudit.report.page"
AUTO = "auto"  # the size that suits the text and the time
_PROCESS_BYTES = 4 << 20  # of text that are worth starting a process
MUCH_UNKNOWN = 0.005  # share of the held-out tokens

# Fractions of the time after which accuracy is compared with the baselines.
_EARLY = 0.3
_LATE = 0.6


def take_model(folder: OwnFolder) -> None:
    """Copy the run's weights to DIR/model, replacing an older copy.

    Raises UserError if it cannot be written.
    """
    written = next(
        path for name in ("huggingface", "weights") if (path := folder.run / name).is_dir()
    )
    with new_path(folder.model) as place:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for file in written.iterdir():
            shutil.copyfile(file, place / file.name)
        shutil.rmtree(folder.model, ignore_errors=True)
    # The same weights in Composer's format.
    (folder.path / "latest-rank0.pt").unlink(missing_ok=True)


def guess(folder: OwnFolder, facts: Facts) -> list[Guessed]:
    """Return the model's guesses for masked held-out sentences;
    sentences that are too long are skipped.
    """
    model, tokenizer = open_masked_lm(folder.model)
    found = []
    for text, answer in facts.sentences:
        with contextlib.suppress(UserError):
            guesses = fill(model, tokenizer, text, TOP)
            found.append(
                (
                    text,
                    answer,
                    ", ".join(f'"{token}" {probability:.2f}' for token, probability in guesses),
                )
            )
    return found


def write_report(
    folder: OwnFolder, facts: Facts, summary: dict[str, Any], guessed: Sequence[Guessed]
) -> None:
    """Write DIR/report.html. Raises UserError if it cannot be written."""
    shape = json.loads(folder.shape.read_text(encoding="utf-8"))
    layers = shape["num_hidden_layers"]
    hidden = shape["hidden_size"]
    bigram = facts.baselines["bigram_accuracy"]
    mask = load_tokenizer(folder.text).mask_token
    values = {
        "text": facts.origin,
        "training": f"{facts.train_tokens:,} tokens in {facts.train_sequences:,} sequences",
        "held out": f"{facts.held_out_tokens:,} tokens of whole documents",
        "removed as near repeats of held-out text": f"{facts.near_repeats:,} tokens",
        "passes over the text": f"{summary['tokens'] / max(1, facts.train_tokens):.1f}",
        **{name: summary[name] for name in ("steps", "tokens", "tokens_per_second", "seed")},
        **{name: value for name, value in shape.items() if name != "architectures"},
    }
    # The report is mlaudit's, which this package does not import: it is looked up by name.
    page = import_sibling(_REPORT_PAGES).own_text_page(
        folder.path.resolve().name,
        (f"{summary['accuracy']:.1%}", "of the masked tokens in held-out text are predicted"),
        [
            (f"{bigram:.1%}", "guessing from one neighbor"),
            (
                f"{facts.baselines['most_frequent_accuracy']:.1%}",
                "always guessing the most frequent token",
            ),
            (f"{layers} x {hidden}", "layers x hidden size"),
            (short_duration(summary["seconds_to_train"]), "of training"),
        ],
        folder.run / "metrics.jsonl",
        {"bigram": bigram, "most frequent token": facts.baselines["most_frequent_accuracy"]},
        [[text.replace(mask, "▁▁▁"), *rest] for text, *rest in guessed],
        values,
    )
    write_page(folder.report, page)


def _changes(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str:
    """Describe how the files of a text, each with its path first, differ."""
    old, new = ({path: rest for path, *rest in files} for files in (before, now))
    both = old.keys() & new.keys()
    found = {
        "added": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {path for path in both if old[path] != new[path]},
    }
    names = {
        what: ", ".join(Path(path).name for path in sorted(paths)[:3])
        for what, paths in found.items()
    }
    return "; ".join(
        f"{len(paths)} {what} ({names[what]})" for what, paths in found.items() if paths
    )


def _model_card(folder: OwnFolder, facts: Facts, summary: dict[str, Any], length: int) -> str:
    shape = json.loads(folder.shape.read_text(encoding="utf-8"))
    is_modern = shape.get("position_embedding_type") == "rotary"
    architecture = "ModernBERT" if is_modern else "BERT"
    attention = "local and global" if shape.get("local_attention") else "global"
    tokenizer = load_tokenizer(folder.text)
    case = "removes case" if tokenizer.lower_case else "keeps case"
    if tokenizer.is_plain:
        case += " and accents"
    scripts = f"; scripts of its letters: {facts.scripts}" if facts.scripts else ""
    lines = "\n".join(header("fill-mask", ["masked-lm", architecture.lower()]))
    return f"""{lines}

# A masked language model of our own text

* Architecture: {architecture} with {attention} attention,
  {shape["num_hidden_layers"]} layers x {shape["hidden_size"]},
  trained on {length} tokens at a time.
* Text: {facts.origin}{scripts}.
* Vocabulary: {tokenizer.kind}, {shape["vocab_size"]:,} entries; it {case}.
  {facts.held_out_unknown:.2%} of the held-out tokens are unknown to it.
* Held-out accuracy: {summary["accuracy"]:.4f} of the masked tokens
  (15 % of the text, all of them [MASK]), after {summary["tokens"]:,} training tokens.
  Guessing from one neighbor gives {facts.baselines["bigram_accuracy"]:.4f}.

Use: `pipeline("fill-mask", model="{folder.model.name}")` of transformers,
or as the start of fine-tuning.
It carries the biases of its text.
"""


@dataclass(frozen=True)
class Asked:
    """Options of one call.

    Attributes:
        texts, out: paths of the text and of the run folder.
        seconds: total training time.
        size: a name of `mlbert.programs.pretrain_rules.SIZES`, or `AUTO`.
        vocab: vocabulary to use instead of training one.
        vocab_size: entries of a new vocabulary; None: by the size.
        cased: keep case and accents in a new vocabulary; None: by the text.
        held_out: text to evaluate on; None: a part of the text.
        column: of the text, in files of rows; None: "text", and folders' tables are not read.
        encoding, skip_bad: what to do with files that are not UTF-8 or cannot be read.
        start: weights to start from.
        grow_from: smaller model whose weights are tiled into the larger shape in ``shape``.
        shape: a bert_config.json or config.json.
        mlperf: write an MLPerf log.
        dry_run: only describe the text.
    """

    texts: list[Path]
    out: Path
    seconds: float
    size: str
    vocab: Path | None
    vocab_size: int | None
    cased: bool | None
    held_out: Path | None
    column: str | None
    encoding: str | None
    skip_bad: bool
    start: Path | None
    grow_from: Path | None
    shape: Path | None
    mlperf: bool
    dry_run: bool


@dataclass(frozen=True)
class TrainingTask:
    """What rank 0 has prepared, for all ranks; JSON-able.

    Attributes:
        settings: fields of the plan.
        train_sequences: size of the training set.
        baselines: held-out accuracies without a model.
        resume: resume from the newest checkpoint.
        data: settings of the data by key, if it is not the prepared text.
    """

    settings: Mapping[str, Any]
    train_sequences: int
    baselines: Mapping[str, Any]
    resume: bool
    data: Mapping[str, Any]


def pretrain(asked: Asked) -> int:
    """Run the whole command and return the exit status. Raises UserError on several ranks."""

    def make(folder: OwnFolder, console: Console, asked: Asked, world: World) -> CorpusRun:
        if world.world_size > 1:
            reason = "trains by the clock, as one process"
            remedy = "Give --preset and --tokens, or start it without a launcher"
            raise UserError("command.launcher", "mlbert pretrain TEXT", reason, remedy)
        return CorpusRun(folder, console, asked, world)

    return start_run(asked, make)


def start_run(asked: Asked, make: Callable[[OwnFolder, Console, Asked, World], CorpusRun]) -> int:
    """Run the command with the kind of run that ``make`` returns, and return the exit status.

    Rank 0 prepares the text and writes the model. The other ranks wait meanwhile.
    """
    world = World.identify(environment())
    world.warn_once()
    folder = OwnFolder(asked.out)
    console = Console(quiet=world.rank != 0)
    meeting = world.rendezvous
    run = meeting.run_all("start", lambda: make(folder, console, asked, world))
    if asked.dry_run:
        return meeting.run_on_rank_0("description", run.describe)
    with ExitStack() as until_end:

        def prepare() -> dict[str, Any] | None:
            until_end.enter_context(folder.held())
            task = run.prepare()
            return None if task is None else asdict(task)

        prepared = meeting.run_on_rank_0("preparation", prepare)
        if prepared is None:
            return SUCCEEDED
        status = run.train(TrainingTask(**prepared))
        if status < BY_SIGNAL:
            # A launcher ends all ranks when one fails: rank 0 may still be writing.
            meeting.run_on_rank_0("results", run.finish if status == SUCCEEDED else lambda: None)
        return status


class CorpusRun:
    """One call of the command. Training ends by the clock; `mlbert.programs.custom_corpus.phases`
    overrides what differs for a number of tokens.

    Each rank has one; `describe`, `prepare` and `finish` are rank 0's.
    """

    def __init__(self, folder: OwnFolder, console: Console, asked: Asked, world: World) -> None:
        self._folder = folder
        self._console = console
        self._asked = asked
        self._world = world
        self._say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
        self._others: Counter[str] = Counter()
        self._sources: list[CorpusSource] = []
        self._held_out: list[CorpusSource] = []
        self._vocabulary: Tokenizer | None = None
        self._start: tuple[Path, BertConfig] | None = None
        self._facts: Facts | None = None  # of the prepared text

    @property
    def _num_bytes(self) -> int:
        return sum(source.num_bytes for source in self._sources)

    def _open(self) -> None:
        """Find the text, and set the model to start from and the vocabulary, if they are given."""
        self._find_text()
        self._open_start()

    def _find_text(self) -> None:
        asked = self._asked
        path = self._folder.path
        self._sources = find_sources(asked.texts, path, self._others, asked.column)
        if asked.held_out is not None:
            self._held_out = find_sources([asked.held_out], path, column=asked.column)

    def _open_start(self) -> None:
        """Set the model to start from and the vocabulary, if they are given."""
        asked = self._asked
        start = self._grown_model() if asked.grow_from is not None else asked.start
        if start is not None:
            model, _, self._vocabulary = open_model(start)
            self._start = start, model.config
        elif asked.vocab is not None:
            self._vocabulary = load_tokenizer(asked.vocab)
        if self._vocabulary is not None:
            check_for_masking(self._vocabulary)

    def _grown_model(self) -> Path:
        """Return the folder of the larger model, which the first call writes. A description needs
        only the smaller one.
        """
        smaller = self._asked.grow_from
        shape = self._asked.shape
        assert smaller is not None
        assert shape is not None
        if self._asked.dry_run:
            return smaller
        if not self._folder.grown.is_dir():
            grow_model(smaller, self._folder.grown, shape)
        return self._folder.grown

    def _length(self) -> int:
        """Return the tokens of a sequence."""
        return rules.SEQUENCE_LENGTH

    def describe(self) -> int:
        """Print what would be read and return the exit status."""
        self._open()
        for line in take_inventory(self._request(0, self._length()), self._executor()):
            self._say(line)
        return SUCCEEDED

    def prepare(self) -> TrainingTask | None:
        """Prepare the text and the folder, and return what to train; None if nothing is left."""
        self._open()
        notes = self._folder.remembered()
        summary = self._folder.finished()
        if notes is not None and summary is None and not self._folder.has_checkpoint():
            self._say("nothing was trained yet; starting again")
            notes = None
        if notes is not None:
            self._compare(notes["asked"])
        if summary is not None and self._is_complete(summary):
            # Without a report, the last call was interrupted while it wrote the model.
            if not self._folder.report.exists():
                self._facts = self._prepare_text(self._plan(notes))
                self.finish()
            for line in self._complete_words(summary):
                self._say(line)
            return None
        plan = self._plan(notes)
        facts = self._prepare_text(plan)
        self._facts = facts
        self._write_shape(plan)
        resume = self._folder.has_checkpoint()
        if summary is not None and not resume:
            reason = "its checkpoints are gone, so it cannot be extended"
            raise UserError("checkpoint.missing", self._folder.run, reason, "Choose another --out")
        if resume:
            state = "is finished and will be extended" if summary is not None else "was interrupted"
            self._say(f"{self._folder.path} {state}; resuming from its newest checkpoint")
        for path in (
            self._folder.summary,
            self._folder.report,
            *([] if resume else [self._folder.log]),
        ):
            path.unlink(missing_ok=True)
        task = TrainingTask(
            asdict(plan), facts.train_sequences, facts.baselines, resume, self._data()
        )
        resolved, _ = self._configure(task)  # here, so that rank 0 alone reports mistakes
        if self._start and not resume:
            self._evaluate_start(resolved)
        return task

    def _data(self) -> dict[str, Any]:
        """Return the settings of data that is not the prepared text."""
        return {}

    def _is_complete(self, summary: Mapping[str, Any]) -> bool:
        """Return True if a finished run was trained for what this call asks for."""
        return float(summary["seconds_to_train"]) >= 0.98 * self._asked.seconds

    def _complete_words(self, summary: Mapping[str, Any]) -> list[str]:
        trained = float(summary["seconds_to_train"])
        return [
            f"{self._folder.path} is finished; trained for {short_duration(trained)}",
            f"To train it longer, repeat the command with --minutes {2 * trained / 60:.3g}",
        ]

    def _length_words(self) -> str:
        """Return the length of the training."""
        return f"{short_duration(self._asked.seconds)} of training"

    def _identity(self) -> dict[str, Any]:
        """Return the options and text that all calls for one folder must share."""
        return {
            "--text": self._asked.column,
            "sources": [source.identity for source in self._sources],
            "--eval": [source.identity for source in self._held_out],
            "--size": self._asked.size,
            "--vocab": self._vocabulary.identity if self._vocabulary else None,
            "--vocab-size": self._asked.vocab_size,
            "--cased": self._asked.cased,
            "--encoding": self._asked.encoding,
            "--skip-bad": self._asked.skip_bad,
            "--from": str(self._start[0].resolve()) if self._start else None,
            "--grow-from": str(self._asked.grow_from.resolve()) if self._asked.grow_from else None,
        }

    def _compare(self, before: dict[str, Any]) -> None:
        """Raise UserError if the folder's run was started with other options or text."""
        now = self._identity()
        for name in (name for name, value in now.items() if before.get(name) != value):
            what = f"a different {_NAMES_OF_NOTES.get(name, name)}"
            remedy = "Choose another --out, or remove it"
            if name == "sources":
                what = f"other text: {_changes(before[name], now[name])}"
                weights = self._folder.model if self._folder.model.is_dir() else self._folder.run
                remedy = f"To continue from its weights, give --from {weights} and another --out"
            raise UserError(
                "run.other-settings", self._folder.path, f"contains a run with {what}", remedy
            )

    def _plan(self, notes: dict[str, Any] | None) -> CorpusPlan:
        """Return the plan of the first call; later calls reuse it."""
        if notes is not None:
            try:
                return CorpusPlan(**notes["settings"])
            except TypeError:
                raise self._folder.damaged() from None
        plan = make_plan(self._num_bytes, self._asked.seconds, self._asked.size, self._start)
        plan = replace(plan, vocab_size=self._asked.vocab_size or plan.vocab_size)
        self._folder.remember({"asked": self._identity(), "settings": asdict(plan)})
        return plan

    def _request(self, vocab_size: int, length: int) -> Request:
        asked = self._asked
        return Request(
            sources=self._sources,
            vocabulary=self._vocabulary,
            vocab_size=vocab_size,
            lower_case=None if asked.cased is None else not asked.cased,
            length=length,
            eval_rate=EVAL_MASK_RATE,
            held_out=self._held_out,
            others=self._others,
            encoding=asked.encoding,
            skip_bad=asked.skip_bad,
        )

    def _executor(self) -> Executor:
        """Return one with a process for each core, and none for little text."""
        return Executor(
            min(num_processes(), self._num_bytes // _PROCESS_BYTES), console_progress(self._console)
        )

    def _prepare_text(self, plan: CorpusPlan) -> Facts:
        """Prepare the text, unless that is done, and print what is in it."""
        facts = self._make_facts(plan)
        for line in facts.inventory:
            self._say(line)
        about = "about " if facts.is_estimate else ""
        self._say(
            f"tokens: {about}{facts.train_tokens:,} to train on, "
            f"{facts.held_out_tokens:,} held out, {facts.held_out_unknown:.2%} of these unknown"
        )
        if facts.near_repeats > 0.1 * facts.train_tokens:
            self._say(
                f"warning: {facts.near_repeats:,} tokens nearly repeat held-out text "
                "and are removed"
            )
        if facts.held_out_unknown > MUCH_UNKNOWN:
            self._say(
                "warning: many tokens are unknown: use a larger --vocab-size, more text, "
                "or another --tokenizer"
            )
        return facts

    def _make_facts(self, plan: CorpusPlan) -> Facts:
        request = self._request(plan.vocab_size, plan.length)
        return prepare(request, self._folder.text, self._executor())

    def _write_shape(self, plan: CorpusPlan) -> None:
        entries = load_tokenizer(self._folder.text).vocab_size
        vocab_size = self._start[1].vocab_size if self._start else entries
        sizes = {**plan.shape, "vocab_size": vocab_size}
        shape = BertConfig(**sizes)
        write_atomically(self._folder.shape, shape.to_json())
        what = "starting from a model" if self._start else "new model"
        self._say(
            f"{what}: {shape.num_hidden_layers} layers x {shape.hidden_size}, {entries:,} entries, "
            f"{shape.num_parameters / 1e6:.1f} M parameters; "
            f"{self._length_words()}"
        )

    def _evaluate_start(self, resolved: Resolved) -> None:
        """Print the accuracy of the weights to start from, in this process alone."""
        show = functools.partial(console_progress(self._console).task, "evaluating", unit="samples")
        config = resolved.config
        accuracy = evaluate_only(config, resolved.recipe, World(), Console(quiet=True), show)
        self._say(f"before training: held-out accuracy {accuracy:.4f}")

    def train(self, task: TrainingTask) -> int:
        """Train on all ranks and return the exit status."""
        resolved, options = self._configure(task)
        return train_until_signal(
            resolved,
            self._world,
            self._console,
            options,
            self._say,
            self._folder.has_checkpoint,
        )

    def _configure(self, task: TrainingTask) -> tuple[Resolved, RunOptions]:
        """Return the settings of the run, and how it is paced."""
        plan = CorpusPlan(**task.settings)
        seconds = self._asked.seconds
        resolved = resolve_settings(
            self._folder, plan.settings, seconds, task.train_sequences, task.resume
        )
        warnings = BaselineWarnings(self._say, seconds, task.baselines)
        return resolved, RunOptions(plan.pace(seconds), warnings, self._asked.mlperf)

    def finish(self) -> None:
        """Write the model and the report of a finished training."""
        facts = self._facts
        assert facts is not None, "the text is prepared"
        folder = self._folder
        summary = self._folder.finished()
        assert summary is not None, "the run is finished"
        take_model(folder)
        write_atomically(
            folder.model / "README.md", _model_card(folder, facts, summary, self._length())
        )
        guessed = guess(folder, facts)
        write_report(folder, facts, summary, guessed)
        accuracy = summary["accuracy"]
        bigram = facts.baselines["bigram_accuracy"]
        if guessed:
            self._say("\nheld-out sentences, the masked word, and the model's guesses:")
        for text, answer, guesses in guessed:
            self._say(f"  {text}\n    {answer}: {guesses}")
        self._say(
            f"\nfinished: held-out accuracy {accuracy:.4f} after "
            f"{short_duration(summary['seconds_to_train'])} "
            f"(guessing from one neighbor {bigram:.4f}, always the most frequent token "
            f"{facts.baselines['most_frequent_accuracy']:.4f})"
        )
        self._say(f"model:  {folder.model}\nreport: {folder.report}\nnext:")
        mask = load_tokenizer(folder.text).mask_token
        self._say(f'  mlbert fill-mask {folder.model} "Write a sentence with one {mask} in it."')
        self._say(f"  mlbert finetune --from {folder.model} --train FILE.csv")


class BaselineWarnings(Events):
    """Warn if the model is no better than a simple predictor, and have slow steps shown every 10 s.

    Args:
        seconds: duration of the whole run.
        baselines: held-out accuracies of the most frequent token and of the bigram model.
    """

    def __init__(
        self, say: Callable[[str], None], seconds: float, baselines: Mapping[str, float]
    ) -> None:
        self._say = say
        self._seconds = seconds
        self._baselines = baselines
        self._shown = time.monotonic()
        self._warned = 0

    def should_log(self, step: int) -> bool:
        """Return True 10 s after the last log point."""
        return time.monotonic() - self._shown >= LINE_SECONDS

    def step(
        self,
        state: TrainState,
        loss: float,
        lr: float,
        grad_norm: float,
        ranks: Sequence[float] = (),
    ) -> None:
        """Note the time of a log point."""
        self._shown = time.monotonic()

    def evaluation(self, state: TrainState, metrics: Mapping[str, float], seconds: float) -> None:
        """Compare the accuracy on held-out text with the baselines."""
        share = seconds / self._seconds
        accuracy = state.accuracy
        most_frequent, bigram = (
            self._baselines[f"{name}_accuracy"] for name in ("most_frequent", "bigram")
        )
        if self._warned < 1 and share >= _EARLY and accuracy <= most_frequent + 0.005:
            self._warned = 1
            what = f"always guessing the most frequent token ({most_frequent:.4f})"
            self._say(f"warning: no better than {what}: the model has learned nothing else yet")
        elif self._warned < 2 and share >= _LATE and accuracy <= bigram:
            self._warned = 2
            what = f"guessing from one neighbor ({bigram:.4f})"
            self._say(f"warning: no better than {what}: use more --minutes, or a smaller --size")
