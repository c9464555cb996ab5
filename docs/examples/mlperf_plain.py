"""Ten runs of a plain PyTorch loop, each with its MLPerf log: python mlperf_plain.py FOLDER."""

import secrets
import sys

import torch

from mlbert.mlperf.callback import MLPerfCallback

BATCH = 64
STEPS = 400
LR = 0.02
for index in range(10):
    with MLPerfCallback(
        sys.argv[1], index, submitter="Example", system_name="plain", status="research"
    ) as log:
        seed = secrets.randbelow(2**31)
        torch.manual_seed(seed)
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        names = {
            "seed": seed,
            "global_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "eval_samples": 512,
        }
        names |= {
            "opt_name": "adamw",
            "opt_base_learning_rate": LR,
            "opt_learning_rate_warmup_steps": 0,
        }
        log.fit_start({**names, "opt_learning_rate_training_steps": STEPS})
        questions = torch.randn(512, 16)
        for samples in range(BATCH, STEPS * BATCH + 1, BATCH):
            batch = torch.randn(BATCH, 16)
            torch.nn.functional.cross_entropy(model(batch), batch.argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if samples % (10 * BATCH) == 0:
                log.eval_start(samples)
                if log.eval_end(
                    samples, (model(questions).argmax(1) == questions.argmax(1)).float().mean()
                ):
                    break
