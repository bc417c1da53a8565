"""A run cut in two is the run that was not: bit for bit, and if not, what differs is named."""

import pytest

from tests.checkpoint import resume_programs
from tfdist_ext.checkpoint import assert_resumes_exactly, verify_resume


# 11 batches a pass: cuts within the first pass, within the second, and between two.
def test_c1_c9_c10_c11_one_device_with_all_that_is_random_or_counted():
    assert_resumes_exactly(resume_programs.one_device, k=15, n=9)


@pytest.mark.sweep
def test_c11_cut_between_two_epochs():
    assert_resumes_exactly(resume_programs.noise_in_the_pipeline, k=11, n=12)


def test_c9_a_generator_in_the_pipeline_is_replayed():
    assert_resumes_exactly(resume_programs.noise_in_the_pipeline, k=14, n=4)


@pytest.mark.sweep
def test_epochs_longer_and_shorter_than_a_pass():
    assert_resumes_exactly(resume_programs.one_device, k=9, n=12, fit={"steps_per_epoch": 7})


@pytest.mark.sweep
def test_data_of_unknown_length():
    # 11 batches a pass: the cut is in the second pass, what follows reaches into the fourth.
    assert_resumes_exactly(resume_programs.unknown_length, k=15, n=22)


def test_c4_c11_two_devices():
    assert_resumes_exactly(resume_programs.two_devices, k=5, n=9)


def test_c11_two_workers_with_compressed_gradients():
    assert_resumes_exactly(resume_programs.two_workers, k=14, n=9, num_workers=2)


@pytest.mark.sweep
def test_a_custom_loop():
    assert_resumes_exactly(resume_programs.custom_loop, k=14, n=9)


def test_what_is_not_restored_is_named():
    report = verify_resume(resume_programs.forgets_its_random_state, k=3, n=2)
    assert report.first_difference.startswith("logs 5, after the cut: {'batch': 4, 'loss': ")


@pytest.mark.parametrize("k, n", [(0, 1), (1, 0)])
def test_wrong_counts(k, n):
    with pytest.raises(ValueError, match="must be at least 1"):
        verify_resume(resume_programs.one_device, k, n)


def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        verify_resume("no_such_module:make", 1, 1)
