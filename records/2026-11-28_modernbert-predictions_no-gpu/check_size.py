"""Model the bfloat16 steps of 1,024 tokens a sequence with as many tokens as the GPU check has."""

from dataclasses import replace

from counted.gpus import GPUS
from counted.modernbert import predict
from predict_modernbert import workloads

# Model -> tokens of a step in `gpu_check.parts.full_scale`.
TOKENS = {"base": 32_768, "large": 16_384}

for model, tokens in TOKENS.items():
    workload = replace(workloads()[f"{model}, 1024 tokens, bf16"], tokens=tokens)
    found = predict(workload, GPUS["h200"])
    low = found.low.tokens_per_second
    high = found.high.tokens_per_second
    print(f"{model}, {tokens:,} tokens: {low:,.0f} to {high:,.0f} tokens/s, modeled")
