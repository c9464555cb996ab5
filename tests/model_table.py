"""The tables of docs/models.md, small models of each family in them, and the page's commands."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

import mlbert
from same_weights import randomize
from tokenizer_kinds import ENGLISH, modernbert, roberta, xlm_roberta

ROOT = Path(__file__).parents[1]
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
GLUE_TASK = "rte"
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


def tolerances() -> dict[str, float]:
    """Return the largest difference that the page allows for each way out."""
    return {name.strip("`"): float(allowed) for name, _, allowed in rows_of("## Compared")[2:]}


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
    return save(transformers.RobertaForMaskedLM(roberta_config(tokenizer)), folder)


def of_xlm_roberta(folder: Path) -> Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(xlm_roberta(folder))
    config = transformers.XLMRobertaConfig(**roberta_config(tokenizer).to_dict())
    return save(transformers.XLMRobertaForMaskedLM(config), folder)


def roberta_config(tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.RobertaConfig:
    return transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        pad_token_id=1,
        **SIZES,
    )


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
        "RoBERTa, CamemBERT": of_roberta,
        "XLM-RoBERTa": of_xlm_roberta,
        "MosaicBERT": mosaic_bert,
        "`mlbert pretrain`'s own": of_pretrain,
    }
    return writers[family](folder)


def write_refused(model: str, folder: Path) -> Path:
    """Write a folder as of a model that is refused."""
    size = word_pieces(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[model], "vocab_size": size}))
    save_file({"embeddings.weight": torch.zeros(size, 8)}, folder / "model.safetensors")
    return folder


def write_text(folder: Path) -> Path:
    """Write documents of one sentence each to text.txt."""
    draw = torch.Generator().manual_seed(0)
    words = ENGLISH.rstrip(".").split()
    orders = torch.rand((1200, len(words)), generator=draw).argsort(1)[:, :9].tolist()
    path = folder / "text.txt"
    path.write_text("\n\n".join(" ".join(words[n] for n in order) + "." for order in orders))
    return path


def write_rows(folder: Path) -> Path:
    """Write texts of two classes to rows.csv."""
    path = folder / "rows.csv"
    lines = [f"{'the fox' if n % 2 else 'a quick one'} {n},{'ab'[n % 2]}" for n in range(40)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


def commands(
    source: Path, text: Path, rows: Path, glue: Path, out: Path, mask: str = MASK
) -> dict[str, list[object]]:
    """Return the words of each command of the table, by its column."""
    tuning = ["finetune", "--from", source, "--train", rows, "--out", out / "tuned"]
    training = ["pretrain", text, "--from", source, "--out", out / "longer"]
    scoring = ["glue", "--from", source, "--data", glue, "--tasks", GLUE_TASK, "--seeds", 1]
    exporting = ["export", source, "--to"]
    return {
        "`fill-mask`": ["fill-mask", source, f"the quick {mask} fox"],
        "`finetune --from`": [*tuning, "--minutes", MINUTES],
        "`pretrain --from`": [*training, "--minutes", MINUTES],
        "`glue --from`": [*scoring, "--out", out / "glue"],
        "`hf-to-torch`": ["convert", "hf-to-torch", source, out / "weights"],
        "`--to huggingface` writes": [*exporting, "huggingface", "--out", out / "written"],
        "`--to onnx`": [*exporting, "onnx", "--out", out / "onnx"],
        "`--to sentence-transformers`": [
            *exporting,
            "sentence-transformers",
            "--out",
            out / "embeddings",
        ],
    }
