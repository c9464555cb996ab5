"""NVIDIA's .pt file as starting weights: what `mlbert convert nvidia-to-torch` does, by its published name."""

from mlbert.cli.published import main

if __name__ == "__main__":
    main("convert_ckpt_methods.py")
