"""Print the batches that training gets from a set of texts."""

from mlbert.host.packages import import_sibling

if __name__ == "__main__":
    import_sibling("mosaic_yaml.commands.text_data").main()
