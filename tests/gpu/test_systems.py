"""Published configurations train on one GPU: a tiny model on random tokens,
each with its precision and graph.
"""

import json
import math
from pathlib import Path

import pytest

from mlbert.cli.main import main
from programs import exports_of, words_as_dict
from training_settings import read_metrics, read_summary

HOME = Path("benchmarks/bert/implementations")
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}
SHORT = words_as_dict("""
    SYNTH_DATA=1 DATADIR_PHASE2=unused EVALDIR=unused INIT_CHECKPOINT=none SEED=1 BATCHSIZE=8
    MAX_STEPS=4 LOG_FREQ=1 EVAL_ITER_START_SAMPLES=8 EVAL_ITER_SAMPLES=8 NUM_EVAL_EXAMPLES=16
    MLPERF_DIVISION=open CPU_THREADS=1
""")
CONFIGS = (
    "inventec_p8000_h100_n1/config_P8000H100_1x8x48x1_pack.sh",
    "samsung_dgxa100_n128/config_Samsung_Supercomputer21_DGXA100_128x8x16x1.sh",
    "8xA100_80GB-baseline/config.yaml",
    "8xA100_80GB-methods/config.yaml",
)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_published_config_trains(
    config: str, tree_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tree_root / HOME / config
    shape = tmp_path / "bert_config.json"
    shape.write_text(json.dumps(SHAPE))
    is_shell = file.suffix == ".sh"
    exports = (
        (exports_of(file) if is_shell else {})
        | SHORT
        | {"BERT_CONFIG": str(shape), "LOGDIR": str(tmp_path)}
    )
    for name in exports.keys() - {"PATH", "BIN_COUNTS"}:  # random tokens have no bins
        monkeypatch.setenv(name, exports[name])
    with pytest.raises(SystemExit) as end:
        main(["train", *([] if is_shell else ["--config", str(file)])])
    assert end.value.code == 1, "random tokens cannot be learned"
    assert read_summary(tmp_path)["steps"] == 4
    rows = [*read_metrics(tmp_path), *read_metrics(tmp_path, "evaluation")]
    assert len(rows) > 4
    assert all(math.isfinite(row.get("loss", row.get("eval_loss"))) for row in rows)
