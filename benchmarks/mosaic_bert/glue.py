"""Fine-tune on GLUE's tasks and print their scores: python glue.py YAML [name=value ...]."""

import sys

from mlbert.cli.main import main

if __name__ == "__main__":
    main(["glue", *sys.argv[1:]])
