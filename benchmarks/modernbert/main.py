"""Pre-train a ModernBERT: python main.py YAML [name=value ...], or with mlbert launch local."""

import sys

from mlbert.cli.main import main

if __name__ == "__main__":
    main(["mosaic", *sys.argv[1:]])
