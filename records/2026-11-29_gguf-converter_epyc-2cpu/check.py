"""Look for each tensor of a folder in a GGUF file: python check.py FOLDER FILE."""

import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

reader = gguf.GGUFReader(sys.argv[2])
ours = load_file(Path(sys.argv[1]) / "model.safetensors")
kept = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
for name, wanted in ours.items():
    found = [
        theirs
        for theirs, values in kept.items()
        if values.size == wanted.size and np.array_equal(values.reshape(wanted.shape), wanted)
    ]
    print(f"{name}: {', '.join(found) or 'MISSING'}")
for name in ("bert.pooling_type", "bert.attention.layer_norm_epsilon", "bert.context_length"):
    print(name, reader.fields[name].contents())
