"""Pre-train a masked LM on streamed text: python main.py YAML [name=value ...], or with mlbert launch local."""

from mosaic_yaml.commands.main_yaml import main

if __name__ == "__main__":
    main()
