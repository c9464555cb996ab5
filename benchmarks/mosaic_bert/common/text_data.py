"""Print the batches that training gets from a set of texts."""

from mosaic_yaml.commands.text_data import main

if __name__ == "__main__":
    main()
