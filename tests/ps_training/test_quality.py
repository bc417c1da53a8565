"""Every policy trains to the quality of one device."""

from tests.ps_training import quality_programs


def test_digits_reach_the_accuracy_of_one_device_under_every_policy(chief):
    """Margin 0.05 of accuracy.

    360 test images at 0.95 have a standard error of 0.011, the difference of two runs one of 0.016: 3 of those.
    """
    result = chief(quality_programs.digits)
    alone = result["results"].pop("one device")
    assert alone > 0.93
    print(result["ages"])
    for policy, accuracy in result["results"].items():
        assert accuracy >= alone - 0.05, policy


def test_clicks_reach_the_log_loss_of_one_device_under_every_policy(chief):
    """Trained on the same 6,000 clicks, within 0.05 nats: a synchronous round halves the number of steps.

    A model that knows the mean rate only is at 0.69 nats.
    """
    result = chief(quality_programs.clicks)
    alone = result["results"].pop("one device")
    assert alone < 0.6
    print(result["best"], result["ages"])
    for policy, loss in result["results"].items():
        assert loss <= alone + 0.05, policy
    assert set(result["ages"]["synchronous"]) == {"0"}
