"""Training in TensorFlow 2 on this system: settings come from the sourced config, published flags win over them."""

from tf2_bert.start import main

if __name__ == "__main__":
    main()
