"""Any BERT of transformers in the commands that take a model:
the weights, the vocabulary, and the token ids.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import HostBatch
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.fill_mask import open_model
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.load import load_weights
from mlbert.runs.starting_weights import name_weights
from mosaic_yaml.common_yaml import find_start
from programs import RunMlbert, run_script
from same_weights import randomize
from user_errors import user_error

Fails = Callable[..., str]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
WORDS = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "é", "e", "東京", "東", "."]
WORDS = list(dict.fromkeys(WORDS))
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 40}
ARCHITECTURES = [
    "BertModel",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
]
WITH_MASKED_LM = ("BertForMaskedLM", "BertForPreTraining")
SPARE_ROWS = 7


def save_model(
    folder: Path, architecture: str, vocab_size: int = len(WORDS) + SPARE_ROWS, **saving: object
) -> Path:
    """Save a model and its tokenizer as transformers does; return the folder."""
    config = transformers.BertConfig(vocab_size=vocab_size, **SIZES)
    model = randomize(getattr(transformers, architecture)(config))
    model.save_pretrained(folder, **saving)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, strip_accents=False)
    tokenizer.save_pretrained(folder)
    assert not (folder / "vocab.txt").exists()
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [
        f"{'warm' if n % 2 else 'cold'} é {n},{'warm' if n % 2 else 'cold'}" for n in range(40)
    ]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(0, 26, (400, 8, 5), generator=draw).tolist()
    lines = [" ".join("".join(LETTERS[n] for n in word) for word in line) for line in letters]
    path.write_text("".join(f"{line}.\n\n" for line in lines))
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_class_is_converted_and_opened(tmp_path, run_mlbert: RunMlbert, fails, architecture):
    source = save_model(tmp_path / "peer", architecture)
    theirs = load_file(source / "model.safetensors")
    prefix = "" if architecture == "BertModel" else "bert."
    words = theirs[f"{prefix}embeddings.word_embeddings.weight"]

    code, out, err = run_mlbert("convert", "hf-to-torch", source, tmp_path / "ours")
    assert code == 0, err
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert torch.equal(ours["bert.embeddings.word_embeddings.weight"], words)
    has_pooler = f"{prefix}pooler.dense.weight" in theirs
    assert ("bert.pooler.dense.weight: missing" in out) == (not has_pooler)

    model, _, tokenizer = open_model(source)  # as finetune and pretrain --from do
    assert model.config.vocab_size == len(words)
    loaded = dict(model.named_parameters())["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(loaded[: len(words)], words)
    peer_ids = transformers.AutoTokenizer.from_pretrained(source)("été 東京 e.")["input_ids"]
    assert tokenizer.encode("été 東京 e.") == peer_ids[1:-1]

    started = BertForMaskedLM(model.config)
    load_weights(started, source)
    shape, vocabulary = find_start(source)  # as sequence_classification.py and glue.py do
    assert shape == model.config
    assert vocabulary is not None
    assert load_tokenizer(vocabulary).identity == tokenizer.identity

    if architecture in WITH_MASKED_LM:
        code, out, err = run_mlbert("fill-mask", source, "a [MASK] é .", "--top", "3")
        assert (code, len(out.splitlines())) == (0, 3), err
    else:
        fails(["fill-mask", source, "a [MASK]"], "checkpoint.shape", source)


@pytest.fixture
def fails(assert_fails: Fails) -> Fails:
    return assert_fails


def test_guesses_with_spare_rows_are_those_of_transformers(tmp_path, run_mlbert: RunMlbert):
    source = save_model(tmp_path / "peer", "BertForMaskedLM")
    code, out, err = run_mlbert("fill-mask", source, "a [MASK] é .", "--top", "3")
    assert code == 0, err
    model = transformers.AutoModelForMaskedLM.from_pretrained(source).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer("a [MASK] é .", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, 2, : len(WORDS)]
    expected = [WORDS[number] for number in logits.topk(3).indices.tolist()]
    assert [line.split()[1] for line in out.splitlines()] == expected


@pytest.mark.parametrize("form", ["safetensors", "pytorch"])
def test_sharded_weights_are_read(tmp_path, run_mlbert: RunMlbert, form):
    whole = save_model(tmp_path / "whole", "BertForPreTraining")
    sharded = tmp_path / "sharded"
    shutil.copytree(whole, sharded)
    transformers.BertForPreTraining.from_pretrained(whole).save_pretrained(
        sharded, max_shard_size="10KB"
    )
    (sharded / "model.safetensors").unlink(missing_ok=True)
    index = sharded / "model.safetensors.index.json"
    if form == "pytorch":
        values = json.loads(index.read_text())
        for name in set(values["weight_map"].values()):
            torch.save(load_file(sharded / name), sharded / name.replace(".safetensors", ".bin"))
            (sharded / name).unlink()
        names = values["weight_map"].items()
        values["weight_map"] = {k: file.replace(".safetensors", ".bin") for k, file in names}
        index.unlink()
        index = sharded / "pytorch_model.bin.index.json"
        index.write_text(json.dumps(values))
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    assert len(shards) > 2
    for folder, out in ((whole, "a"), (sharded, "b")):
        code, _, err = run_mlbert("convert", "hf-to-torch", folder, tmp_path / out)
        assert code == 0, err
    found = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("a", "b")]
    assert found[0] == found[1]
    assert open_model(sharded)[1].missing == {}
    name, digest = name_weights(sharded)
    assert name == "sharded"
    assert len(digest) == 64
    (sharded / shards[1]).unlink()
    with user_error("checkpoint.incomplete", sharded / shards[1]):
        open_model(sharded)


def test_an_index_that_leads_elsewhere_is_refused(tmp_path):
    sharded = save_model(tmp_path / "peer", "BertModel", max_shard_size="10KB")
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name, shard = next(iter(values["weight_map"].items()))
    for target in ("../model.safetensors", "/etc/passwd", 5):
        index.write_text(json.dumps({"weight_map": {**values["weight_map"], name: target}}))
        with user_error("checkpoint.format", index):
            open_model(sharded)
    index.write_text(json.dumps({"weight_map": {**values["weight_map"], "absent": shard}}))
    with user_error("checkpoint.incomplete", sharded / shard):
        open_model(sharded)
    index.write_text("{}")
    with user_error("checkpoint.format", index):
        open_model(sharded)


@pytest.mark.parametrize("wrap", ["{}", "module.{}", "_orig_mod.{}", "module._orig_mod.{}"])
def test_wrapped_names_are_read(tmp_path, wrap):
    source = save_model(tmp_path / "peer", "BertForSequenceClassification")
    file = source / "model.safetensors"
    tensors = load_file(file)
    before = {name: value.clone() for name, value in open_model(source)[0].named_parameters()}
    renamed = {
        wrap.format(name).replace(".encoder.", ".encoder._orig_mod."): value
        for name, value in tensors.items()
    }
    save_file(renamed, file)
    model, report, _ = open_model(source)
    assert type(model).__name__ == "BertForSequenceClassification"
    assert report.missing == {}
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("kind", ["ModernBERT", "our own class"])
def test_encoders_of_exported_models_are_read(tmp_path, kind):
    """AutoModel saves them without heads."""
    options = {"position_embedding_type": "alibi"}
    if kind == "ModernBERT":
        options = {"position_embedding_type": "rotary", "norm_position": "pre", "gated_mlp": True}
    model = randomize(BertForMaskedLM(BertConfig(len(WORDS), **SIZES, **options)))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    write_weights(model, tmp_path / "run", {}, tmp_path / "vocab.txt")
    exported = tmp_path / "run/huggingface"
    encoder = transformers.AutoModel.from_pretrained(exported, trust_remote_code=True)
    encoder.save_pretrained(tmp_path / "saved")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(exported / name, tmp_path / "saved" / name)
    expected = to_huggingface(model)
    found, report, tokenizer = open_model(tmp_path / "saved")
    assert tokenizer.identity == load_tokenizer(exported).identity
    for name, parameter in to_huggingface(found).items():
        if name in report.missing:
            assert name.startswith(("cls.", "bert.pooler."))
        else:
            assert torch.equal(parameter, expected[name])


def test_decoders_are_refused(tmp_path):
    source = save_model(tmp_path / "peer", "BertForMaskedLM")
    for name in ("is_decoder", "add_cross_attention"):
        values = json.loads((source / "config.json").read_text()) | {name: True}
        (tmp_path / "config.json").write_text(json.dumps(values))
        shutil.copytree(source, tmp_path / name)
        shutil.copy(tmp_path / "config.json", tmp_path / name / "config.json")
        with user_error("model.unsupported", tmp_path / name / "config.json"):
            open_model(tmp_path / name)


@pytest.mark.parametrize("spare", [-1, 1024])
def test_the_vocabulary_of_another_model_is_refused_by_all(tmp_path, rows, text, fails, spare):
    source = save_model(tmp_path / "peer", "BertForMaskedLM", len(WORDS) + spare)
    file = source / "tokenizer.json"
    for words in commands(source, tmp_path, rows, text):
        fails(words, "vocabulary.mismatch", file)
    assert not (tmp_path / "out").exists()


def commands(source: Path, tmp_path: Path, rows: Path, text: Path) -> list[list[object]]:
    """Return a call of each command that takes a model."""
    out = tmp_path / "out"
    return [
        ["convert", "hf-to-torch", source, out],
        ["fill-mask", source, "a [MASK]"],
        ["finetune", "--from", source, "--train", rows, "--out", out],
        ["pretrain", text, "--from", source, "--out", out, "--dry-run"],
        ["export", source, "--out", out],
    ]


def test_an_added_token_is_kept_by_every_command(tmp_path, text, run_mlbert: RunMlbert):
    source = save_model(tmp_path / "peer", "BertForMaskedLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<url>"])
    tokenizer.save_pretrained(source)
    line = "Été <url> a<url>b 東京"
    expected = tokenizer(line)["input_ids"]
    out = tmp_path / "out"
    for words in (
        ["convert", "hf-to-torch", source, tmp_path / "ours"],
        ["convert", "torch-to-hf", tmp_path / "ours", tmp_path / "theirs"],
        ["export", source, "--out", tmp_path / "exported"],
        ["fill-mask", source, "a [MASK] <url>"],
        ["pretrain", text, "--tokenizer", source, "--out", out, "--dry-run"],
        ["pretrain", text, "--vocab", source / "tokenizer.json", "--out", out, "--dry-run"],
    ):
        code, _, err = run_mlbert(*words)
        assert code == 0, (words, err)
    for name in ("ours", "theirs", "exported"):
        found = load_tokenizer(tmp_path / name)
        assert [found.cls_id, *found.encode(line), found.sep_id] == expected
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert peer(line)["input_ids"] == expected


def test_conversions_keep_the_tokenizer(tmp_path, run_mlbert: RunMlbert):
    source = save_model(tmp_path / "peer", "BertForMaskedLM")
    for words in (
        ["convert", "hf-to-torch", source, tmp_path / "ours"],
        ["convert", "torch-to-hf", tmp_path / "ours", tmp_path / "theirs"],
        ["export", source, "--out", tmp_path / "exported"],
    ):
        code, _, err = run_mlbert(*words)
        assert code == 0, err
    line = "Été é 東京 a\u0301. e\u0000x"
    expected = transformers.AutoTokenizer.from_pretrained(source)(line)["input_ids"]
    for name in ("ours", "theirs", "exported"):
        assert load_tokenizer(tmp_path / name).encode(line) == expected[1:-1]
    for name in ("theirs", "exported"):
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert found(line)["input_ids"] == expected


def test_finetune_and_pretrain_start_from_an_encoder_without_heads(
    tmp_path, rows, text, run_mlbert: RunMlbert
):
    source = save_model(tmp_path / "peer", "BertModel")
    line = "Été é 東京 e"
    expected = transformers.AutoTokenizer.from_pretrained(source)(line)["input_ids"]

    words = ["--from", source, "--train", rows, "--out", tmp_path / "tuned", "--minutes", "0.05"]
    code, out, err = run_mlbert("finetune", *words)
    assert code == 0, out + err
    tuned = tmp_path / "tuned/run_0/huggingface"

    words = [text, "--from", source, "--out", tmp_path / "longer", "--minutes", "0.05"]
    code, out, err = run_mlbert("pretrain", *words)
    assert code == 0, out + err
    for folder in (tuned, tmp_path / "longer/model"):
        peer = transformers.AutoTokenizer.from_pretrained(folder)
        assert peer(line)["input_ids"] == expected
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        assert size == len(WORDS) + SPARE_ROWS


def test_a_set_is_converted_and_read_with_a_tokenizer_json(tmp_path, tree_root, text, capsys):
    source = save_model(tmp_path / "peer", "BertForMaskedLM")
    programs = tree_root / "benchmarks/mosaic_bert/common"
    out = tmp_path / "set"
    words = ["--dataset", "text", "--path", text, "--out_root", out, "--splits", "val"]
    words += ["--concat_tokens", 32, "--tokenizer", source]
    assert run_script(programs / "convert_dataset.py", *words) == 0, capsys.readouterr().err
    words = ["--tokenizer", source, "--local_path", out, "--split", "val"]
    assert run_script(programs / "text_data.py", *words) == 0, capsys.readouterr().err
    assert "#### batch" in capsys.readouterr().out


def _trained_elsewhere(model: torch.nn.Module) -> None:
    """Change every bias, as any training does."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 10)


