"""Convert NVIDIA's .pt file to starting weights: `mlbert convert nvidia-to-torch` by its published
name.
"""

from mlbert.cli.published import main

if __name__ == "__main__":
    main("convert_ckpt_methods.py")
