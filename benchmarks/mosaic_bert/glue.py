"""Fine-tune on GLUE\'s tasks and print their scores: python glue.py YAML [name=value ...]."""

from mosaic_yaml.commands.glue import main

if __name__ == "__main__":
    main()
