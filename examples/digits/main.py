"""Handwritten digits: `tfdist-ext run --workers 2 -- python -m examples.digits.main --epochs 5`."""

import argparse

from examples.digits import train


def main():
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the 1,437 training images")
    arguments = parser.parse_args()
    result = train.train(arguments.epochs)
    print(f"test loss {result['loss']:.6f}, test accuracy {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
