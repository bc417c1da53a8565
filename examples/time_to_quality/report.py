"""What do the curves say? A table and a picture."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "synchronous": "#0072B2",
    "backup": "#E69F00",
    "backup, requeued": "#CC79A7",
    "bounded": "#009E73",
    "bounded, late dropped": "#666666",
    "asynchronous": "#D55E00",
}


def first_at(curve: list, target: float) -> tuple[float, int] | None:
    """Returns seconds and steps of the first look at which a log-loss was reached, or None.

    Args:
        curve: `(seconds, steps, log_loss)` for each look.
        target: Log-loss.
    """
    return next(((seconds, steps) for seconds, steps, loss in curve if loss <= target), None)


def table(results: dict) -> str:
    """Returns a Markdown table with a line for each policy.

    Args:
        results: What `main` writes to results.json.
    """
    header = [
        "policy",
        "seconds to target",
        "steps to target",
        "seconds in all",
        "steps in all",
        "final log-loss",
        "more than one device",
        "staleness p50 / max",
        "applied of the slow worker",
        "dropped",
    ]
    lines = [_line(header), "|---" * len(header) + "|"]
    for run in results["runs"]:
        seconds, steps, loss = run["curve"][-1]
        reached = first_at(run["curve"], results["target"])
        total, slow = run["statistics"]["total"], _slow(run)
        lines.append(
            _line(
                [
                    run["policy"],
                    *(["never", "never"] if reached is None else [f"{reached[0]:.1f}", reached[1]]),
                    f"{seconds:.1f}",
                    steps,
                    f"{loss:.4f}",
                    f"{loss - results['one_device']:+.4f}",
                    f"{total['age_p50']} / {total['age_max']}",
                    f"{slow['applied']} of {total['applied']}",
                    total["dropped"],
                ]
            )
        )
    return "\n".join(lines)


def _line(cells) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _slow(run: dict) -> dict:
    """Returns the statistics of the last worker; JSON has made texts of their numbers."""
    return run["statistics"]["workers"][max(run["statistics"]["workers"], key=int)]


def plot(results: dict, path) -> None:
    """Draws log-loss over seconds, staleness, and what became of the work.

    Args:
        results: What `main` writes to results.json.
        path: Where the PNG goes.
    """
    runs = results["runs"]
    figure = plt.figure(figsize=(10, 9), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.1, 1])
    _draw_curves(above.subplots(), results)
    left, right = below.subfigures(1, 2)
    _draw_staleness(left.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0], runs)
    left.supylabel("share of the applied sets", fontsize="medium")
    _draw_work(right.subplots(), runs)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_curves(axes, results: dict) -> None:
    for run in results["runs"]:
        seconds, _, losses = zip(*run["curve"], strict=True)
        axes.plot(seconds, losses, color=COLOURS[run["policy"]], label=run["policy"], linewidth=1.8)
    axes.axhline(results["target"], color="black", linewidth=0.8, linestyle="--", label="target")
    axes.axhline(
        results["one_device"], color="black", linewidth=0.8, linestyle=":", label="one device, at the end"
    )
    axes.set_xscale("symlog", linthresh=2, subs=range(2, 10))
    axes.set_xlim(0)
    ticks = [tick for tick in (0, 1, 2, 5, 10, 20, 50, 100, 200) if tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("seconds since the first step (logarithmic from 2)")
    axes.set_ylabel("log-loss of held-out rows (nats)")
    axes.set_title("Time to quality with one slow worker")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_staleness(all_axes, runs: list) -> None:
    for axes, run in zip(all_axes, runs, strict=True):
        ages = {int(age): count for age, count in run["statistics"]["total"]["ages"].items()}
        applied = sum(ages.values())
        shares = [count / applied for count in ages.values()]
        axes.bar(list(ages), shares, color=COLOURS[run["policy"]], width=0.9)
        axes.set_yscale("log")
        axes.set_ylim(5e-4, 50)  # Room for the name above the bars.
        axes.set_yticks([1e-3, 1e-1], ["0.1 %", "10 %"])
        axes.minorticks_off()
        axes.text(0.98, 0.92, run["policy"], transform=axes.transAxes, ha="right", va="top")
    all_axes[0].set_title("How stale was what was applied?")
    all_axes[-1].set_xlabel("staleness (updates)")


def _draw_work(axes, runs: list) -> None:
    for row, run in enumerate(reversed(runs)):
        total, slow = run["statistics"]["total"], _slow(run)
        parts = [
            (total["applied"] - slow["applied"], "applied, of the other workers", "#56B4E9"),
            (slow["applied"], "applied, of the slow worker", "#0072B2"),
            (total["dropped"], "dropped", "#D55E00"),
        ]
        start = 0
        for count, label, colour in parts:
            axes.barh(row, count, left=start, color=colour, label=label if row == 0 else None)
            start += count
        axes.text(
            start, row, f" {slow['applied']} slow, {total['dropped']} dropped", va="center", fontsize="small"
        )
    axes.set_yticks(range(len(runs)), [run["policy"] for run in reversed(runs)])
    axes.set_xlim(0, 1.75 * max(run["statistics"]["total"]["dispatched"] for run in runs))
    axes.set_xlabel("sets of gradients")
    axes.set_title("What became of the work?")
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
