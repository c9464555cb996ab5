"""Ten runs of Lightning's Trainer, each with its MLPerf log: python mlperf_lightning.py FOLDER."""

import secrets
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from mlbert import MLPerfCallback

BATCH = 64
STEPS = 400
EVAL_SAMPLES = 512


class Classifier(lightning.LightningModule):
    """Finds the largest number of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(16, 16)

    def training_step(self, batch):
        (rows,) = batch
        return torch.nn.functional.cross_entropy(self.model(rows), rows.argmax(1))

    def validation_step(self, batch):
        (rows,) = batch
        is_right = self.model(rows).argmax(1) == rows.argmax(1)
        self.log("eval_MaskedAccuracy", is_right.float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def rows(count: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(count, 16)), BATCH)


for index in range(10):
    known = {
        "global_batch_size": BATCH,
        "opt_learning_rate_warmup_steps": 0,
        "eval_samples": EVAL_SAMPLES,
    }
    with MLPerfCallback(
        sys.argv[1],
        index,
        submitter="Example",
        system_name="lightning",
        exit_at_target=True,
        hyperparameters=known,
    ) as log:
        lightning.seed_everything(secrets.randbelow(2**31))
        trainer = lightning.Trainer(
            max_steps=STEPS,
            val_check_interval=10,
            callbacks=[log.for_lightning()],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), rows(STEPS * BATCH), rows(EVAL_SAMPLES))
