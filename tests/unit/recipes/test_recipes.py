"""What the recipes make of the settings: optimizers, clipping, decay, evaluation,
resumption, traces, refusals.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from mlaudit.logs import read_log
from mlaudit.trace import Tracer
from mlbert.config.bert_config import BertConfig
from mlbert.config.recipe import Recipe
from mlbert.distributed.world import World
from mlbert.models.bert import BertForSequenceClassification
from mlbert.ops.config import ComputeConfig
from mlbert.optim.config import OptimizerConfig
from mlbert.optim.optimizers import implementation
from mlbert.recipes import classification, masked_lm_stored, masked_lm_text, packed_lamb
from mlbert.recipes.assembly import Update, build_replicated_update
from programs import RunMlbert
from training_settings import configuration, read_metrics, read_summary, train, train_arguments
from user_errors import user_error

SHAPE = BertConfig(40, 16, 1, 2, 32, max_position_embeddings=16)
# Settings without a default, by the recipe's name.
NEEDED: dict[str, dict[str, object]] = {
    "masked_lm_stored": {},
    "masked_lm_text": {"tokenizer": "vocab.txt", "max_seq_length": 16, "masking_rate": 0.15},
    "classification": {"tokenizer": "vocab.txt"},
}
UNPACKED = {"average_packing_rate": 1}
DDP_ADAM = {"recipe": "ddp_adam", **UNPACKED, "learning_rate": 0.002, "max_steps": 6}
MASKED_LM = {"recipe": "masked_lm", **UNPACKED, "gradient_accumulation_steps": 1}
MASKED_LM |= {"lr_milestones": "4,5", "lr_gamma": 0.5, "warmup_steps": 2, "max_steps": 8}
MASKED_LM |= {"model_options": "hidden_dropout_prob=0 attention_probs_dropout_prob=0"}
USABLE = {"packed_lamb": {}, "ddp_adam": DDP_ADAM, "masked_lm": MASKED_LM}
each_model = pytest.mark.parametrize("name", ["mlbert", "huggingface"])


def train_masked_lm(folder: Path, name: str, **changes: object) -> list[dict]:
    return train(folder, name, **MASKED_LM | changes)


@pytest.mark.parametrize(
    ("ops", "asked", "expected"),
    [
        ("auto", "ops", "auto"),
        ("plain", "ops", "plain"),
        ("native", "ops", "native"),
        ("fmha", "ops", "triton"),
        ("fastest", "ops", "auto"),
        ("fmha", "plain", "plain"),
        ("auto", "apex", "apex"),
    ],
)
def test_the_form_of_the_optimizer(ops: str, asked: str, expected: str) -> None:
    config = configuration(packed_lamb.RECIPE, ops=ops, optimizer_implementation=asked)
    assert implementation(config[OptimizerConfig], config[ComputeConfig].ops) == expected


def test_evaluating_does_not_change_training(tmp_path: Path) -> None:
    """Evaluation takes the exact weights, the next step the rounded ones again,
    their FP8 copies included.
    """
    changes = {
        "sharded_optimizer": "all",
        "weights_allgather": "e5m2",
        "precision": "fp8",
        "max_steps": 6,
    }
    losses = {}
    for name, distance in (("never", 1_000_000), ("often", 8)):
        metrics = train(
            tmp_path, name, eval_iter_start_samples=distance, eval_iter_samples=distance, **changes
        )
        losses[name] = [m["loss"] for m in metrics]
    assert len(read_metrics(tmp_path / "often", "evaluation")) > 1
    assert losses["often"] == losses["never"]


def test_one_bucket_of_one_rank_is_clipping_as_a_whole(tmp_path: Path) -> None:
    """The tiny model is one bucket, a rank alone is its own mean: then the three ways are one."""
    settings = DDP_ADAM | {"gradient_accumulation_steps": 1, "max_grad_norm": 0.5}
    ways = {
        way: train(tmp_path, way, gradient_clipping=way, **settings)
        for way in ("after", "before", "buckets")
    }
    for way in ("before", "buckets"):
        assert [m["loss"] for m in ways[way]] == pytest.approx(
            [m["loss"] for m in ways["after"]], abs=1e-5
        )
    norms = {way: [m["grad_norm"] for m in metrics] for way, metrics in ways.items()}
    assert norms["buckets"] == pytest.approx(norms["after"], rel=1e-4)
    assert min(norms["after"]) > 0.5 >= max(norms["before"]) - 1e-6


@pytest.mark.slow
def test_a_resumed_float16_run_keeps_its_loss_scale(tmp_path: Path) -> None:
    half = DDP_ADAM | {
        "precision": "fp16",
        "loss_scale": 2**24,
        "save_checkpoint_steps": 3,
        "schedule": "constant",
    }
    whole = train(tmp_path, "whole", **half | {"max_steps": 12})
    train(tmp_path, "parts", **half)
    (tmp_path / "parts/run_0/summary.json").unlink()
    resumed = train(tmp_path, "parts", **half | {"max_steps": 12, "resume": 1})
    assert [m["loss"] for m in resumed[-6:]] == [m["loss"] for m in whole[-6:]]


@pytest.mark.slow
def test_a_run_has_one_head_the_lagging_rate_and_a_log_that_is_traced(
    tmp_path: Path, tree_root: Path
) -> None:
    metrics = train_masked_lm(tmp_path, "own", learning_rate=0.01)
    rates = [0.01 * x for x in (0, 0, 0.5, 1, 1, 0.5, 0.25, 0.25)]
    assert [m["learning_rate"] for m in metrics] == pytest.approx(rates)
    state = load_file(tmp_path / "own/run_0/weights/model.safetensors")
    assert not [name for name in state if "pooler" in name or "seq_relationship" in name]
    log = read_log(tmp_path / "own/result_0.txt")
    found = {event.key: event.value for event in log.events}
    assert found["opt_name"] == "decoupled_adamw"
    assert found["configuration"]["DECAY_ALL"]["value"] is True
    assert "hidden_dropout_prob=0" in found["configuration"]["MODEL_OPTIONS"]["value"]
    tracer = Tracer(log, tree_root)
    broken = {key: [str(link) for link in tracer.chain(key).broken] for key in tracer.keys}
    allowed = {"model_shape", "model_shape_sha256"}  # the test's file is outside the tree
    assert {key: links for key, links in broken.items() if links and key not in allowed} == {}


def test_hugging_faces_model_learns_the_same(tmp_path: Path) -> None:
    """The same weights, data and updates: the padded model of the baseline is the unpadded one of
    the methods. Its vocabulary is not padded, so both start from weights that a run has left.
    """
    train_masked_lm(tmp_path, "first", max_steps=1, warmup_steps=0)
    start = tmp_path / "first/run_0/weights"
    ours, theirs = (
        [
            line["loss"]
            for line in train_masked_lm(
                tmp_path, name, model_implementation=name, init_checkpoint=start
            )
        ]
        for name in ("mlbert", "huggingface")
    )
    assert theirs == pytest.approx(ours, rel=2e-4)


@each_model
def test_float16_with_a_loss_scale_learns_the_same(tmp_path: Path, name: str) -> None:
    changes = {"model_implementation": name, "loss_scale": 1024, "learning_rate": 0.002}
    losses = {
        p: [m["loss"] for m in train_masked_lm(tmp_path, p, precision=p, **changes)]
        for p in ("fp16", "fp32")
    }
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=5e-3)
    assert losses["fp16"] != losses["fp32"]


@each_model
def test_evaluating_a_runs_weights_gives_its_last_accuracy(
    tmp_path: Path, name: str, run_mlbert: RunMlbert
) -> None:
    train_masked_lm(tmp_path, "run", model_implementation=name)
    weights = {"init_checkpoint": tmp_path / "run/run_0/weights", "model_implementation": name}
    status, out, _ = run_mlbert(
        *train_arguments(tmp_path, "other", **MASKED_LM | weights), "--evaluate-only"
    )
    assert (
        status,
        f"initial mlm_accuracy {read_summary(tmp_path / 'run')['accuracy']:.5f}" in out,
    ) == (0, True)


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("packed_lamb", {"weights_allgather": "bf16"}, "WEIGHTS_ALLGATHER=bf16"),
        (
            "packed_lamb",
            {"optimizer_implementation": "apex", "sharded_optimizer": "all"},
            "apex optimizer: its state cannot be sharded",
        ),
        (
            "packed_lamb",
            {"gradient_clipping": "buckets", **UNPACKED},
            "works only with RECIPE=ddp_adam",
        ),
        (
            "ddp_adam",
            {"sharded_optimizer": "all"},
            "SHARDED_OPTIMIZER=all: with RECIPE=ddp_adam, every rank updates all parameters",
        ),
        (
            "ddp_adam",
            {"weights_allgather": "bf16"},
            "WEIGHTS_ALLGATHER=bf16: with RECIPE=ddp_adam, every rank updates all parameters",
        ),
        ("ddp_adam", {"bucket_mib": "1000000"}, "must be at most 4096"),
        (
            "masked_lm",
            {"lr_milestones": "none"},
            "LR_MILESTONES: is not set, and SCHEDULE=multistep needs it",
        ),
        ("masked_lm", {"model_options": "dropout=0"}, "MODEL_OPTIONS: 'dropout' is unknown"),
        (
            "masked_lm",
            {"max_seq_length": 65},
            "MAX_SEQ_LENGTH=65: is more than the model's 64 positions",
        ),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(
    tmp_path, run_mlbert, recipe, changes, words
) -> None:
    status, _, err = run_mlbert(*train_arguments(tmp_path, **USABLE[recipe] | changes))
    assert (status, err.count("\n"), words in err) == (2, 1, True), err


each_recipe = pytest.mark.parametrize(
    "recipe",
    [classification.RECIPE, masked_lm_stored.RECIPE, masked_lm_text.RECIPE],
    ids=lambda recipe: recipe.name,
)


def update(recipe: Recipe, **changes: object) -> Update:
    config = configuration(recipe, schedule="constant", **NEEDED[recipe.name], **changes)
    return build_replicated_update(
        config, BertForSequenceClassification(SHAPE, 2), World(), recipe.name
    )


@each_recipe
@pytest.mark.parametrize("decay_all", [None, False])
def test_every_tensor_decays_unless_the_settings_say_otherwise(
    recipe: Recipe, decay_all: bool | None
) -> None:
    flat = update(recipe, **({} if decay_all is None else {"decay_all": decay_all})).flat
    spared = [segment.name for segment in flat.segments if not segment.decay]
    assert bool(spared) == (decay_all is False)
    assert all(name.endswith("bias") or "LayerNorm" in name for name in spared)


@each_recipe
@pytest.mark.parametrize(
    "changes",
    [{"sharded_optimizer": "all"}, {"weights_allgather": "bf16"}, {"gradient_clipping": "buckets"}],
    ids=str,
)
def test_other_ways_are_refused(recipe: Recipe, changes: dict[str, str]) -> None:
    ((name, value),) = changes.items()
    with user_error("config.conflict", f"{name.upper()}={value}"):
        update(recipe, **changes)
