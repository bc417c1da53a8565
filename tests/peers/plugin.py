"""Runs every test of Keras inside of a strategy's scope, entered after the test's own `setUp`; a plugin of pytest."""

import importlib.util
import json
import os
import sys
import types
import unittest

import pytest
import tensorflow as tf

VARIABLE = "TFDIST_EXT_TESTS_PEERS"


def _mirrored():
    import tfdist_ext

    return tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"])


def _parameter_servers():
    import tfdist_ext

    cluster = tfdist_ext.cluster.in_process(2, 1)
    return tfdist_ext.ParameterServerStrategy(cluster, update_policy=tfdist_ext.BoundedStaleness(0))


PLACES = {"one_device": None, "mirrored": _mirrored, "parameter_servers": _parameter_servers}


def _pretend_to_have(*names):
    """Lets modules be imported that some of a file's tests need, and skips those tests."""
    importlib.import_module("keras")  # It looks by itself, and must not find them.

    class Absent(types.ModuleType):
        def __getattr__(self, attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            pytest.skip(f"needs {self.__name__}, which is not installed")

    for name in names:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = Absent(name)


def pytest_configure(config):
    """Makes the strategy, once, and has unittest enter it."""
    settings = json.loads(os.environ[VARIABLE])
    # Keras' repository has it in a file that its package does not bring.
    module = types.ModuleType("conftest")
    module.skip_if_backend = lambda name, reason: pytest.mark.skipif(name == "tensorflow", reason=reason)
    sys.modules["conftest"] = module
    _pretend_to_have("jax", "torch", "grain")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    config.peers_results, config.peers_file = [], settings["results"]
    make = PLACES[settings["place"]]
    if make is None:
        return
    strategy = make()
    call = unittest.TestCase._callTestMethod

    def in_scope(case, method):
        with strategy.scope():
            return call(case, method)

    unittest.TestCase._callTestMethod = in_scope


def pytest_runtest_logreport(report):
    """Keeps what became of each test."""
    if report.when == "call" or report.outcome != "passed":
        words = "" if report.passed else str(report.longrepr).strip().split("\n")[-1][:300]
        error = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = "" if crash is None else crash.message.split("\n")[0][:300]
        _results.append([report.nodeid.split("/")[-1], report.outcome, error or words])


_results: list = []


def pytest_sessionfinish(session):
    """Writes them."""
    with open(session.config.peers_file, "w", encoding="utf-8") as file:
        json.dump(_results, file)
