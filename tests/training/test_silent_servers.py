"""Who is named, and who is given up, of the ps that do not answer? Time is an argument."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.cluster import Task
from tfdist_ext.training.silent_servers import SilentServers

FIRST, SECOND = Task("ps", 0), Task("ps", 1)
ADDRESSES = {FIRST: "10.0.0.1:2222", SECOND: "10.0.0.2:2222"}
PATIENCE = 60.0


def test_a_silent_ps_is_named_after_5_seconds_and_every_30_and_given_up_in_the_end():
    servers = SilentServers(ADDRESSES, 100.0)
    said = {}
    for now in range(101, 171):
        assert servers.heard(FIRST, True, now, PATIENCE) is None
        if (words := servers.heard(SECOND, False, now, PATIENCE)) is not None:
            said[now] = words
        assert servers.given_up(PATIENCE) == ({SECOND: now - 100.0} if now > 160 else {})
    assert list(said) == [105, 135, 165]
    assert said[105] == "ps:1 at 10.0.0.2:2222 does not answer (5 s); training waits 60 s for it."


def test_one_that_answers_again_is_no_longer_given_up():
    servers = SilentServers(ADDRESSES, 0.0)
    servers.heard(FIRST, False, 61.0, PATIENCE)
    servers.heard(SECOND, True, 61.0, PATIENCE)
    assert set(servers.given_up(PATIENCE)) == {FIRST}
    servers.heard(FIRST, True, 62.0, PATIENCE)
    assert servers.given_up(PATIENCE) == {}


@given(st.lists(st.tuples(st.floats(0.1, 40.0), st.booleans()), max_size=40))
def test_given_up_and_named_follow_from_the_last_answer_alone(looks):
    servers = SilentServers({FIRST: "10.0.0.1:2222"}, 0.0)
    times = list(itertools.accumulate(pause for pause, _ in looks))
    last_answer, said_at = 0.0, None
    for now, (_, answers) in zip(times, looks, strict=True):
        words = servers.heard(FIRST, answers, now, PATIENCE)
        if answers:
            last_answer, said_at = now, None
        due = not answers and (now >= last_answer + 5.0 if said_at is None else now >= said_at + 30.0)
        assert (words is not None) == due
        said_at = now if due else said_at
        silence = now - last_answer if not answers else 0.0
        assert servers.given_up(PATIENCE) == ({FIRST: silence} if silence > PATIENCE else {})
