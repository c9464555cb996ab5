"""Folders to and from Hugging Face's form, loaded by transformers itself; damaged ones."""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig as PeerConfig
from transformers import BertForPreTraining as PeerModel

from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.models.weights.convert import huggingface_to_torch, torch_to_huggingface
from same_weights import assert_same_tensors, randomize
from user_errors import user_error


@pytest.fixture
def peer_folder(tmp_path):
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    peer = PeerModel(PeerConfig(**sizes, intermediate_size=64, hidden_act="gelu_pytorch_tanh"))
    randomize(peer).save_pretrained(tmp_path / "peer")
    return tmp_path / "peer"


def test_round_trip_is_exact_and_transformers_loads_it(tmp_path, peer_folder):
    report = huggingface_to_torch(peer_folder, tmp_path / "ours")
    assert len(report.taken) == 46
    assert report.missing == {}
    torch_to_huggingface(tmp_path / "ours", tmp_path / "back")
    model, loading = PeerModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert_same_tensors(model.state_dict(), PeerModel.from_pretrained(peer_folder).state_dict())


def test_older_folders_give_the_same(tmp_path, peer_folder):
    """They have PyTorch's file instead of safetensors, and no model_type."""
    huggingface_to_torch(peer_folder, tmp_path / "ours")
    torch.save(load_file(peer_folder / "model.safetensors"), peer_folder / "pytorch_model.bin")
    (peer_folder / "model.safetensors").unlink()
    values = json.loads((peer_folder / "config.json").read_text())
    (peer_folder / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if k != "model_type"})
    )
    huggingface_to_torch(peer_folder, tmp_path / "again")
    for name in ("bert_config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("is_lower", [True, False])
def test_the_vocabulary_of_a_tokenizer_json_is_copied(tmp_path, peer_folder, is_lower):
    """Such a folder has no vocab.txt: fast tokenizers save that file only."""
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The"]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    fast = BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=is_lower)
    fast.save(str(peer_folder / "tokenizer.json"))
    (peer_folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": is_lower}))
    huggingface_to_torch(peer_folder, tmp_path / "ours")
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert tokenizer.entries == entries
    assert tokenizer.encode("The the") == fast.encode("The the", add_special_tokens=False).ids
    torch_to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    shape = json.loads((tmp_path / "theirs/config.json").read_text())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs.model_max_length == shape["max_position_embeddings"]
    assert theirs("The the", add_special_tokens=False)["input_ids"] == tokenizer.encode("The the")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{}", "vocabulary.format"),
        ('{"model": {"vocab": {"a": 7}}}', "vocabulary.format"),
        ("[]", "file.json"),
        ("half", "file.json"),
    ],
)
def test_a_tokenizer_json_without_a_vocabulary_is_one_error(tmp_path, peer_folder, text, code):
    (peer_folder / "tokenizer.json").write_text(text)
    with user_error(code, peer_folder / "tokenizer.json"):
        huggingface_to_torch(peer_folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def remove_a_tensor(file):
    save_file(
        {
            name: tensor
            for name, tensor in load_file(file).items()
            if "layer.1.output.dense" not in name
        },
        file,
    )


def widen(file):
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 128}))


@pytest.mark.parametrize(
    ("name", "damage", "code", "named"),
    [
        ("model.safetensors", lambda file: os.truncate(file, 1000), "checkpoint.damaged", None),
        ("config.json", lambda file: file.write_text("{"), "file.json", None),
        (
            "config.json",
            lambda file: file.write_text('{"model_type": "distilbert"}'),
            "model.unsupported",
            None,
        ),
        ("config.json", widen, "checkpoint.shape", "model.safetensors"),
        ("model.safetensors", remove_a_tensor, "checkpoint.incomplete", None),
        ("config.json", lambda file: shutil.rmtree(file.parent), "file.unreadable", None),
    ],
)
def test_damage_is_one_error_and_nothing_is_written(
    tmp_path, peer_folder, name, damage, code, named
):
    damage(peer_folder / name)
    wording = code != "checkpoint.damaged"  # safetensors' own words
    with user_error(code, peer_folder / (named or name), wording=wording):
        huggingface_to_torch(peer_folder, tmp_path / "ours")
    assert [p.name for p in tmp_path.iterdir() if "ours" in p.name] == []


def test_existing_target_is_not_overwritten(tmp_path, peer_folder):
    (tmp_path / "ours").mkdir()
    with user_error("file.exists", tmp_path / "ours"):
        huggingface_to_torch(peer_folder, tmp_path / "ours")
