"""Tokenizers of every kind, trained on the spot, in the folders that transformers writes."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# Ten scripts, code, emoji, unusual white space, names of special tokens, and an added token.
TEXTS = [
    "The quick brown fox, it's 3.14 % faster. Straße, Ærøskøbing, naïve Œuvre.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "敏捷的棕色狐狸跳过懒狗。いろはにほへと カタカナ。다람쥐 헌 쳇바퀴에 타고파.",
    "نص حكيم له سر قاطع וְזֶה טקסט בעברית ऋषियों को सताने वाले ช้างไทย ქართული ენა հայերեն",
    "def f(x):\n    return {'a': x[0] ** 2}  # ok\n\n\n\tif (x != 'y'): print(\"\\n\")\r\n",
    "👩‍🚀🤗 🏳️‍🌈 ✅ ½ ﬁ ① Ｆｕｌｌ Ａ\u0301 é e\u0301 ͏",
    "  two  spaces\u00a0nbsp\u2003em\u3000wide\u200bzero \t tab  end  ",
    "before [MASK] after<mask>x <url>y  <url>  [SEP]</s><s> [CLS]",
    "",
    " ",
    "a",
    "x" * 250,
]
ENGLISH = "She said that the fox is a quick one and it is not faster than the brown fox."
NAMES = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
    "unk_token": "[UNK]",
}
XLM_NAMES = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "unk_token": "<unk>",
}


def sentences() -> Iterator[str]:
    """Yield text to train on: all scripts, so that there is something to merge."""
    words = ENGLISH.split(" ")
    draw = random.Random(0)
    for _ in range(200):
        yield " ".join(draw.sample(words, len(words)))
    for _ in range(6):
        for text in TEXTS[:5]:
            yield from text.split(" ")
            yield text


def template(library: Tokenizer, cls: str, sep: str) -> None:
    library.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, library.token_to_id(token)) for token in (cls, sep)],
    )


def save(
    library: Tokenizer, folder: Path, names: dict[str, str], kind: str, model_type: str | None
) -> Path:
    """Save a tokenizer and a config.json as transformers does; add a token for addresses."""
    fast = getattr(transformers, kind)(tokenizer_object=library, **names)
    fast.add_tokens([AddedToken("<url>", lstrip=True)])
    fast.save_pretrained(folder)
    if model_type is not None:
        (folder / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    return folder


def modernbert(folder: Path, vocab_size: int = 600) -> Path:
    """Byte-level BPE with special tokens at the end, and a mask token that takes the space
    before it.
    """
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(sentences(), trainer)
    library.add_special_tokens(
        ["[UNK]", "[CLS]", "[SEP]", "[PAD]", AddedToken("[MASK]", lstrip=True)]
    )
    template(library, "[CLS]", "[SEP]")
    return save(library, folder, NAMES, "PreTrainedTokenizerFast", "modernbert")


def xlm_roberta(folder: Path) -> Path:
    """Unigram on words that begin with a mark for the space, with NFKC."""
    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=700,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    library.train_from_iterator(sentences(), trainer)
    library.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(token, library.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    return save(library, folder, XLM_NAMES, "PreTrainedTokenizerFast", None)


def gemma(folder: Path, vocab_size: int = 600) -> Path:
    """BPE with a mark for every space, and bytes for what it does not know, as mmBERT's."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    of_bytes = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, limit_alphabet=150, show_progress=False
    )
    library.train_from_iterator(sentences(), trainer)
    content = library.to_str()
    library = with_entries(content, of_bytes)
    template(library, "<bos>", "<eos>")
    names = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "cls_token": "<bos>",
        "sep_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return save(library, folder, names, "PreTrainedTokenizerFast", "modernbert")


def with_entries(content: str, entries: list[str]) -> Tokenizer:
    """Return a tokenizer with more entries in its model's vocabulary."""
    values = json.loads(content)
    vocab = values["model"]["vocab"]
    first = 1 + max(vocab.values())
    new = [entry for entry in entries if entry not in vocab]
    values["model"]["vocab"] = vocab | {entry: first + i for i, entry in enumerate(new)}
    return Tokenizer.from_str(json.dumps(values))


def roberta(folder: Path) -> Path:
    """Byte-level BPE in transformers' own class."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(sentences(), trainer)
    model = folder.parent / "model"
    model.mkdir()
    vocab, merges = library.model.save(str(model))
    fast = transformers.RobertaTokenizerFast.from_pretrained(
        str(model), vocab_file=vocab, merges_file=merges
    )
    fast.add_tokens([AddedToken("<url>", lstrip=True)])
    fast.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    return folder


def wordpiece(folder: Path) -> Path:
    """WordPiece with another prefix, normalizer, splitter and unknown token."""
    library = Tokenizer(
        models.WordPiece(
            unk_token="<unk>", continuing_subword_prefix="@@", max_input_chars_per_word=20
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.StripAccents()])
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece(prefix="@@")
    trainer = trainers.WordPieceTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>", "<mask>"],
        continuing_subword_prefix="@@",
        show_progress=False,
    )
    library.train_from_iterator(sentences(), trainer)
    template(library, "<s>", "</s>")
    return save(library, folder, XLM_NAMES, "PreTrainedTokenizerFast", None)


def kinds() -> dict[str, Callable[[Path], Path]]:
    """Return what writes a folder of each kind, by name."""
    writers: list[Callable[[Path], Path]] = [modernbert, xlm_roberta, gemma, roberta, wordpiece]
    return {write.__name__: write for write in writers}
