"""`python train.py …`: the same as `draco train …`."""

from draco.cli import train

if __name__ == "__main__":
    train()
