"""`python train.py …`: the same as `draco-train …`."""

from draco.cli import main

if __name__ == "__main__":
    main()
