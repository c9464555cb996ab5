"""mlbert glue --from MODEL: the settings of each form of model, what is refused, and whole runs on
small files in GLUE's form.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
import yaml

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.glue_tasks import TASKS
from mlbert.data.prepare import glue_stand_ins
from mlbert.data.prepare.python_text import documents_by_file
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.programs import glue_published
from mlbert.programs.glue_published import published_scores, searched_trials
from mlbert.programs.glue_trials import Trial
from mlbert.programs.task_metrics import last_evaluation
from modernbert_peers import save_peer
from mosaic_yaml import glue_yaml
from mosaic_yaml.glue_of_model import Asked, chosen_tasks, glue_yaml_text
from mosaic_yaml.nested_yaml import Leaves, read_nested
from programs import RunMlbert

Fails = Callable[..., str]
ENTRIES = 400
SIZES = {
    "vocab_size": ENTRIES,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
BERT = BertConfig(ENTRIES, 32, 1, 2, 64, max_position_embeddings=64)
MOSAIC = replace(BERT, position_embedding_type="alibi", gated_mlp=True)
OWN = replace(BERT, position_embedding_type="rotary", norm_position="pre", gated_mlp=True)
LARGE = replace(OWN, hidden_size=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLUE's files, a vocabulary, and a model of each form."""
    made = tmp_path_factory.mktemp("glue")
    glue_stand_ins.make(made / "data", 0.1, itertools.islice(documents_by_file(), 120))
    text = (made / "data/MNLI/train.tsv").read_text().split("\n")
    entries = train_vocabulary(count_words(text), ENTRIES)
    entries += [f"[unused{n}]" for n in range(ENTRIES - len(entries))]
    vocabulary = made / "vocab.txt"
    vocabulary.write_text("\n".join(entries) + "\n")
    for name, shape in (("bert", BERT), ("mosaic", MOSAIC), ("own", OWN)):
        model = BertForMaskedLM(shape)
        model.initialize(1)
        write_weights(model, made / name, {}, vocabulary)
    save_peer(made / "modernbert", **SIZES, classifier_pooling="cls")
    numbers = {name: entries.index(name) for name in ("[PAD]", "[CLS]", "[SEP]")}
    config = transformers.RobertaConfig(
        **SIZES,
        max_position_embeddings=66,
        pad_token_id=numbers["[PAD]"],
        bos_token_id=numbers["[CLS]"],
        eos_token_id=numbers["[SEP]"],
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(made / "roberta")
    for name in ("modernbert", "roberta"):
        (made / name / "vocab.txt").write_text(vocabulary.read_text())
    return made


def given_of(tmp_path: Path, shape: BertConfig, **asked: object) -> glue_yaml.GlueYaml:
    values = {"start": Path("model"), "data": Path("data"), "out": tmp_path, "tasks": list(TASKS)}
    values |= {"num_seeds": None, "is_search": False}
    text = glue_yaml_text(Asked(**(values | asked)), shape)
    path = tmp_path / "glue.yaml"
    path.write_text(text)
    return glue_yaml.GlueYaml(Leaves(path, read_nested(path, [], glue_yaml.KNOWN)))


def test_modernbert_has_its_papers_settings(tmp_path: Path) -> None:
    given = given_of(tmp_path, OWN)
    assert len(given.jobs) == 25
    jobs = {job.task: given.of_job(job, "start") for job in given.jobs}
    names = ("optimizer.lr", "optimizer.weight_decay", "max_duration")
    assert [jobs["cola"][name] for name in names] == [8e-5, 1e-6, "5ep"]
    assert [jobs["mnli"][name] for name in names] == [5e-5, 5e-6, "1ep"]
    assert jobs["mnli"]["global_train_batch_size"] == 64
    assert jobs["cola"]["global_train_batch_size"] == TASKS["cola"].batch
    assert jobs["rte"]["callbacks.early_stopper.patience"] == 3
    assert jobs["rte"]["model.model_config"]["classifier_pooling"] == "mean"
    assert jobs["rte"]["max_seq_len"] == 64
    large = given_of(tmp_path, LARGE)
    assert large.of_job(large.jobs[0], None)["optimizer.lr"] == 3e-5


@pytest.mark.parametrize("shape", [BERT, MOSAIC])
def test_the_others_have_mosaicmls(tmp_path: Path, shape: BertConfig) -> None:
    given = given_of(tmp_path, shape)
    assert len(given.jobs) == 25
    for job in given.jobs:
        values = given.of_job(job, "start")
        task = TASKS[job.task]
        assert values["optimizer.lr"] == task.learning_rate
        assert values["max_duration"] == f"{task.epochs}ep"
        assert "callbacks.early_stopper.patience" not in values
        assert values["model.model_config"]["gated_mlp"] == shape.gated_mlp


def test_a_search_is_the_papers_grid_with_mnli_first(tmp_path: Path) -> None:
    given = given_of(tmp_path, BERT, tasks=["rte", "mnli", "cola"], is_search=True)
    assert len(given.jobs) == 3 * 48
    assert {job.task for job in given.jobs[:48]} == {"mnli"}
    assert all(job.waits for job in given.jobs if job.task == "rte")
    assert {trial.epochs for trial in searched_trials("mnli")} == {1, 2, 3}
    assert {trial.epochs for trial in searched_trials("cola")} == {2, 5, 10}
    values = given.of_job(given.jobs[5], None)
    trial = given.jobs[5].trial
    assert trial is not None
    assert values["optimizer.lr"] == trial.learning_rate
    assert values["max_duration"] == f"{trial.epochs}ep"
    assert values["callbacks.early_stopper.patience"] == 3
    assert len({job.folder(Path()) for job in given.jobs}) == len(given.jobs)


def test_published_scores_are_of_the_form_and_size() -> None:
    roberta = replace(BERT, position_offset=2)
    models = {
        (shape.position_embedding_type, shape.hidden_size): [
            one.model for one in published_scores(shape)
        ]
        for shape in (BERT, MOSAIC, OWN, LARGE)
    }
    assert models == {
        ("absolute", 32): ["BERT-base"],
        ("alibi", 32): ["BERT-base", "MosaicBERT-base"],
        ("rotary", 32): ["BERT-base", "ModernBERT-base"],
        ("rotary", 1024): ["BERT-large", "ModernBERT-large"],
    }
    bert, roberta_base = published_scores(roberta)
    # As in table 1 of the paper, which cuts off the second decimal.
    assert bert.mean == pytest.approx(84.7, abs=0.1)
    assert roberta_base.mean == pytest.approx(86.4, abs=0.1)
    assert published_scores(OWN)[1].mean == pytest.approx(88.4, abs=0.1)
    assert published_scores(LARGE)[1].mean == pytest.approx(90.4, abs=0.1)


def test_one_line_prints_scores_next_to_published_ones(
    folder: Path, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    command = ["glue", "--from", folder / "modernbert", "--data", folder / "data"]
    command += ["--tasks", "rte", "--seeds", "1", "--out", tmp_path / "out"]
    status, output, error = run_mlbert(*command)
    assert (status, error) == (0, "")
    assert "settings: arXiv:2412.13663v2, table 6" in output
    assert "ModernBERT-base" in output
    assert "87.4" in output
    job = tmp_path / "out/task=rte/seed=19"
    content = yaml.safe_load((job / "job.yaml").read_text())
    assert content["model"]["model_config"]["classifier_pooling"] == "cls"
    config = json.loads((job / "run_0/config.json").read_text())["config"]
    assert config["init_checkpoint"] == str(folder / "modernbert")
    scores = json.loads((tmp_path / "out/glue_scores.json").read_text())
    accuracy = last_evaluation(job / "run_0")["accuracy"]
    assert scores["tasks"] == {"rte": pytest.approx(100 * accuracy)}
    assert scores["published"]["source"] == "arXiv:2412.13663v2, table 5"
    assert scores["published"]["models"]["ModernBERT-base"]["rte"] == 87.4
    assert not (job / "run_0/weights").exists()
    assert not (job / "run_0/best").exists()

    status, output, _ = run_mlbert(*command)
    assert (status, "1 of 1 jobs are already done" in output) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "mosaic", "own"])
