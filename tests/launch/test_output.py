"""Lines leave whole and readable, whatever bytes come in."""

import io
import re
import threading

import hypothesis
from hypothesis import strategies as st

from tfdist_ext.launch.output import LineAssembler, PrefixedPrinter

lines_of_text = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))


def cut(data, positions):
    edges = [0, *sorted(position % (len(data) + 1) for position in positions), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@hypothesis.given(lines_of_text, st.lists(st.integers(0, 10_000)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(lines, positions):
    data = "".join(f"{line}\n" for line in lines).encode()
    assembler = LineAssembler()
    out = [line for piece in cut(data, positions) for line in assembler.feed(piece)]
    assert out + assembler.finish() == [line if line.strip(" \t") else "" for line in lines]


@hypothesis.given(st.binary(), st.lists(st.integers(0, 10_000)))
def test_binary_garbage_becomes_clean_lines(data, positions):
    assembler = LineAssembler(max_line_bytes=50)
    lines = [line for piece in cut(data, positions) for line in assembler.feed(piece)] + assembler.finish()
    for line in lines:
        assert "\n" not in line and "\r" not in line and "\b" not in line
        line.encode()


def test_a_progress_bar_becomes_its_last_state():
    assembler = LineAssembler()
    assert assembler.feed(b"Epoch 1\n") == ["Epoch 1"]
    # As Keras draws it.
    assert assembler.feed(b"\r\x1b[1m 1/10\x1b[0m" + b"\b" * 5) == []
    assert assembler.state_of_progress_bar() == "\x1b[1m 1/10\x1b[0m"
    assert assembler.feed(b"\r10/10 - loss: 0.5\n") == ["10/10 - loss: 0.5"]
    assert assembler.state_of_progress_bar() is None


def test_windows_line_ends_and_empty_lines():
    assembler = LineAssembler()
    assert assembler.feed(b"a\r") + assembler.feed(b"\n\nb\n") == ["a", "", "b"]


def test_a_partial_last_line_is_kept_to_the_end():
    assembler = LineAssembler()
    assert assembler.feed(b"half a l") == []
    assert assembler.finish() == ["half a l"]
    assert assembler.finish() == []


def test_memory_is_bounded():
    assembler = LineAssembler(max_line_bytes=100)
    for state in range(1000):
        assert assembler.feed(b"\r%9d of a thousand" % state) == []
    assert len(assembler._pending) <= 140
    assert assembler.feed(b"\n") == ["      999 of a thousand"]
    assert assembler.feed(b"x" * 250) == ["x" * 250]


def test_lines_of_many_threads_are_never_mixed():
    stream = io.BytesIO()
    printer = PrefixedPrinter(stream)
    threads = [
        threading.Thread(target=lambda n=n: [printer.write(f"t{n}", ["a" * 50] * 3) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().decode().splitlines()
    assert sorted(lines) == sorted(f"[t{n}] {'a' * 50}" for n in range(4) for _ in range(150))


def test_a_reader_that_left_does_not_stop_the_tasks():
    class Closed(io.BytesIO):
        def write(self, data):
            raise BrokenPipeError

    printer = PrefixedPrinter(Closed())
    printer.write("t", ["a"])
    printer.write("t", ["b"])


def test_hidden_lines_are_not_shown():
    stream = io.BytesIO()
    PrefixedPrinter(stream, hidden=re.compile("noise|I0000")).write("t", ["noise 1", "a noise", "I0000 x"])
    assert stream.getvalue() == b"[t] a noise\n"
