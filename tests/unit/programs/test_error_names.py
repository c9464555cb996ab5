"""Errors name settings as the user of each front end types them:
YAML names of MosaicML's programs, or options.
"""

import re
from pathlib import Path

import pytest

from labeled_texts import sentences, write_csv
from mlbert.config.bert_config import BertConfig
from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
from mlbert.host.errors import UserError, public_names, replace_names
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.export import write_weights
from mlbert.programs import custom_task
from mlbert.programs.custom_corpus import run as custom_corpus
from mlbert.recipes.sections import settings_by_env
from mosaic_texts import make_texts
from mosaic_yaml import finetuning_yaml, glue_yaml, pretraining_yaml
from mosaic_yaml.common_yaml import names_for_errors
from mosaic_yaml.glue_yaml import GlueYaml
from mosaic_yaml.nested_yaml import Leaves, read_nested
from programs import RunMlbert

NOT_IN_THE_YAML = {"recipe", "target_mlm_accuracy", "lr_first_step", "experiment"}
YAMLS = Path("benchmarks/mosaic_bert/yamls")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `mlbert pretrain` leaves it, and rows to fine-tune it on."""
    made = tmp_path_factory.mktemp("names")
    rows = sentences(40)
    write_csv(made / "rows.csv", ["text", "label"], *map(list, rows))
    entries = train_vocabulary(count_words([text for text, _ in rows]), 200)
    (made / "vocab.txt").write_text("\n".join(entries) + "\n")
    shape = BertConfig(
        vocab_size=len(entries),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        position_embedding_type="rotary",
        norm_position="pre",
        gated_mlp=True,
    )
    model = BertForMaskedLM(shape)
    model.initialize(1)
    write_weights(model, made, {}, made / "vocab.txt")
    return made


def test_names_are_replaced_in_sentences_only() -> None:
    names = {"LOGDIR": "--out", "LOGDIR or EXPERIMENT": "--out", "RESUME=1": "autoresume=true"}
    names |= {"RESUME": "autoresume", "MODEL_OPTIONS=": "model.model_config."}
    for text, expected in (
        ("Set another LOGDIR or EXPERIMENT, or remove it", "Set another --out, or remove it"),
        ("Set LOGDIR.", "Set --out."),
        ("Set RESUME=1, or RESUME=10", "Set autoresume=true, or autoresume=10"),
        ("Set MODEL_OPTIONS=vocab_size=8", "Set model.model_config.vocab_size=8"),
        ("/data/LOGDIR/x, LOGDIR.txt, 'LOGDIR', MY_LOGDIR", None),
    ):
        assert replace_names(text, names) == (expected or text)


def test_front_ends_can_be_nested_and_end() -> None:
    with public_names({"load_path": "start"}), public_names({"INIT_CHECKPOINT": "load_path"}):
        inside = UserError("config.missing", "INIT_CHECKPOINT", "is none", "Set INIT_CHECKPOINT")
    assert inside.as_line() == "start: is none. Set start. [config.missing]"
    assert UserError("config.missing", "INIT_CHECKPOINT", "is none").subject == "INIT_CHECKPOINT"


def test_every_setting_that_a_yaml_decides_has_a_name_that_it_accepts(
    tree_root: Path, folder: Path
) -> None:
    path = tree_root / YAMLS / "main/mosaic-bert-base-uncased.yaml"
    words = ["scheduler.name=warmup_stable_decay", "load_path=x", "save_folder=y"]
    words += ["train_loader.dataset.mlm_probability_end=0.1", "max_duration=10ba"]
    leaves = Leaves(path, read_nested(path, words, pretraining_yaml.KNOWN))
    layer = pretraining_yaml.to_settings(leaves, 1, False, lambda *_: 10**6)
    _check(leaves, set(layer), pretraining_yaml.NAMES, pretraining_yaml.KNOWN)

    path = tree_root / YAMLS / "test/sequence_classification.yaml"
    rows = folder / "rows.csv"
    words = [f"data.train={rows}", f"data.eval={rows}", "model.num_labels=3", "data.task=null"]
    leaves = Leaves(path, read_nested(path, words, finetuning_yaml.KNOWN))
    layer = finetuning_yaml.to_settings(leaves, 1, False)
    _check(leaves, set(layer), finetuning_yaml.NAMES, finetuning_yaml.KNOWN)


def _check(leaves: Leaves, fields: set[str], names: dict, known: tuple[str, ...]) -> None:
    assert fields - NOT_IN_THE_YAML <= names.keys()
    prefixes = {name.removesuffix(".**") for name in known}
    for alternatives in names.values():
        for name in alternatives:
            assert any(one == name or one.startswith(f"{name}.") for one in prefixes), name
    written = names_for_errors(leaves, names)
    assert {name.split("=")[0] for name in written} - settings_by_env().keys() == {
        "LOGDIR or EXPERIMENT"
    }


def test_a_value_taken_from_another_name_is_changed_there(tree_root: Path) -> None:
    path = tree_root / YAMLS / "test/sequence_classification.yaml"
    for words, expected in (
        ([], "max_seq_len"),
        (["train_loader.max_seq_len=32"], "train_loader.max_seq_len"),
    ):
        leaves = Leaves(path, read_nested(path, words, finetuning_yaml.KNOWN))
        assert names_for_errors(leaves, finetuning_yaml.NAMES)["MAX_SEQ_LENGTH"] == expected


def test_options_name_settings() -> None:
    for options in (custom_task.OPTIONS, custom_corpus.OPTIONS):
        names = {words.partition("=")[0] for words in options}  # SKIP_BAD=1
        assert names - settings_by_env().keys() == {"LOGDIR or EXPERIMENT"}


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (["model.name=hf_bert"], "model.unsupported", "Set model.name=mosaic_bert"),
        (["model.num_labels=2"], "data.labels", "Set model.num_labels=3, or 1 for numbers"),
        (
            ["model.model_config.vocab_size=4096"],
            "vocabulary.mismatch",
            "Use the vocabulary of load_path",
        ),
    ],
)
def test_fine_tuning_with_a_yaml(
    words: list[str], code: str, remedy: str, tree_root: Path, folder: Path, tmp_path, run_mlbert
) -> None:
    rows = folder / "rows.csv"
    path = tree_root / YAMLS / "test/sequence_classification.yaml"
    given = [f"load_path={folder}", f"data.train={rows}", f"data.eval={rows}", "data.task=null"]
    given += ["model.num_labels=3", "model.name=mosaic_bert", f"save_folder={tmp_path}", *words]
    status, _, errors = run_mlbert("finetune", path, *given)
    assert (status, f"[{code}]" in errors) == (2, True), errors
    assert remedy in errors
    assert not settings_by_env().keys() & set(re.findall(r"[A-Z_]{4,}", errors))


def test_weights_choose_the_implementation_that_supports_them(
    tree_root: Path, folder: Path
) -> None:
    path = tree_root / YAMLS / "test/sequence_classification.yaml"
    rows = folder / "rows.csv"
    words = [f"load_path={folder}", f"data.train={rows}", f"data.eval={rows}", "data.task=null"]
    words += ["model.num_labels=3", "model.name=null"]
    leaves = Leaves(path, read_nested(path, words, finetuning_yaml.KNOWN))
    assert finetuning_yaml.to_settings(leaves, 1, False)["model_implementation"][0] == "mlbert"


def test_pre_training_with_a_yaml(
    tree_root: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_texts(tmp_path, tree_root)
    given = ["data_local=data", "tokenizer_name=vocab.txt", "max_seq_len=24"]
    monkeypatch.chdir(tmp_path)
    status, _, errors = run_mlbert("pretrain", "main.yaml", *given, "global_train_batch_size=512")
    assert status == 2, errors
    assert "Lower global_train_batch_size or give more text" in errors


def test_a_job_of_glue_names_what_glue_accepts(tree_root: Path) -> None:
    path = tree_root / YAMLS / "test/glue.yaml"
    given = GlueYaml(Leaves(path, read_nested(path, [], glue_yaml.KNOWN)))
    for line, expected in (
        ("Lower global_train_batch_size", "Lower tasks.rte.batch_size"),
        ("Set optimizer.lr=1", "Set tasks.rte.optimizer.lr=1"),
        ("Set another save_folder", "Set another save_finetune_checkpoint_folder"),
        ("Use the vocabulary of load_path", "Use the vocabulary of starting_checkpoint_load_path"),
    ):
        assert replace_names(line, given.names_for_errors("rte")) == expected
    for name in given.names_for_errors("rte").values():
        read_nested(path, [f"{name}=1"], glue_yaml.KNOWN)
