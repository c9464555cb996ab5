"""Train in TensorFlow 2 with the settings of the sourced config; published flags win over them."""

from tf2_bert.start import main

if __name__ == "__main__":
    main()
