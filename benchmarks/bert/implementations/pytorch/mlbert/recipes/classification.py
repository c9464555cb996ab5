"""Fine-tuning on a task: a class or a number for one text or a pair, from files with columns or one of GLUE's tasks.

    python benchmarks/mosaic_bert/sequence_classification.py YAML load_path=WEIGHTS data.train=train.csv
    python benchmarks/mosaic_bert/glue.py YAML starting_checkpoint_load_path=WEIGHTS

* weights    the encoder, and the pooler where there is one, of INIT_CHECKPOINT; the classifier is drawn
* loss       mean cross-entropy, or squared error, over all sequences of the step
* update     decoupled AdamW, decay on everything, nothing clipped
* rate       a ramp, in the YAML files over 6 % of the steps, then a line; the first two updates have the rate 0, as in
             Composer
* data       unpadded; every epoch in an order of its own, or with SHUFFLE=none as the rows lie, as in the published
             GLUE jobs; classes are those of the training file, which is read before the run starts
* metrics    of all predictions, by scikit-learn and SciPy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mlbert.core import glue, schedules
from mlbert.core.bert_config import BertConfig
from mlbert.core.continuing import fixed_settings
from mlbert.core.errors import UserError
from mlbert.core.settings import TrainConfig
from mlbert.dist.world import World
from mlbert.feed.tasks import TaskEvalSet, TaskSource, budget_of
from mlbert.models import task_model
from mlbert.models.bert import BertForSequenceClassification
from mlbert.models.choose import make_classifier
from mlbert.models.huggingface_model import HuggingFaceForSequenceClassification
from mlbert.models.load import load_weights
from mlbert.models.objectives import Classification, Regression
from mlbert.models.start import choose_compute
from mlbert.models.task_model import TaskCard
from mlbert.models.update import whole_update
from mlbert.optim.loss_scale import LossScale
from mlbert.store.order import StepShare
from mlbert.store.tasks import TaskForm, TaskRows, read_evaluation, read_training
from mlbert.store.tokenizer import Tokenizer, load_tokenizer
from mlbert.train.protocols import Method

MOST_PADDING = 64  # a checkpoint's vocabulary may be filled up to a multiple of it

Classifier = BertForSequenceClassification | HuggingFaceForSequenceClassification

DEFAULTS: Mapping[str, object] = {
    "recipe": "classification",
    "data_reader": "auto",
    "init_checkpoint": None,
    "model_implementation": "mlbert",
    "max_seq_length": 128,
    "shuffle": "naive",
    "drop_last": False,
    "decay_all": True,
    "gradient_accumulation_steps": 1,
    "average_packing_rate": 1.0,
    "max_sequences_per_pack": 1,
    "bin_counts": None,
    "exchange_padding": "off",
    "exchange_by": "lengths",
    "max_seconds": None,
    "warmup_steps": 0,
    "warmup_proportion": None,
    "start_warmup_step": 0,
    "schedule": "linear",
    "poly_power": 1.0,
    "end_lr": None,
    "lr_decay_end": None,
    "lr_decay_steps": None,
    "lr_milestones": None,
    "lr_gamma": None,
    "lr_first_step": -1,
    "optimizer": "decoupled_adamw",
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.98,
    "opt_epsilon": 1e-6,
    "weight_decay_rate": 1e-6,
    "max_grad_norm": None,
    "gradient_clipping": "after",
    "gradient_reduction": "fp32",
    "bucket_mib": 25,
    "optimizer_implementation": "ops",
    "sharded_optimizer": "off",
    "weights_allgather": "fp32",
    "seed": None,
    "target_mlm_accuracy": None,
    "num_eval_examples": None,
    "eval_batch_size": 128,
    "precision": "auto",
    "fp8_fast_accumulation": "forward",
    "loss_scale": 131072.0,
    "loss_scale_window": 2000,
    "join_timeout": None,
    "cpu_threads": None,
    "ops": "auto",
    "cuda_graph_mode": "none",
    "save_checkpoint_steps": 0,
    "keep_checkpoints": 2,
    "resume": False,
    "max_skipped_steps": 20,
    "synthetic_data": False,
    "log_freq": 10,
    "experiment": 0,
    "caches_cleared": False,
    "submission_org": "none",
    "submission_platform": "none",
    "submission_division": "open",
}


@dataclass(frozen=True)
class TaskInputs:
    """Inputs that fit each other: shape, vocabulary, rows by the evaluation's name, and what the model is for."""

    shape: BertConfig
    train_data: str
    eval_data: str
    max_sequence_length: int
    sequences_per_pack: float
    tokenizer: Tokenizer
    train: TaskRows
    evaluations: Mapping[str, TaskRows]
    card: TaskCard


