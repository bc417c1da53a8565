"""A loop by hand, two ways: `python -m examples.custom_loop.main --strategy synchronous|parameter_servers`."""

import argparse
import os
import pathlib
import tempfile

import tfdist_ext
from examples.custom_loop import train_parameter_servers, train_synchronous

DIRECTORY = pathlib.Path(tempfile.gettempdir(), f"custom_loop-{os.getuid()}")


def main():
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--strategy", choices=["synchronous", "parameter_servers"], default="synchronous")
    add("--epochs", type=int, default=6, help="passes over the 1,437 training images (%(default)s)")
    add("--staleness", type=int, default=4, help="updates that a gradient may be old on parameter servers")
    add(
        "--directory",
        type=pathlib.Path,
        help=f"for checkpoints; training goes on with what is there (one for each kind of cluster in {DIRECTORY})",
    )
    arguments = parser.parse_args()
    num_tasks = len(tfdist_ext.cluster.resolve().members)
    directory = arguments.directory or DIRECTORY / f"{arguments.strategy}-of-{num_tasks}-tasks"
    if arguments.strategy == "synchronous":
        result = train_synchronous.train(directory, arguments.epochs)
    else:
        policy = tfdist_ext.BoundedStaleness(arguments.staleness)
        result = train_parameter_servers.train(directory, arguments.epochs, policy)
        total = result["statistics"]
        if total is not None:
            print(
                f"{total['rows_applied']} rows in {total['applied']} updates, {total['dropped']} dropped, age of "
                f"gradients: median {total['age_p50']}, at most {total['age_max']} updates"
            )
    if not result["step_losses"]:
        print(f"nothing was left to train: delete {directory}, or pass --directory, for a new run")
    accuracy, error = result["test_accuracy"], result["test_pixel_error"]
    print(f"test accuracy {accuracy:.4f}, error of a pixel {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