def test_every_form_runs(folder: Path, tmp_path: Path, run_mlbert: RunMlbert, name: str) -> None:
    command = ["glue", "--from", folder / name, "--data", folder / "data"]
    command += ["--tasks", "rte", "--seeds", "1", "--out", tmp_path / "out"]
    status, output, error = run_mlbert(*command)
    assert status == 0, error
    assert "BERT-base" in output
    run = tmp_path / "out/task=rte/seed=19/run_0"
    assert 0 <= last_evaluation(run)["accuracy"] <= 1


@pytest.mark.slow
def test_a_stopped_search_resumes_and_states_the_best_settings(
    folder: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four of the grid's trials; the last one is damaged, as a killed process leaves it."""
    monkeypatch.setattr(glue_published, "_SEARCHED_RATES", (1e-5, 8e-5))
    monkeypatch.setattr(glue_published, "_SEARCHED_DECAYS", (1e-6,))
    monkeypatch.setattr(glue_published, "_FEWER_EPOCHS", (1, 2))
    trials = searched_trials("rte")
    assert len(trials) == 4
    out = tmp_path / "out"
    command = ["glue", "--from", folder / "own", "--data", folder / "data", "--out", out]
    command += ["--tasks", "rte", "--search"]
    status, output, error = run_mlbert(*command)
    assert status == 0, error
    assert "settings: a search over the grid of arXiv:2412.13663v2, appendix E.1" in output
    scores = json.loads((out / "glue_scores.json").read_text())
    jobs = {(job["learning_rate"], job["epochs"]): job["score"] for job in scores["jobs"]}
    assert jobs.keys() == {(trial.learning_rate, trial.epochs) for trial in trials}
    best = scores["best"]["rte"]
    highest = jobs[best["learning_rate"], best["epochs"]]
    assert highest == max(jobs.values()) == scores["tasks"]["rte"]
    assert f"best of rte: {Trial(**best).name}" in output

    damaged = out / "task=rte" / trials[-1].name / "seed=19"
    kept = out / "task=rte" / trials[0].name / "seed=19/run_0/summary.json"
    before = kept.stat().st_mtime_ns
    (damaged / "run_0/summary.json").unlink()
    status, output, error = run_mlbert(*command)
    assert status == 0, error
    assert "3 of 4 jobs are already done" in output
    assert kept.stat().st_mtime_ns == before
    assert json.loads((out / "glue_scores.json").read_text())["best"]["rte"] == best


def test_tasks_are_named_with_commas() -> None:
    assert chosen_tasks("rte, cola") == ["rte", "cola"]
    assert chosen_tasks(None) == list(TASKS)


@pytest.mark.parametrize(
    ("words", "code", "subject"),
    [
        (["--from", "nowhere"], "file.missing", "nowhere"),
        (["--from", "MODEL", "--tasks", "rte,mnlii"], "config.choice", "--tasks"),
        (["--from", "MODEL", "--tasks", ","], "config.choice", "--tasks"),
        (["--from", "MODEL", "a.yaml"], "config.conflict", "--from"),
        (["--search"], "config.conflict", "--search"),
        ([], "config.missing", "glue.py"),
    ],
)
def test_mistakes_are_one_line(words, code, subject, folder: Path, fails_below: Fails) -> None:
    fails_below(
        ["glue", *(folder / "bert" if word == "MODEL" else word for word in words)], code, subject
    )


def test_a_missing_data_set_is_one_line(
    folder: Path, fails_below: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["glue", "--from", folder / "own", "--data", "empty", "--tasks", "cola"]
    line = fails_below(words, "network.unreachable", "empty/CoLA/train.tsv")
    assert "gluebenchmark.com/tasks" in line


@pytest.fixture
def fails_below(assert_fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Return `assert_fails` in a folder that must stay empty."""
    monkeypatch.chdir(tmp_path)

    def fails(*words: object) -> str:
        line = assert_fails(*words)
        assert not list(tmp_path.iterdir())
        return line

    return fails
