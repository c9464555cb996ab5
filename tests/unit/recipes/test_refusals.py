"""Settings that a recipe refuses, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.cli.main import main
from training_settings import train_arguments

UNPACKED = {"average_packing_rate": 1}
STEPS = {"lr_milestones": "4,5", "lr_gamma": 0.5, "warmup_steps": 2, "max_steps": 8}
METHODS = {
    "packed_lamb": {},
    "ddp_adam": UNPACKED,
    "masked_lm": {**UNPACKED, "gradient_accumulation_steps": 1, **STEPS},
}
EVERY = "every rank of"


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("packed_lamb", {"weights_allgather": "bf16"}, "WEIGHTS_ALLGATHER=bf16"),
        (
            "packed_lamb",
            {"optimizer_implementation": "apex", "sharded_optimizer": "all"},
            "apex optimizer: it does not shard",
        ),
        ("packed_lamb", {"sharded_optimizer": "yes"}, "off, node, all"),
        ("packed_lamb", {"gradient_clipping": "buckets", **UNPACKED}, "is the way of RECIPE=ddp_adam"),
        ("ddp_adam", {"sharded_optimizer": "all"}, f"SHARDED_OPTIMIZER=all: {EVERY} ddp_adam updates everything"),
        ("ddp_adam", {"weights_allgather": "bf16"}, f"WEIGHTS_ALLGATHER=bf16: {EVERY} ddp_adam updates everything"),
        ("ddp_adam", {"gradient_clipping": "sometimes"}, "after, before, buckets"),
        ("ddp_adam", {"bucket_mib": "0"}, "must be greater than or equal to 1"),
        ("ddp_adam", {"bucket_mib": "1000000"}, "must be less than or equal to 4096"),
        ("ddp_adam", {"loss_scale": "1e9"}, "must be less than or equal to"),
        (
            "masked_lm",
            {"sharded_optimizer": "all"},
            f"SHARDED_OPTIMIZER=all: {EVERY} masked_lm_stored updates everything",
        ),
        ("masked_lm", {"gradient_clipping": "buckets"}, "is the way of RECIPE=ddp_adam"),
        ("masked_lm", {"lr_milestones": "none"}, "LR_MILESTONES: is not set, and SCHEDULE=multistep needs it"),
        ("masked_lm", {"model_options": "dropout=0"}, "MODEL_OPTIONS: 'dropout' is unknown"),
        ("masked_lm", {"max_seq_length": 65}, "MAX_SEQ_LENGTH=65: is more than the model's 64 positions"),
        ("masked_lm", {"model_implementation": "composer"}, "must be one of mlbert, huggingface"),
    ],
)
def test_contradictory_settings_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(train_arguments(tmp_path, recipe=recipe, **{**METHODS[recipe], **changes}))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
