"""Convert text to MDS sets for streaming."""

from mlbert.host.packages import import_sibling

if __name__ == "__main__":
    import_sibling("mosaic_yaml.commands.convert_dataset").main()
