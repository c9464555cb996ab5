"""Fine-tune on a task: python sequence_classification.py YAML [name=value ...], or with mlbert launch local."""

from mosaic_yaml.commands.sequence_classification import main

if __name__ == "__main__":
    main()
