"""Pre-train BERT in TensorFlow 2 with published flags and a sourced config."""

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1] / name) for name in ("tensorflow2", "pytorch")
]

from tf2_bert.start import main  # noqa: E402

if __name__ == "__main__":
    main()
