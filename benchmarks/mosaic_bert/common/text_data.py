"""Print the batches that training gets from a set of texts."""

from mlbert.host.packages import import_beside

if __name__ == "__main__":
    import_beside("mosaic_yaml.commands.text_data").main()
