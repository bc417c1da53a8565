"""Places a small function on parameter servers inside this process and prints what came of it as JSON."""

import json
import sys

import tensorflow as tf

import tfdist_ext
from tfdist_ext.placement import FairSharePartitioner, apply_plan, explain, on, plan

SECOND = "/job:ps/task:1"


def main():
    resolver = tfdist_ext.cluster.in_process(1, 2)
    # A table of 100 x 4 float32, 1600 bytes, and 16 float32, 64 bytes, for 2 ps: a share is 832 bytes.
    strategy = tfdist_ext.ParameterServerStrategy(resolver, FairSharePartitioner(1600 + 64, 2))
    with strategy.scope():
        table = tf.Variable(tf.ones([100, 4]), name="table")
        small = tf.Variable(tf.ones([16]), name="small")
    with on(SECOND):
        remote = tf.Variable(tf.ones([1000, 4]), name="remote")

    @on(SECOND)
    def lookup(ids):
        return tf.gather(remote, ids) * 2.0

    @tf.function
    def step(ids):
        return tf.reduce_sum(lookup(ids))

    ids = tf.constant([1, 2])
    report = explain(step, ids, assigned=True)
    planned = plan(step, [ids], devices=["CPU:0", SECOND])
    try:
        on("/job:ps/task:7")(lookup)(ids)
        missing = ""
    except ValueError as error:
        missing = str(error)
    results = {
        "shards": [shard.device for shard in table.variables], "small": small.device, "remote": remote.device,
        "totals": strategy.placement.totals, "missing": missing,
        "assigned": {row.name: row.assigned for row in report.operations if row.assigned},
        "crossing": {one.producer: [one.source, one.destination, one.num_bytes] for one in report.transfers},
        "planned": planned.devices["Gather"],
        "sums": [float(step(ids)), float(apply_plan(step, planned)(ids))],
    }  # fmt: skip
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
