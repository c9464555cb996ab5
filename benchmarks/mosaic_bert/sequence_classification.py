"""Fine-tune on a task: python sequence_classification.py YAML [name=value ...],
or with mlbert launch local.
"""

import sys

from mlbert.cli.main import main

if __name__ == "__main__":
    main(["finetune", *sys.argv[1:]])
