"""Click ranking: `tfdist-ext run --chief --workers 2 --ps 1 -- python -m examples.click_ranking.main`."""

import argparse

from examples.click_ranking import clicks, movielens, train


def main():
    """Parses the flags, and prints how good the model is beside what is possible and what is easy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of a pass")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the rows")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one worker's set of gradients")
    parser.add_argument(
        "--policy", choices=train.POLICIES, default="asynchronous", help="on parameter servers"
    )
    parser.add_argument("--dataset", choices=["synthetic", "movielens"], default="synthetic")
    arguments = parser.parse_args()
    strategy = train.make_strategy(arguments.policy)
    try:
        data = clicks.Clicks() if arguments.dataset == "synthetic" else movielens.load_ratings()
    except RuntimeError as error:
        parser.error(str(error))
    result = train.train(
        strategy, data, num_rows=arguments.rows, num_epochs=arguments.epochs, batch_size=arguments.batch_size
    )
    best = result["best_log_loss"]
    print(f"log-loss        {result['log_loss']:.4f}")
    print(f"best reachable  {'not known' if best is None else f'{best:.4f}'}")
    print(f"mean click rate {result['baseline_log_loss']:.4f}")
    print(f"AUC             {result['auc']:.4f}")
    for name, value in (result["statistics"] or {}).items():
        print(f"{name:15} {round(value, 1) if isinstance(value, float) else value}")


if __name__ == "__main__":
    main()
