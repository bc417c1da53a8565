"""Does the judge see what is wrong? By hand, without TensorFlow."""

import numpy as np

from tests.conformance import judge

RUN = {"weights": {"0 Dense": np.array([1.0, 2.0])}, "history": np.array([0.5, 0.25])}


def judged(actual, name="Dense", place="workers", expected=RUN):
    return judge.verdict(place, "layers", name, expected, actual)


def moved(by):
    return {**RUN, "weights": {"0 Dense": np.array([1.0, 2.0 + by])}}


def test_a_run_that_differs_by_roundings_is_equal_and_by_more_is_wrong():
    assert judged(moved(1e-12)).status == "equal"
    assert judged(moved(1e-6)) == judge.Verdict("wrong", "weights/0 Dense by 5e-07")


def test_what_has_another_shape_or_lacks_a_value_is_wrong():
    assert judged({**RUN, "history": np.array([0.5])}).status == "wrong"
    assert judged({"weights": RUN["weights"]}).status == "wrong"
    assert judged(moved(np.nan)).status == "wrong"


def test_what_nobody_tried_is_unjudged():
    assert judged(None).status == "unjudged"


def test_a_known_difference_that_is_gone_is_wrong():
    assert judged(moved(1e-3), "BatchNormalization").status == "differs"
    assert judged(RUN, "BatchNormalization").status == "wrong"
    # One batch at a time has the statistics of one device.
    assert judged(moved(1e-3), "BatchNormalization", "one at a time").status == "wrong"


def test_a_refusal_is_one_only_from_the_package_and_by_name():
    def refusal(message="SpectralNormalization assigns", ours=True):
        return {"error": "NotImplementedError", "message": message, "ours": ours}

    assert judged(refusal(), "SpectralNormalization").status == "refused"
    assert judged(refusal(ours=False), "SpectralNormalization").status == "wrong"
    assert judged(refusal("something assigns"), "SpectralNormalization").status == "wrong"
    assert judged(RUN, "SpectralNormalization").status == "wrong"
    assert judged(refusal(), "Dense").status == "wrong"


def test_a_saved_model_must_be_the_model():
    saved = {"outside": {"0 Dense": np.array(0.0)}, "predictions": np.zeros((3, 2))}
    assert judged({**RUN, "saved": saved}).status == "equal"
    assert judged({**RUN, "saved": {**saved, "outside": {"0 Dense": np.array(1e-3)}}}).status == "wrong"


def test_samples_of_one_distribution_agree_and_of_two_do_not():
    generator = np.random.default_rng(0)
    one, other = ({"mean": generator.normal(size=24)} for _ in range(2))
    assert not judge.improbable_difference(one, other)
    assert judge.improbable_difference(one, {"mean": other["mean"] + 3.0})