def form_of_task(name: str) -> TaskForm:
    """How the files of one of GLUE's tasks look. Raises UserError: no such task."""
    if name not in glue.TASKS:
        raise UserError(f"TASK={name}", "no such task", f"Give one of {', '.join(glue.TASKS)}")
    task = glue.TASKS[name]
    header = None if task.has_header else task.columns
    return TaskForm(task.texts, task.label, task.num_labels, task.classes or None, header, lenient=True)


def _files(config: TrainConfig) -> tuple[TaskForm, Path, dict[str, Path]]:
    """How the task's files look, the training file, and the evaluations' files by name."""
    if config.task is not None:
        form, task = form_of_task(config.task), glue.TASKS[config.task]
        return form, task.train_file(config.input_dir), task.evaluation_files(config.eval_dir)
    columns = tuple(name.strip() for name in (config.text_columns or "").split(",") if name.strip())
    if not columns or config.label_column is None:
        raise UserError("TEXT_COLUMNS", "and LABEL_COLUMN are not set", "Name the columns of the task's files, or TASK")
    return TaskForm(columns, config.label_column, config.num_labels), config.input_dir, {"": config.eval_dir}


def inspect(config: TrainConfig) -> TaskInputs:
    """Reads the task's files, which say what the classes are, the vocabulary and the shape. Raises UserError: something
    is missing or damaged, or they do not fit each other."""
    form, train_file, eval_files = _files(config)
    train = read_training(train_file, form)
    evaluations = {name: read_evaluation(path, form, train.classes) for name, path in eval_files.items()}
    if config.num_eval_examples is not None:
        evaluations = {name: rows.first(config.num_eval_examples) for name, rows in evaluations.items()}
    if config.tokenizer is None or config.max_seq_length is None:
        raise UserError("TOKENIZER", "and MAX_SEQ_LENGTH have to be set", "A task's texts need them")
    card = TaskCard(
        form.text_columns, form.label_column, train.classes, config.max_seq_length, form.header, form.lenient
    )
    shape = BertConfig.from_json(config.bert_config_file).with_options(config.model_options)
    tokenizer = load_tokenizer(config.tokenizer)
    if not 0 <= shape.vocab_size - len(tokenizer.vocabulary) < MOST_PADDING:
        reason = f"has {len(tokenizer.vocabulary)} entries, the model {shape.vocab_size}"
        raise UserError(f"TOKENIZER={config.tokenizer}", reason, "Use the vocabulary of INIT_CHECKPOINT")
    if shape.position_embedding_type == "absolute" and config.max_seq_length > shape.max_position_embeddings:
        reason = f"is more than the {shape.max_position_embeddings} positions of {config.bert_config_file}"
        raise UserError(f"MAX_SEQ_LENGTH={config.max_seq_length}", reason, "Set fewer")
    identities = ",".join(rows.identity for rows in evaluations.values())
    data = (train.identity, identities, config.max_seq_length, 1.0)
    return TaskInputs(shape, *data, tokenizer, train, evaluations, card)


