"""glue.py as a whole, with jobs of two steps: scores, a failed job, what is done already,
what is refused.
"""

import itertools
import json
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.prepare import glue_stand_ins
from mlbert.data.prepare.python_text import documents_by_file
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from mlbert.programs.glue_runner import GlueJob
from mosaic_yaml import glue_yaml
from mosaic_yaml.nested_yaml import Leaves, read_nested
from programs import RunMlbert, write_files
from training_settings import read_metrics
from user_errors import assert_error_line

SHAPE = BertConfig(400, 16, 1, 2, 32, max_position_embeddings=64)
STEPS = "{max_duration: 2ba, eval_interval: 2ba, eval_subset_num_batches: 1}"
YAML = """
base_run_name: tiny
default_seed: 7
precision: fp32
tokenizer_name: FOLDER/vocab.txt
max_seq_len: 32
device_eval_batch_size: 16
model: {name: mosaic_bert, pretrained_model_name: FOLDER/shape.json}
data: {glue: FOLDER/glue, source: python}
save_finetune_checkpoint_prefix: FOLDER/out
tasks:
  mnli: {batch_size: 8, trainer_kwargs: STEPS}
  rte: {seeds: [1], trainer_kwargs: STEPS}
""".replace("STEPS", STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("glue")
    # All take seconds.
    glue_stand_ins.make(made / "glue", 0.1, itertools.islice(documents_by_file(), 120))
    text = (made / "glue/MNLI/train.tsv").read_text().split("\n")
    vocabulary = "\n".join(train_vocabulary(count_words(text), 400)) + "\n"
    configured = {"shape.json": SHAPE.to_json(), "glue.yaml": YAML.replace("FOLDER", str(made))}
    return write_files(made, {"vocab.txt": vocabulary} | configured)


def test_jobs_scores_failure_and_resumption(folder: Path, run_mlbert: RunMlbert) -> None:
    dev = folder / "glue/RTE/dev.tsv"
    out = folder / "out/tiny"
    command = ["glue", folder / "glue.yaml"]
    good = dev.read_text()
    dev.write_text(good.replace("\tentailment\n", "\tyes\n", 1))
    status, output, error = run_mlbert(*command)
    assert (status, "rte seed 1 failed" in output) == (1, True)
    assert "glue.py: rte seed 1: mlbert: error:" in error
    assert "[data.labels]" in error
    found = json.loads((out / "glue_scores.json").read_text())
    assert found["glue"] is None
    assert found["missing"] == [{"task": "rte", "seed": 1}]

    dev.write_text(good)
    mnli = out / "task=mnli/seed=7/run_0"
    before = (mnli / "summary.json").stat().st_mtime_ns
    status, output, _ = run_mlbert(*command)
    assert (status, "1 of 2 jobs are already done" in output) == (0, True)
    assert (mnli / "summary.json").stat().st_mtime_ns == before
    found = json.loads((out / "glue_scores.json").read_text())
    values = {}
    for task, seed in (("mnli", 7), ("rte", 1)):
        last = read_metrics(out / f"task={task}/seed={seed}", "evaluation")[-1]
        values[task] = 100 * fmean(last[f"eval_{name}"] for name in TASKS[task].metrics)
    assert found["tasks"] == pytest.approx(values)
    assert found["glue"] == pytest.approx(sum(values.values()) / 2)
    assert (out / "glue_scores.png").stat().st_size > 1000
    # The first job's weights stay, as others begin with them; nothing asks for the rest.
    assert [path.parts[-3] for path in sorted(out.glob("*/*/run_0/weights"))] == ["seed=7"]
    start = json.loads((out / "task=rte/seed=1/run_0/config.json").read_text())["config"][
        "init_checkpoint"
    ]
    assert start == str(mnli / "weights")

    status, _, error = run_mlbert(*command, "tasks.rte.optimizer.lr=1.0e-4")
    assert status == 2
    assert_error_line(error, "run.exists", "tiny/task=rte/seed=1")


@pytest.mark.parametrize(
    ("word", "code", "subject"),
    [
        ("tasks.mnlii.seeds=[1]", "config.unknown-name", "tasks.mnlii.seeds=[1]"),
        ("tasks.rte.seeds=3", "config.value", "argument tasks.rte.seeds="),
        (
            "tasks.rte.trainer_kwargs.max_duration=soon",
            "config.value",
            "tasks.rte.trainer_kwargs.max_duration=soon",
        ),
        ("starting_checkpoint_load_path=nowhere", "file.missing", "nowhere"),
        ("model.name=bert", "config.choice", "glue.yaml"),
        ("max_seq_len=many", "config.value", "glue.yaml"),
    ],
)
def test_mistakes_are_reported_before_a_job_begins(
    word: str, code: str, subject: str, folder, assert_fails
) -> None:
    assert_fails(["glue", folder / "glue.yaml", word, "base_run_name=refused"], code, subject)
    assert not (folder / "out/refused").exists()


@pytest.mark.parametrize("name", ["hf-bert", "mosaic-bert"])
def test_the_published_yaml_is_25_jobs_of_published_numbers(name: str, tree_root: Path) -> None:
    path = tree_root / f"benchmarks/mosaic_bert/yamls/finetuning/glue/{name}-base-uncased.yaml"
    given = glue_yaml.GlueYaml(Leaves(path, read_nested(path, [], glue_yaml.KNOWN)))
    assert len(given.jobs) == 25
    assert (
        given.folder == Path("local-finetune-checkpoints") / f"{name}-base-uncased-glue-finetuning"
    )
    assert [job for job in given.jobs if given.keeps_weights(job)] == [given.jobs[0]]
    content = yaml.safe_load(
        glue_yaml.as_text(given.of_job(GlueJob("stsb", 717, waits=True), "start"))
    )
    assert content["run_name"] == f"{name}-base-uncased-glue-finetuning_task=stsb_seed=717"
    numbers = {"lr": 3e-5, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 3e-6}
    assert content["optimizer"] == {"name": "decoupled_adamw", **numbers}
    assert content["scheduler"] == {
        "name": "linear_decay_with_warmup",
        "t_warmup": "0.06dur",
        "alpha_f": 0.0,
    }
    expected = {"global_train_batch_size": 32, "max_duration": "10ep", "eval_interval": "200ba"}
    expected |= {"max_seq_len": 256, "seed": 717, "load_path": "start"}
    assert {name: content[name] for name in expected} == expected
    assert content["train_loader"] == {"shuffle": True, "drop_last": False}
    published = glue_yaml.GlueYaml(
        Leaves(path, read_nested(path, ["published_order=true"], glue_yaml.KNOWN))
    )
    assert published.of_job(given.jobs[0], None)["train_loader.shuffle"] is False
