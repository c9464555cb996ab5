"""Fine-tune on a task: python sequence_classification.py YAML [name=value ...], or with mlbert launch local."""

from mlbert.cli.mosaic_bert.sequence_classification import main

if __name__ == "__main__":
    main()
