"""Write small models with random weights, and export them for embeddings: python make.py OUT."""

import dataclasses
import sys
from pathlib import Path

import torch

import mlbert
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.weights.embedding_folder import export_embeddings
from mlbert.models.weights.export import write_weights

OUT = Path(sys.argv[1])
PUBLISHED = Path(mlbert.__file__).parent / "data/formats/vocabularies/bert-uncased.txt"
OWN = OUT / "vocab.txt"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]

OUT.mkdir(parents=True)
OWN.write_text("\n".join([*WORDS, *(f"##{letter}" for letter in WORDS[5:])]) + "\n")
for name, vocabulary in (("published", PUBLISHED), ("own", OWN)):
    size = len(vocabulary.read_text(encoding="utf-8").splitlines())
    bert = BertConfig(size, 64, 2, 2, 128, max_position_embeddings=64, hidden_act="gelu_erf")
    modern = dataclasses.replace(
        bert,
        position_embedding_type="rotary",
        norm_position="pre",
        gated_mlp=True,
        attention_bias=False,
        mlp_bias=False,
        norm_bias=False,
        classifier_bias=False,
        rope_frequencies="product",
    )
    for kind, shape in (("bert", bert), ("modernbert", modern)):
        model = BertForMaskedLM(shape)
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(seed)
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
        run = OUT / f"{kind}_{name}"
        write_weights(model, run, {}, vocabulary)
        export_embeddings(run / "weights", run / "embeddings")
        print(run)
