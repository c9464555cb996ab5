"""Fine-tuning on GLUE's tasks and their scores: python glue.py YAML [name=value ...]."""

from mlbert.cli.mosaic_bert.glue import main

if __name__ == "__main__":
    main()
