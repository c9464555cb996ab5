"""Convert the YAML of ``sequence_classification.py`` to our settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from mlbert.data.formats import glue_tasks
from mlbert.data.formats.order import RankSlice
from mlbert.data.formats.tasks import (
    LABEL_NAMES,
    TEXT_NAMES,
    TaskForm,
    column_names,
    form_of_task,
    read_training,
)
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.tasks import steps_per_epoch
from mlbert.data.prepare import glue_sources
from mlbert.host.errors import UserError
from mosaic_yaml import common_yaml
from mosaic_yaml.durations import Durations
from mosaic_yaml.nested_yaml import Layer, Leaves, YamlValue

_LOADER = (
    "split",
    "tokenizer_name",
    "max_seq_len",
    "shuffle",
    "drop_last",
    "num_workers",
    "pin_memory",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
)
KNOWN = (
    *common_yaml.COMMON,
    "max_seq_len",
    "model.num_labels",
    "train_subset_num_batches",
    common_yaml.PATIENCE,
    *(
        f"data.{name}"
        for name in ("train", "eval", "text_columns", "label_column", "task", "glue", "source")
    ),
    *(f"{loader}.{name}" for loader in ("train_loader", "eval_loader") for name in _LOADER),
    *(f"train_loader.dataset.{name}" for name in ("path", "text_columns", "label_column")),
    "eval_loader.dataset.path",
)
NAMES: common_yaml.Names = {
    **common_yaml.NAMES,
    "input_dir": ("train_loader.dataset.path", "data.train", "data.glue"),
    "eval_dir": ("eval_loader.dataset.path", "data.eval", "data.glue"),
    "text_columns": ("train_loader.dataset.text_columns", "data.text_columns"),
    "label_column": ("train_loader.dataset.label_column", "data.label_column"),
    "num_labels": ("model.num_labels",),
    "task": ("data.task",),
    "max_seq_length": ("train_loader.max_seq_len", "max_seq_len"),
    "tokenizer": ("train_loader.tokenizer_name", "tokenizer_name"),
    "shuffle": ("train_loader.shuffle",),
    "drop_last": ("train_loader.drop_last",),
}


class TaskData:
    """The files of a task, as given in the YAML."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self.path = leaves.optional_text("train_loader.dataset.path", "data.train")
        self.task: str | None = None
        if self.path is None and leaves.is_given("data.task"):
            self.task = str(leaves.choice("data.task", tuple(glue_tasks.TASKS), "").value)
        if self.path is None and self.task is None:
            remedy = "Give data.train=FILE data.eval=FILE, or data.task=qnli"
            raise UserError("config.missing", leaves.path, "does not name the data", remedy)

    @cached_property
    def form(self) -> TaskForm:
        """Columns and classes.

        Raises UserError if columns are not given and cannot be found by name.
        """
        leaves = self._leaves
        declared = None
        if leaves.is_given("model.num_labels"):
            declared = leaves.number("model.num_labels", None).value
        if self.task is not None:
            form = form_of_task(self.task)
            if declared not in (None, form.num_labels):
                reason = f"{self.task} has {form.num_labels} labels, not {declared:g}"
                remedy = f"Write {form.num_labels}, or null"
                raise UserError(
                    "config.conflict", leaves["model.num_labels"].origin, reason, remedy
                )
            return form
        names = column_names(self.train_file)
        label = leaves.optional_text("train_loader.dataset.label_column", "data.label_column")
        label = label or next((name for name in LABEL_NAMES if name in names), None)
        if label is None:
            reason = f"which of {', '.join(names)} is the label?"
            raise UserError(
                "config.ambiguous", self.train_file, reason, "Give data.label_column=..."
            )
        return TaskForm(
            self._texts(names, label), label, None if declared is None else int(declared)
        )

    @property
    def train_file(self) -> Path:
        """The training file."""
        return (
            glue_tasks.TASKS[self.task].train_file(self.folder)
            if self.task
            else Path(str(self.path))
        )

    @property
    def folder(self) -> Path:
        """The folder of GLUE's files."""
        return Path(str(self._leaves.text("data.glue", "glue-data").value))

    def put(self, layer: Layer) -> None:
        """Add the data settings; make or download missing files of a GLUE task."""
        leaves = self._leaves
        if self.task is not None:
            source = leaves.choice("data.source", glue_sources.SOURCES, glue_sources.HUB)
            glue_sources.complete(self.folder, str(source.value), [self.task])
            layer.put("task", self.task, "data.task")
            layer.put("input_dir", self.folder, "data.glue")
            layer.put("eval_dir", self.folder, "data.glue")
        else:
            evaluation = leaves.optional_text("eval_loader.dataset.path", "data.eval")
            if evaluation is None:
                remedy = "Give data.eval=FILE with rows to evaluate on"
                raise UserError("config.missing", leaves.path, "data.eval is not set", remedy)
            layer.put("input_dir", self.path, "data.train")
            layer.put("eval_dir", evaluation, "data.eval")
            layer.put("text_columns", ",".join(self.form.text_columns), "data.text_columns")
            layer.put("label_column", self.form.label_column, "data.label_column")
            layer.put("num_labels", self.form.num_labels, "model.num_labels")

    def _texts(self, names: Sequence[str], label: str) -> tuple[str, ...]:
        for name in ("train_loader.dataset.text_columns", "data.text_columns"):
            if self._leaves.is_given(name):
                value = self._leaves[name].value
                return (
                    tuple(map(str, value))
                    if isinstance(value, list)
                    else tuple(str(value).split(","))
                )
        for texts in TEXT_NAMES:
            if set(texts) <= set(names):
                return texts
        others = tuple(name for name in names if name != label)
        if len(others) not in (1, 2):
            reason = (
                f"which of {', '.join(others) or 'its columns'} are the text or the pair of texts?"
            )
            raise UserError(
                "config.ambiguous", self.train_file, reason, "Give data.text_columns=text, or a,b"
            )
        return others


