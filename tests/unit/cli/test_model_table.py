"""docs/models.md is true: its commands run with each family, and refuse the others in its words."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import mlbert
from mlbert.host.errors import UserError
from programs import RunMlbert
from same_weights import randomize
from tokenizer_kinds import ENGLISH, modernbert, roberta

pytestmark = pytest.mark.usefixtures("one_cpu")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
POSITIONS = 130
MINUTES = "0.05"
MASK = "[MASK]"
# As their owners publish them: the values that name the family, and some of the shape.
CONFIGS = {
    "DistilBERT": {
        "model_type": "distilbert",
        "architectures": ["DistilBertForMaskedLM"],
        "dim": 768,
        "hidden_dim": 3072,
        "n_heads": 12,
        "n_layers": 6,
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
    },
    "DeBERTa": {
        "model_type": "deberta-v2",
        "hidden_size": 768,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": "p2c|c2p",
        "norm_rel_ebd": "layer_norm",
    },
    "EuroBERT": {
        "model_type": "eurobert",
        "architectures": ["EuroBertForMaskedLM"],
        "auto_map": {"AutoConfig": "configuration_eurobert.EuroBertConfig"},
        "hidden_size": 768,
        "num_key_value_heads": 12,
        "rms_norm_eps": 1e-5,
    },
    "NeoBERT": {
        "model_type": "neobert",
        "architectures": ["NeoBERTLMHead"],
        "auto_map": {"AutoConfig": "model.NeoBERTConfig"},
        "hidden_size": 768,
        "num_hidden_layers": 28,
        "max_length": 4096,
    },
    "decoders": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_key_value_heads": 8,
    },
    "encoder-decoders": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 512,
        "is_encoder_decoder": True,
    },
    "others": {"model_type": "xlnet", "architectures": ["XLNetLMHeadModel2"], "d_model": 768},
}


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    text = PAGE.partition(heading)[2]
    lines = re.search(r"(?m)(?:^\|.*\n)+", text)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def families() -> dict[str, dict[str, str]]:
    """Return the cells of each family by the head of their column."""
    head, _, *lines = rows_of("# Which models")
    return {cells[0]: dict(zip(head, cells, strict=True)) for cells in lines}


def refusals() -> dict[str, str]:
    """Return the words about each model that is refused."""
    return {model: words.strip("`") for model, words in rows_of("## Refused")[2:]}


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    randomize(model, 0.1).save_pretrained(folder)
    return folder


def word_pieces(folder: Path) -> int:
    """Write a tokenizer of BERT's kind; return its number of entries."""
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    words += [f"##{letter}" for letter in letters]
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    return len(words)


def bert(folder: Path) -> Path:
    size = word_pieces(folder)
    config = transformers.BertConfig(vocab_size=size, max_position_embeddings=POSITIONS, **SIZES)
    return save(transformers.BertForMaskedLM(config), folder)


def modern(folder: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(modernbert(folder))
    ids = {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
    ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    config = transformers.ModernBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        global_attn_every_n_layers=2,
        local_attention=16,
        **ids,
        **SIZES,
    )
    return save(transformers.ModernBertForMaskedLM(config), folder)


def of_roberta(folder: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(roberta(folder))
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        pad_token_id=1,
        **SIZES,
    )
    return save(transformers.RobertaForMaskedLM(config), folder)


def own(folder: Path, **options: object) -> Path:
    """Write a model of ours, with a tokenizer of BERT's kind."""
    vocabulary = folder.parent / "words"
    size = word_pieces(vocabulary)
    model = mlbert.new_model(
        {**SIZES, "vocab_size": size, "max_position_embeddings": POSITIONS, **options}
    )
    model._tokenizer = vocabulary / "vocab.txt"
    model.save_pretrained(folder)
    return folder


def mosaic_bert(folder: Path) -> Path:
    return own(folder, position_embedding_type="alibi", gated_mlp=True)


def of_pretrain(folder: Path) -> Path:
    modern = {"position_embedding_type": "rotary", "norm_position": "pre", "gated_mlp": True}
    return own(folder, **modern)


def write(family: str, folder: Path) -> Path:
    """Write a small model of a family of the table."""
    writers: dict[str, Callable[[Path], Path]] = {
        "BERT": bert,
        "ModernBERT, Ettin, mmBERT": modern,
        "RoBERTa, XLM-RoBERTa, CamemBERT": of_roberta,
        "MosaicBERT": mosaic_bert,
        "`mlbert pretrain`'s own": of_pretrain,
    }
    return writers[family](folder)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    words = ENGLISH.rstrip(".").split()
    orders = torch.rand((1200, len(words)), generator=draw).argsort(1)[:, :9].tolist()
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(" ".join(words[n] for n in order) + "." for order in orders))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [f"{'the fox' if n % 2 else 'a quick one'} {n},{'ab'[n % 2]}" for n in range(40)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


def commands(source: Path, text: Path, rows: Path, out: Path) -> dict[str, list[object]]:
    """Return the words of each command of the table, by its column."""
    tuning = ["finetune", "--from", source, "--train", rows, "--out", out / "tuned"]
    training = ["pretrain", text, "--from", source, "--out", out / "longer"]
    return {
        "`fill-mask`": ["fill-mask", source, f"the quick {MASK} fox"],
        "`finetune --from`": [*tuning, "--minutes", MINUTES],
        "`pretrain --from`": [*training, "--minutes", MINUTES],
        "`hf-to-torch`": ["convert", "hf-to-torch", source, out / "weights"],
        "`--to huggingface` writes": ["export", source, "--out", out / "written"],
        "`--to onnx`": ["export", source, "--to", "onnx", "--out", out / "onnx"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_every_command_takes_a_family(
    family: str, tmp_path: Path, text: Path, rows: Path, run_mlbert: RunMlbert
) -> None:
    cells = families()[family]
    source = write(family, tmp_path / "source")
    for column, words in commands(source, text, rows, tmp_path).items():
        code, out, err = run_mlbert(*words)
        assert code == 0, (column, out, err)
        if column != "`--to huggingface` writes":
            assert cells[column] == "yes"
    written = tmp_path / "written"
    (architecture,) = json.loads((written / "config.json").read_text())["architectures"]
    assert cells["`--to huggingface` writes"] == f"`{architecture}`"
    assert (written / "tokenizer.json").is_file()

    assert cells["`load_model`"] == "yes"
    model = mlbert.load_model(source).eval()
    ids = torch.randint(5, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    for folder in (source, written):
        peer = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
        with torch.no_grad():
            found = model(ids).logits
            torch.testing.assert_close(found, peer.eval()(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", refusals())
def test_other_families_are_refused_by_every_command(
    model: str, tmp_path: Path, text: Path, rows: Path, run_mlbert: RunMlbert
) -> None:
    said = refusals()[model]
    source = tmp_path / "source"
    word_pieces(source)
    (source / "config.json").write_text(json.dumps({**CONFIGS[model], "vocab_size": 61}))
    save_file({"embeddings.weight": torch.zeros(61, 8)}, source / "model.safetensors")
    for column, words in commands(source, text, rows, tmp_path).items():
        code, out, err = run_mlbert(*words)
        (line,) = err.splitlines()
        assert (code, out) == (2, ""), column
        assert f"{said} [model.unsupported]" in line, column
    with pytest.raises(UserError, match=re.escape(said)):
        mlbert.load_model(source)
    names = {"source", "text.txt", "rows.csv"}
    assert {path.name for path in tmp_path.iterdir()} <= names | {"longer"}
