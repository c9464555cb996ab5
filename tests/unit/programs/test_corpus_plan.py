"""The settings that `mlbert pretrain` chooses."""

from pathlib import Path

from mlbert.config.bert_config import BertConfig
from mlbert.host.provenance import shipped
from mlbert.programs.custom_corpus.corpus_plan import CONTINUED, make_plan
from mlbert.programs.pretrain_rules import learning_rate


def test_a_continued_model_has_the_learning_rate_of_its_own_size(tmp_path: Path) -> None:
    shape = BertConfig.from_json(shipped("configs") / "base.json")
    plan = make_plan(1_000_000, 60.0, "auto", (tmp_path, shape))
    expected = CONTINUED * learning_rate("stableadamw", shape.hidden_size)
    assert plan.settings["learning_rate"] == expected
    assert expected < CONTINUED * learning_rate("stableadamw", 128)
