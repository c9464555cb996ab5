"""Fine-tune on GLUE\'s tasks and print their scores: python glue.py YAML [name=value ...]."""

from mlbert.cli.mosaic_bert.glue import main

if __name__ == "__main__":
    main()