def build(config: TrainConfig, inputs: TaskInputs, world: World, seed: int, warn: Callable[[str], None]) -> Method:
    """The method's objects; texts become tokens in ``open``."""
    for line in (line for rows in (inputs.train, *inputs.evaluations.values()) for line in rows.warnings):
        warn(line)
    model, objective, evaluation = build_evaluation(config, world, seed, warn, inputs)
    compute = choose_compute(config, world.device, warn)
    loss_scale = LossScale.of(config, world.device)
    flat, optimizer, sync = whole_update(config, model, world, loss_scale)
    share = StepShare(config.train_batch_size, config.gradient_accumulation_steps, world.rank, world.world_size)
    source = TaskSource(
        inputs.train,
        inputs.tokenizer,
        max_seq_length=inputs.card.max_seq_length,
        share=share,
        drop_last=bool(config.drop_last),
        seed=None if config.shuffle is None else seed,
    )

    def export(folder: Path, facts: Mapping[str, object]) -> None:
        task_model.write_task_model(model, folder, facts, inputs.card, inputs.tokenizer)
        parts, found = list(inputs.evaluations.values()), objective.latest
        task_model.write_predictions(folder / task_model.PREDICTIONS, parts, found[:, :2], inputs.card)
        task_model.draw_confusion(folder / task_model.CONFUSION, found[:, 0], found[:, -1], inputs.card)

    return Method(
        model=model,
        objective=objective,
        source=source,
        evaluation=evaluation,
        flat=flat,
        sync=sync,
        optimizer=optimizer,
        schedule=schedules.make(config),
        budget=budget_of(share, inputs.card.max_seq_length),
        precision=compute.precision,
        ops=compute.ops,
        identity={
            "model": inputs.shape.to_json(),
            "optimizer": config.optimizer,
            "train_batch_size": config.train_batch_size,
            "train_data": inputs.train_data,
            "eval_data": inputs.eval_data,
            **fixed_settings(config),
        },
        export=export,
        loss_scale=loss_scale,
    )


def build_evaluation(
    config: TrainConfig, world: World, seed: int, warn: Callable[[str], None], inputs: TaskInputs | None = None
) -> tuple[Classifier, Classification | Regression, TaskEvalSet]:
    """Model with starting weights, objective and evaluation rows. Raises UserError: the checkpoint is missing, damaged
    or of another shape, or METRIC is none of the task's."""
    inputs = inputs or inspect(config)
    parts = {name: len(rows) for name, rows in inputs.evaluations.items()}
    num_labels = inputs.card.num_labels
    objective: Classification | Regression
    if inputs.card.classes:
        objective = Classification(num_labels, "step", config.metric or "accuracy", parts)
    else:
        objective = Regression("step", config.metric or "spearman", parts)
    evaluation = TaskEvalSet(
        list(inputs.evaluations.values()),
        inputs.tokenizer,
        max_seq_length=inputs.card.max_seq_length,
        batch_size=config.eval_batch_size,
        rank=world.rank,
        world_size=world.world_size,
    )
    compute = choose_compute(config, world.device, warn)
    model = make_classifier(config, inputs.shape, num_labels, compute)
    _start(model, config, seed, world, warn)
    return model, objective, evaluation


def _start(model: Classifier, config: TrainConfig, seed: int, world: World, warn: Callable[[str], None]) -> None:
    model.initialize(seed)
    model.to(world.device)
    if config.init_checkpoint is None:
        warn("warning: INIT_CHECKPOINT is none: every weight is drawn")
        return
    drawn = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("classifier.")}
    missing = load_weights(model, config.init_checkpoint).missing
    with torch.no_grad():
        for name, value in drawn.items():  # another task's may be of the same size
            model.get_parameter(name).copy_(value)
    if any(name.startswith("bert.pooler.") for name in missing):
        warn(f"{config.init_checkpoint} has no pooler: it is drawn")
