"""What do the others see when one process dies or stops, and how do they go on? Real processes, real signals."""

import os
import signal
import sys
import time

import keras
import tensorflow as tf

import tfdist_ext
from tests.multi_worker.agreement import facts_of, linear_model, pairs
from tfdist_ext.cluster import ClusterSpecification, Task
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.testing import start_processes

NOTICE_SECONDS = 5.0  # Stock TensorFlow takes 11 s and names nobody.


def free_addresses(count):
    ports = ReservedPorts(count)
    ports.release()
    return [f"127.0.0.1:{port}" for port in ports.ports]


def join(addresses, rank, **arguments):
    cluster = ClusterSpecification.from_jobs({"worker": addresses}, task=Task("worker", rank))
    return tfdist_ext.MultiWorkerMirroredStrategy(cluster, **arguments)


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def lost(call):
    """Calls something that never ends well; returns the typed error's facts, and when it came."""
    try:
        call()
    except tfdist_ext.PeerLostError as error:
        return {**facts_of(error), "at": time.time()}
    raise AssertionError("Nobody was missed.")


def weight_after_one_step(strategy):
    """Returns 2 * mean(1, 3, 1, 3) = 4, from zero."""
    model = linear_model(strategy)
    model.fit(pairs([1, 3, 1, 3], 4), verbose=0)
    return model.get_weights()[0].item()


class SayStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            say("in mid-epoch")


def endless_epoch(strategy):
    model = linear_model(strategy, lambda: keras.optimizers.SGD(0.01))
    model.fit(pairs([1, 3, 5, 7], 4).repeat(), steps_per_epoch=10**9, callbacks=[SayStep()], verbose=0)


def train_lose_one_and_form_the_group_again(addresses, rank):
    strategy = join(addresses, rank)
    error = lost(lambda: endless_epoch(strategy))
    error["kept"] = str(strategy.last_failure)
    say("survived")
    return error, weight_after_one_step(join(addresses, rank))


def join_again(addresses, rank):
    return weight_after_one_step(join(addresses, rank))


def test_M5_kill_one_of_four_in_mid_epoch(worker_pool):
    # TF#42498.
    addresses, victim = free_addresses(4), 1
    per_worker = [{"rank": rank} for rank in range(4)]
    with start_processes(
        train_lose_one_and_form_the_group_again, num_workers=4, addresses=addresses, per_worker=per_worker
    ) as group:
        group.wait_for("in mid-epoch")
        killed = time.time()
        group.kill(victim)
        for rank in (0, 2, 3):
            group.wait_for("survived", rank=rank)
        # Somebody starts the dead worker again, at its address: the survivors go on in the same processes.
        rejoined = worker_pool.run(join_again, num_workers=1, addresses=addresses, rank=victim)
        outcomes = group.outcomes()
        assert outcomes[victim].exit_code == -signal.SIGKILL
        for rank in (0, 2, 3):
            error, weight = outcomes[rank].result
            assert error["type"] == "PeerLostError"
            assert error["task"] == "worker:1" and "worker:1" in error["message"]
            assert error["at"] - killed < NOTICE_SECONDS
            assert error["collective"] and error["step"] >= 4
            assert error["kept"] == error["message"]
            assert weight == 4.0
        assert rejoined == [4.0]
        assert [code for rank, code in enumerate(group.close()) if rank != victim] == [0, 0, 0]


# --- Six workers, of which the last one is lost five times, each time in another way ------------------------------


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(keras.callbacks.Callback):
    """Kills its process in the third batch."""

    def on_test_batch_end(self, batch, logs=None):
        if batch == 2:
            die()

    on_predict_batch_end = on_test_batch_end


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            say("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)


def stopped_in_fit(strategy, is_victim):
    model = linear_model(strategy, lambda: keras.optimizers.SGD(0.01))
    callbacks = [Stops()] if is_victim else []
    return lost(
        lambda: model.fit(pairs([1, 3], 2).repeat(), steps_per_epoch=10**9, callbacks=callbacks, verbose=0)
    )


def dead_in_evaluate(strategy, is_victim):
    model = linear_model(strategy)
    callbacks = [Dies()] if is_victim else []
    return lost(
        lambda: model.evaluate(pairs([1, 3], 2).repeat(), steps=10**9, callbacks=callbacks, verbose=0)
    )


def dead_in_predict(strategy, is_victim):
    model = linear_model(strategy)
    x = pairs([1, 3], 2).repeat().map(lambda x, y: x)
    callbacks = [Dies()] if is_victim else []
    return lost(lambda: model.predict(x, steps=10**9, callbacks=callbacks, verbose=0))


def dead_in_reduce(strategy, is_victim):
    strategy.reduce("SUM", tf.constant(1.0), axis=None)
    if is_victim:
        die()
    return lost(lambda: strategy.reduce("SUM", tf.constant(1.0), axis=None))


def dead_in_function(strategy, is_victim):
    """In a function of the user's, TensorFlow forgets the type of the error; the strategy keeps it."""

    @tf.function
    def total():
        return strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)

    first = float(total())
    if is_victim:
        die()
    try:
        total()
    except tf.errors.UnknownError:
        return {**facts_of(strategy.last_failure), "first": first, "at": time.time()}
    raise AssertionError("Nobody was missed.")


WAYS = [stopped_in_fit, dead_in_evaluate, dead_in_predict, dead_in_reduce, dead_in_function]


def lose_the_last_again_and_again(address_lists, rank):
    """Each time, the survivors form a smaller group in the same processes."""
    found = []
    for way, addresses in zip(WAYS, address_lists, strict=True):
        strategy = join(addresses, rank, peer_timeout_seconds=1.0)
        is_victim = rank == len(addresses) - 1
        found.append(way(strategy, is_victim))
        if is_victim:
            break  # Only the stopped one comes here, once it is let go on.
        say(f"survived {way.__name__}")
    return found


def test_stopped_in_fit_and_dead_in_evaluate_predict_reduce_and_function(worker_pool):
    address_lists = [free_addresses(count) for count in (6, 5, 4, 3, 2)]
    per_worker = [{"rank": rank} for rank in range(6)]
    with start_processes(
        lose_the_last_again_and_again, num_workers=6, address_lists=address_lists, per_worker=per_worker
    ) as group:
        for rank in range(5):
            group.wait_for("survived stopped_in_fit", rank=rank)
        group.resume(5)
        group.wait_for("survived dead_in_function", rank=0)
        outcomes = group.outcomes()
        assert group.close() == [0, -9, -9, -9, -9, 0]
    for way, count, facts in zip(WAYS, (6, 5, 4, 3, 2), outcomes[0].result, strict=True):
        assert facts["type"] == "PeerLostError", way
        assert facts["task"] == f"worker:{count - 1}" and facts["task"] in facts["message"]
        assert facts["collective"] and facts["waited_seconds"] < NOTICE_SECONDS
    stopped, *_, in_function = outcomes[0].result
    assert stopped["step"] >= 3
    assert in_function["first"] == 2.0  # Of two workers: the function itself is right.
    # The one that was stopped learns, when it goes on, that the others have given it up.
    assert outcomes[5].result[0]["type"] == "PeerLostError"
