"""Models that the tests of fine-tuning start from."""

from pathlib import Path

import pytest

from labeled_texts import sentences, write_csv

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rows.csv, a rotary model of ours in model/, and a BERT that transformers saved,
    without vocab.txt, in bert/.
    """
    from transformers import BertConfig as PeerConfig
    from transformers import BertForMaskedLM as Peer
    from transformers import BertTokenizer

    from mlbert.config.bert_config import BertConfig
    from mlbert.data.prepare.vocabulary_training import count_words, train_vocabulary
    from mlbert.models.bert import BertForMaskedLM
    from mlbert.models.weights.export import write_weights

    made = tmp_path_factory.mktemp("task")
    rows = sentences(200)
    write_csv(
        made / "rows.csv",
        ["id", "note", "kind"],
        *([n, text, kind] for n, (text, kind) in enumerate(rows)),
    )
    entries = train_vocabulary(count_words([text for text, _ in rows]), 200)
    (made / "vocab.txt").write_text("\n".join(entries) + "\n")
    rotary = {"position_embedding_type": "rotary", "norm_position": "pre", "gated_mlp": True}
    model = BertForMaskedLM(BertConfig(len(entries), **SHAPE, max_position_embeddings=64, **rotary))
    model.initialize(1)
    write_weights(model, made, {}, made / "vocab.txt")
    (made / "huggingface").rename(made / "model")
    config = PeerConfig(vocab_size=len(entries), **SHAPE, max_position_embeddings=40)
    Peer(config).save_pretrained(made / "bert")
    BertTokenizer(vocab=str(made / "vocab.txt")).save_pretrained(made / "bert")
    (made / "bert" / "vocab.txt").unlink(missing_ok=True)
    return made