@pytest.mark.parametrize("kind", ["rotary", "plain"])
@pytest.mark.parametrize("change", ["trained", "resized", "merged"])
def test_folders_of_ours_that_other_programs_changed(tmp_path, run_mlbert, kind, change) -> None:
    """They are read, with transformers' logits, and written again; a merged adapter has the names
    and shapes of a trained model.
    """
    options = {"position_embedding_type": "rotary", "norm_position": "pre", "gated_mlp": True}
    config = BertConfig(len(WORDS), **SIZES, **(options if kind == "rotary" else {}))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    model = BertForMaskedLM(config)
    model.initialize(1)
    write_weights(model, tmp_path, {}, tmp_path / "vocab.txt", lower_case=False)
    peer = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "huggingface")
    if change == "trained":
        _trained_elsewhere(peer)
    elif change == "resized":
        peer.resize_token_embeddings(len(WORDS) + 8)
    else:
        import peft

        names = "all-linear"
        adapted = peft.get_peft_model(peer, peft.LoraConfig(target_modules=names, bias="all"))
        _trained_elsewhere(adapted)
        peer = adapted.merge_and_unload()
    changed = tmp_path / "changed"
    peer.save_pretrained(changed)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "huggingface").save_pretrained(changed)

    code, _, err = run_mlbert("fill-mask", changed, "a [MASK] .", "--top", "1")
    assert code == 0, err
    again, _, tokenizer = open_model(changed)
    rows = Ragged.from_rows([(list(range(5, 25)), 20, False, list(range(20)), [0] * 20)])
    batch = HostBatch.of_sequences(rows, np.zeros(1, np.int64), 20).to("cpu")
    again.train(False)
    with torch.no_grad():
        theirs = peer.eval()(input_ids=torch.arange(5, 25)[None]).logits[0]
        ours = again(batch, None).masked[:, : len(theirs[0])]
    assert (ours - theirs).abs().max() < 1e-5
    write_weights(again, tmp_path / "written", {}, tokenizer.file)
    reread = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "written/huggingface")
    with torch.no_grad():
        assert (reread(input_ids=torch.arange(5, 25)[None]).logits[0] - theirs).abs().max() < 1e-5
    load_weights(BertForMaskedLM(again.config), tmp_path / "written/weights")


def test_an_adapter_without_its_model(tmp_path, fails) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = fails(["fill-mask", tmp_path, "a [MASK]"], "checkpoint.missing", tmp_path)
    assert "merge_and_unload" in said