def to_settings(leaves: Leaves, world_size: int, has_gpu: bool) -> Layer:
    """Return settings with origins by field name.

    Raises UserError if a value is missing or illegal.
    """
    layer = Layer({"recipe": ("classification", "sequence_classification.py")})
    data = TaskData(leaves)
    data.put(layer)
    _check_loaders(leaves, data)
    length = leaves.number("train_loader.max_seq_len", leaves.number("max_seq_len", 128))
    layer.put("max_seq_length", int(length.value), length.origin)
    tokenizer = leaves.text(
        "train_loader.tokenizer_name", leaves.text("tokenizer_name", "bert-base-uncased")
    )
    add_start(leaves, layer, tokenizer)
    if not leaves.flag("train_loader.shuffle", True).value:
        layer.put("shuffle", None, "train_loader.shuffle")
    layer.put("drop_last", leaves.flag("train_loader.drop_last", True))
    _add_durations(leaves, layer, data, world_size)
    common_yaml.add_optimizer(leaves, layer)
    common_yaml.add_compute(leaves, layer, has_gpu)
    return layer


def _add_durations(leaves: Leaves, layer: Layer, data: TaskData, world_size: int) -> None:
    """Add batch, training length, schedule, evaluations and outputs; counts the training rows."""
    per_step = common_yaml.add_batches(leaves, layer, world_size)
    parts = int(str(layer.get("gradient_accumulation_steps", (1, ""))[0]))
    share = RankSlice(per_step // world_size, parts, 0, world_size)
    drop_last = bool(layer["drop_last"][0])
    num_rows = len(read_training(data.train_file, data.form))

    def of_epoch() -> int:
        steps = steps_per_epoch(num_rows, share, drop_last)
        if steps == 0:
            reason = f"its {num_rows} rows are fewer than a step's {per_step}"
            raise UserError(
                "data.too-small", data.train_file, reason, "Lower global_train_batch_size"
            )
        return steps

    length = int(str(layer["max_seq_length"][0]))
    durations = common_yaml.add_schedule(leaves, layer, Durations(per_step, length, of_epoch))
    interval = leaves.text("eval_interval", "1ep")
    samples = durations.steps("eval_interval", interval.value) * per_step
    if str(interval.value).strip().endswith("ep"):  # an epoch may end with a smaller step
        samples = min(
            samples,
            round(float(str(interval.value).strip()[:-2]) * min(num_rows, of_epoch() * per_step)),
        )
    common_yaml.add_evaluation(leaves, layer, YamlValue(samples, interval.origin), world_size)
    common_yaml.add_outputs(leaves, layer, durations)


def add_start(leaves: Leaves, layer: Layer, tokenizer: YamlValue) -> None:
    """Add model, vocabulary and starting weights.

    The weights' shape and the vocabulary next to them override the YAML's names;
    model.model_config overrides both.
    """
    path = common_yaml.start_path(leaves)
    shape, vocabulary = common_yaml.find_start(path) if path is not None else (None, None)
    if vocabulary is not None:
        tokenizer = YamlValue(str(vocabulary), "load_path")
    layer.put("tokenizer", tokenizer)
    vocab_size = load_tokenizer(str(tokenizer.value)).vocab_size
    common_yaml.add_model(leaves, layer, vocab_size, shape)
    if shape is not None:
        explicit = common_yaml.model_config(leaves)
        options = dict(word.split("=") for word in str(layer["model_options"][0]).split())
        own = {name: value for name, value in asdict(shape).items() if name not in explicit}
        layer.put(
            "model_options",
            " ".join(f"{name}={value}" for name, value in (options | own).items()),
            "load_path",
        )


def _check_loaders(leaves: Leaves, data: TaskData) -> None:
    """Raise UserError for loader settings that are not supported."""
    for loader, splits in (
        ("train_loader", ("train",)),
        ("eval_loader", ("validation", "validation_matched")),
    ):
        leaves.choice(f"{loader}.split", splits, splits[0])
        for name in ("tokenizer_name", "max_seq_len"):
            other = leaves.get(f"{loader}.{name}")
            common = leaves.get(name)
            if other and common and other.value != common.value:
                reason = f"{loader}.{name} differs from {name}"
                raise UserError("config.conflict", other.origin, reason, "Give both the same value")
    leaves.refuse("eval_loader.drop_last", ": every row is evaluated")
    common_yaml.refuse_train_subset(leaves)
