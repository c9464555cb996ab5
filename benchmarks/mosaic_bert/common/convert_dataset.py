"""Convert text to MDS sets for streaming."""

from mlbert.host.packages import import_beside

if __name__ == "__main__":
    import_beside("mosaic_yaml.commands.convert_dataset").main()
